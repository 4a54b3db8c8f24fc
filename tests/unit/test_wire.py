"""The connection between a trainer and an agent: messages, proofs, memory that is used again."""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cseq.encoding.pickling import dumps
from cseq.fleet import wire
from cseq.fleet.wire import Buffers, Connection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunScript

KEY = b"k" * 32


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


@pytest.fixture
def ends(pair: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Connection, Connection]]:
    """An agent's end, and a trainer's."""
    made: list[Connection] = []
    agent = threading.Thread(target=lambda: made.append(Connection(pair[0], KEY, is_agent=True)))
    agent.start()
    trainer = Connection(pair[1], KEY, is_agent=False)
    agent.join()
    yield made[0], trainer
    trainer.close()
    made[0].close()


BATCHES: list[Any] = [
    np.arange(5),
    {"a": np.arange(300.0), "b": [np.zeros((0, 3)), np.arange(700, dtype=">i2")], "c": "text"},
    tuple(np.full(1000 + k, k) for k in range(50)),
    (np.arange(3_000_003, dtype="u1"), np.ones(300)),
]


@pytest.mark.parametrize("batch", BATCHES, ids=["small", "dict", "many", "large"])
def test_messages_arrive_whole(ends: tuple[Connection, Connection], batch: Any) -> None:
    """Their arrays can be written to, and lie where processors like them to."""
    agent, trainer = ends
    buffers: list[memoryview] = []
    data = dumps(batch, buffers)
    sender = threading.Thread(target=agent.send, args=(data, buffers))
    sender.start()
    got, parts = trainer.receive(Buffers().take)
    sender.join()
    np.testing.assert_equal(pickle.loads(got, buffers=parts), batch)
    places = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert all(place % wire.ALIGN == 0 for place in places)
    assert not any(part.readonly for part in parts)


def test_an_end_that_closes_ends_the_other(
    pair: tuple[socket.socket, socket.socket], ends: tuple[Connection, Connection]
) -> None:
    """Also in the middle of a message. One that is silent is an error after `wait_for`."""
    agent, trainer = ends
    trainer.wait_for(0.05)
    with pytest.raises(TimeoutError):
        trainer.receive()
    pair[0].sendall(wire.HEAD.pack(100, 0) + b"only this")
    agent.close()
    with pytest.raises(EOFError, match="closed at the other end"):
        trainer.receive()


@pytest.mark.parametrize("is_agent", [False, True])
def test_who_has_no_key_is_refused(
    pair: tuple[socket.socket, socket.socket],
    is_agent: bool,
) -> None:
    """One that sends back what it gets: each end proves that it is the other one."""

    def reflect() -> None:
        for _ in range(2):
            pair[1].sendall(pair[1].recv(wire.NONCE, socket.MSG_WAITALL))

    stranger = threading.Thread(target=reflect)
    stranger.start()
    with pytest.raises(PermissionError, match="has not the key"):
        Connection(pair[0], KEY, is_agent=is_agent)
    stranger.join()


def test_one_deadline_holds_for_the_whole_proof(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not begin anew with a byte of the other end's."""
    now = itertools.count()  # each look at the clock takes a second

    class Trickles:
        """A socket that gives a byte at a time."""

        waits: list[float] = []  # noqa: RUF012

        def settimeout(self, seconds: float) -> None:
            self.waits.append(seconds)
            if len(self.waits) > 1 and seconds <= 1e-3:
                raise TimeoutError

        def recv_into(self, memory: memoryview, *_: int) -> int:
            memory[:1] = b"x"
            return 1

        def __getattr__(self, _: str) -> Any:
            return lambda *_: None

    monkeypatch.setattr(wire.time, "monotonic", lambda: next(now))
    with pytest.raises(TimeoutError):
        Connection(Trickles(), KEY, is_agent=True)  # type: ignore[arg-type]
    assert len(Trickles.waits) <= 2 + wire.PROOF_SECONDS
    assert pair


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    """Blocks are never more than were in use at a time, whatever their sizes."""
    buffers = Buffers()

    def array(size: int, value: int) -> Any:
        memory = memoryview(buffers.take(size))
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


STRANGERS = """
import importlib.util, os, socket, threading, time
from cseq.fleet import wire

theirs = importlib.util.module_from_spec(wire.__spec__)  # of the trainer, which is patient
wire.__spec__.loader.exec_module(theirs)
theirs.PROOF_SECONDS, wire.PROOF_SECONDS, wire.STRANGERS = 60.0, 0.2, 8

def serve(connection):
    while True:
        connection.send(connection.receive()[0], [])

listener = wire.Listener("127.0.0.1", serve)
address = "127.0.0.1", listener.port
before, descriptors = len(threading.enumerate()), len(os.listdir("/proc/self/fd"))
strangers = [socket.create_connection(address) for _ in range(40)]
raw = socket.create_connection(address)  # behind all of them
done, most = [], 0
meet = lambda: done.append(theirs.Connection(raw, listener.key, is_agent=False))
thread = threading.Thread(target=meet)
thread.start()
while thread.is_alive():
    most = max(most, len(threading.enumerate()) - before - 1)
    time.sleep(0.002)
done[0].send(b"hello", [])
assert done[0].receive()[0] == b"hello"
done[0].close()
for one in strangers:
    one.close()
while len(os.listdir("/proc/self/fd")) > descriptors:
    time.sleep(0.01)
print("at most", most)
"""


def test_strangers_are_few_at_a_time(run_script: RunScript) -> None:
    """Who has the key waits for them, and is served; one line of the log tells of them all."""
    done = run_script(STRANGERS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 9
    assert done.stderr.count("refused a connection from 127.0.0.1") == 1
