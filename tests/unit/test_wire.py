"""The connection between a trainer and an agent: messages, proofs and reused memory."""

import contextlib
import pickle
import socket
import struct
import threading

import numpy as np
import pytest

from cseq.encoding.pickling import dumps
from cseq.fleet import wire
from cseq.fleet.wire import Buffers, Connection

# Ray's clusters need POSIX, and Wine 8 lacks TCP_KEEPIDLE.
pytestmark = pytest.mark.needs("POSIX")

KEY = b"k" * 32


@pytest.fixture
def pair():
    """Return the two sockets of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


@contextlib.contextmanager
def beside(function):
    """Run a function in another thread."""
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join()


@pytest.fixture
def ends(pair):
    """Return an agent's end, and a trainer's."""
    made = []
    with beside(lambda: made.append(Connection(pair[0], KEY, is_agent=True))):
        trainer = Connection(pair[1], KEY, is_agent=False)
    yield made[0], trainer
    trainer.close()
    made[0].close()


BATCHES = [
    np.arange(5),
    {"a": np.arange(300.0), "b": [np.zeros((0, 3)), np.arange(700, dtype=">i2")], "c": "text"},
    tuple(np.full(1000 + k, k) for k in range(50)),
    (np.arange(3_000_003, dtype="u1"), np.ones(300)),
]


@pytest.mark.parametrize("batch", BATCHES, ids=["small", "dict", "many", "large"])
def test_messages_arrive_whole(ends, batch):
    """Their arrays are writable, and aligned for processors."""
    agent, trainer = ends
    buffers = []
    data = dumps(batch, buffers)
    with beside(lambda: agent.send(data, buffers)):
        got, parts = trainer.receive(Buffers().take_memory)
    np.testing.assert_equal(pickle.loads(got, buffers=parts), batch)
    places = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert all(place % wire.ALIGN == 0 for place in places)
    assert not any(part.readonly for part in parts)


def test_an_end_that_closes_ends_the_other(ends):
    """It holds even in the middle of a message. A silent end is awaited for the given time."""
    agent, trainer = ends
    assert not trainer.wait(0.05)

    def send():
        with contextlib.suppress(OSError):
            agent.send(b"", [memoryview(bytes(1 << 24))])

    with beside(send):
        assert trainer.wait(None)
        trainer.close()
        with pytest.raises((OSError, ValueError)):
            trainer.receive()
    agent.close()


@pytest.mark.parametrize("is_agent", [False, True])
def test_who_has_no_key_is_refused(pair, is_agent):
    """Neither end talks to one with another key."""
    refused = []

    def ask():
        try:
            Connection(pair[1], b"another", is_agent=not is_agent)
        except (OSError, EOFError) as error:
            refused.append(error)

    with beside(ask), pytest.raises(PermissionError, match="does not have the key"):
        Connection(pair[0], KEY, is_agent=is_agent)
    assert len(refused) == 1


def test_who_sends_back_what_it_gets_is_refused(pair):
    """It has nothing that could count as a proof."""

    def reflect():
        with contextlib.suppress(OSError):
            while got := pair[1].recv(4096):
                pair[1].sendall(got)

    with beside(reflect), pytest.raises(PermissionError, match="does not have the key"):
        Connection(pair[0], KEY, is_agent=False)


def test_one_deadline_holds_for_the_whole_proof(pair, monkeypatch):
    """A byte from the other end does not restart it."""
    monkeypatch.setattr(wire, "PROOF_SECONDS", 0.2)
    over, sent = threading.Event(), 0

    def trickle():
        nonlocal sent
        pair[1].send(struct.pack("!i", 200))
        # The connection is closed when its time is up.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not over.wait(0.02):
                sent += pair[1].send(b"x")

    with beside(trickle):
        with pytest.raises((OSError, EOFError)):
            Connection(pair[0], KEY, is_agent=True)
        over.set()
    assert sent < 64


def test_memory_is_used_again_once_nothing_refers_to_it():
    """The number of blocks never exceeds the most in use at a time, for any sizes."""
    buffers = Buffers()

    def array(size, value):
        memory = memoryview(buffers.take_memory(size))
        made = np.ndarray(size // 2, np.uint8, memory[size // 4 :])
        made[:] = value
        return made

    size = wire.LARGE
    held = [array(size, k) for k in range(3)]
    places = {one.ctypes.data for one in held}
    part = held[0][5:10][::2]
    assert [one[0] for one in held] == [0, 1, 2]
    held.clear()
    again = [array(size, 9) for _ in range(2)]
    assert {one.ctypes.data for one in again} < places
    assert part.tolist() == [0] * 3
    again.clear()
    assert {array(size, k).ctypes.data for k in range(20)} < places
