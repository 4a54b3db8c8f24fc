"""The keeper: who watches over worker processes, replaces the dead and ends them all."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cseq import keeper as keeper_module
from cseq.keeper import ENTERED, FAILED, HEADER, NOTED, READY, Keeper, _Ward, send_state
from cseq.launcher import make_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunScript

    from cseq.launcher import Launcher

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="its workers are forked here")


def obey(sock: socket.socket, local: Any = None) -> None:
    """Be a worker: do what is written to the socket, one byte at a time, until it ends."""
    while order := sock.recv(1):
        if order == b"R":
            send_state(sock, READY)
        elif order == b"F":
            send_state(sock, FAILED, b"why " * 50_000)
        elif order == b"H":  # a message in pieces, and never the last one
            sock.sendall(READY + struct.pack("<Q", 5)[:3])
        elif order == b"K":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == b"S":
            threading.Event().wait()
        elif order == b"3":
            os._exit(3)


class Steward:
    """Tells workers what to do, and notes down what it is asked."""

    def __init__(self, *orders: bytes, replace: bool = True) -> None:
        self.orders = list(orders)
        self.replace = replace
        self.socks: dict[int, socket.socket] = {}
        self.events: list[Any] = []
        self.changed = threading.Condition()

    def note(self, *event: Any) -> None:
        """Note something down."""
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def await_events(self, count: int) -> list[Any]:
        """Wait until so many things were noted down."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) >= count)
            return list(self.events)

    def greet(self, owner: int, sock: socket.socket, stacks: int) -> None:
        """Give a new worker its order."""
        self.socks[owner] = sock
        if self.orders:
            sock.sendall(self.orders.pop(0))
        self.note("greet", owner)

    def failed(self, owner: int, packed: bytes) -> None:
        """Learn why one cannot get ready."""
        self.note("failed", owner, len(packed))

    def died(self, owner: int, exitcode: int | None, *, was_ready: bool) -> bool:
        """Learn of a death."""
        self.note("died", owner, exitcode, was_ready)
        return self.replace

    def broke(self, error: BaseException) -> None:
        """Learn that the keeper broke."""
        self.note("broke", error)

    def end(self) -> None:
        """Let the workers leave, as a closed ring does."""
        self.replace = False
        for sock in list(self.socks.values()):
            if sock.fileno() >= 0:
                sock.shutdown(socket.SHUT_WR)


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make keepers that are closed after the test."""
    made: list[tuple[Keeper, Steward]] = []

    def make(steward: Steward, owners: int = 1) -> Keeper:
        launcher = make_launcher("fork", entry=f"{__name__}:obey")
        keeper = Keeper(launcher, steward, range(1, owners + 1), None)
        keeper.prepare()
        keeper.launch()
        made.append((keeper, steward))
        return keeper

    yield make
    for keeper, steward in made:
        steward.end()
        keeper.close()


def test_all_are_started(keep: Any) -> None:
    """Every worker is started and greeted, and its process is known."""
    steward = Steward(b"R", b"R", b"R")
    keeper = keep(steward, 3)
    assert steward.await_events(3) == [("greet", 1), ("greet", 2), ("greet", 3)]
    pids = {keeper.pid(owner) for owner in (1, 2, 3)}
    assert len(pids) == 3
    assert None not in pids
    assert keeper.pid(4) is None


def test_the_dead_are_replaced(keep: Any) -> None:
    """A death is told with its status, and whether the worker was ready; another one takes over."""
    steward = Steward(b"RK", b"3", b"RR3", b"R")
    keep(steward)
    assert steward.await_events(7) == [
        ("greet", 1),
        ("died", 1, -signal.SIGKILL, True),
        ("greet", 1),
        ("died", 1, 3, False),
        ("greet", 1),
        ("died", 1, 3, True),
        ("greet", 1),
    ]


def test_the_dead_are_not_replaced(keep: Any) -> None:
    """A steward may want no replacement."""
    steward = Steward(b"K", replace=False)
    keeper = keep(steward)
    assert steward.await_events(2)[1] == ("died", 1, -signal.SIGKILL, False)
    keeper.kill(1)  # there is nobody: no matter
    assert keeper.pid(1) is None


def test_one_that_is_killed(keep: Any) -> None:
    """A worker that is killed by the keeper dies like any other."""
    steward = Steward(b"RS")
    keeper = keep(steward)
    steward.await_events(1)
    keeper.kill(1)
    assert steward.await_events(3)[1:] == [("died", 1, -signal.SIGKILL, True), ("greet", 1)] or (
        steward.events[1][:3] == ("died", 1, -signal.SIGKILL)  # it may not have been ready yet
    )


def test_one_that_cannot_get_ready(keep: Any) -> None:
    """The reason arrives whole, however long it is, before the death of its worker."""
    steward = Steward(b"F3", replace=False)
    keep(steward)
    assert steward.await_events(3)[1:] == [("failed", 1, 200_000), ("died", 1, 3, False)]


def test_one_that_dies_while_it_speaks(keep: Any) -> None:
    """Half a message from a worker that dies is a death, and no message."""
    steward = Steward(b"HK", replace=False)
    keep(steward)
    assert steward.await_events(2)[1:] == [("died", 1, -signal.SIGKILL, False)]


def test_one_that_is_dead_before_it_is_greeted(keep: Any) -> None:
    """A greeting that finds nobody is no error: the death is told in its turn."""

    class Late(Steward):
        def greet(self, owner: int, sock: socket.socket, stacks: int) -> None:
            """Find the connection broken, the first time."""
            super().greet(owner, sock, stacks)
            if len(self.events) == 1:
                raise BrokenPipeError

    steward = Late(b"3", b"R")
    keep(steward)
    assert steward.await_events(3) == [("greet", 1), ("died", 1, 3, False), ("greet", 1)]


def test_a_keeper_that_breaks(keep: Any) -> None:
    """What goes wrong in the keeper's own thread is told; `close` still ends everything."""

    class Clumsy(Steward):
        def greet(self, owner: int, sock: socket.socket, stacks: int) -> None:
            """Raise, with a worker started already."""
            super().greet(owner, sock, stacks)
            raise LookupError("clumsy")

    steward = Clumsy()
    keep(steward, 2)
    event, error = steward.await_events(2)[1]
    assert (event, type(error)) == ("broke", LookupError)


def ending_last(steward: Steward) -> Launcher:
    """Make a launcher whose workers end once the keeper closes: before, one would count as dead."""
    launcher = make_launcher("fork", entry=f"{__name__}:obey")
    cancel = launcher.cancel

    def end() -> None:
        cancel()
        steward.end()

    launcher.cancel = end  # type: ignore[method-assign]
    return launcher


def test_close_waits_for_all() -> None:
    """`close` returns when every worker has left; none of them counts as dead."""
    steward = Steward(b"R", b"R")
    keeper = Keeper(ending_last(steward), steward, (1, 2), None)
    keeper.prepare()
    keeper.launch()
    steward.await_events(2)
    keeper.close()
    assert [event[0] for event in steward.events] == ["greet", "greet"]
    assert keeper.pid(1) is None


def test_close_kills_the_busy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that do not leave in time are killed, and the log says so."""
    monkeypatch.setattr(keeper_module, "GRACE", 0.05)
    steward = Steward(b"RS", b"R")
    keeper = Keeper(ending_last(steward), steward, (1, 2), None)
    keeper.prepare()
    keeper.launch()
    steward.await_events(2)
    keeper.close()
    assert [event[0] for event in steward.events] == ["greet", "greet"]
    assert "worker 0 is busy: killed" in caplog.text


def test_close_tells_of_bad_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that ends badly while it leaves is in the log."""
    caplog.set_level(logging.WARNING)

    class Last(Steward):
        def end(self) -> None:
            """Give the last order after the keeper began to close."""
            self.socks[1].sendall(b"3")

    steward = Last(b"R")
    keeper = Keeper(ending_last(steward), steward, (1,), None)
    keeper.prepare()
    keeper.launch()
    steward.await_events(1)
    keeper.close()
    assert "worker 0 exited with code 3" in caplog.text


def test_close_at_once() -> None:
    """`close` right after the start leaves nobody, whoever was being started just then."""
    for _ in range(5):
        steward = Steward(b"R", b"R", b"R")
        keeper = Keeper(make_launcher("fork", entry=f"{__name__}:obey"), steward, (1, 2, 3), None)
        keeper.prepare()
        keeper.launch()
        steward.end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeper_module, "GRACE", 0.05)
            keeper.close()


def test_the_stack_of_nobody(keep: Any) -> None:
    """Where a worker is cannot be told if it is not there, or not ready."""
    steward = Steward(b"")
    keeper = keep(steward)
    steward.await_events(1)
    for owner in (1, 2):
        assert "cannot be asked" in keeper.stack(owner)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_messages_arrive_in_any_pieces(size: int) -> None:
    """Whatever the pieces are that arrive, also with the bytes of a message in another's body."""
    body = b"why\0\0E" * 3
    for last, told in ((READY, b""), (FAILED, body)):
        noted = HEADER.pack(NOTED, 4) + b"look"
        sent = HEADER.pack(ENTERED, 0) + HEADER.pack(last, len(told)) + told + noted
        ward = _Ward(1, None)  # type: ignore[arg-type]
        pieces = [ward.feed(sent[k : k + size]) for k in range(0, len(sent), size)]
        failed = [(FAILED, body)] if last == FAILED else []
        assert [each for piece in pieces for each in piece] == [*failed, (NOTED, b"look")]
        assert ward.state == last
        assert ward.entered > 0


BETWEEN = """
import faulthandler, os, socket, sys, threading, time
import cseq, cseq.keeper

class Slow:
    def __init__(self):
        # Ready only when it has been asked for its stacks in the middle of a message.
        class Halves:
            def __init__(self, sock):
                self.sock = sock
            def sendall(self, data):
                half = len(data) // 2
                self.sock.sendall(data[:half])
                for _ in range(5):
                    os.kill(os.getpid(), cseq.keeper.STACK_SIGNAL)
                self.sock.sendall(data[half:])
        send = cseq.keeper.send_state
        def in_halves(sock, state, body=b""):
            send(Halves(sock), state, body)
        import cseq.pools.process as process
        process.send_state = in_halves

    def __getitem__(self, indices):
        return indices

class Bad(Slow):
    def __init__(self):
        super().__init__()
        raise ValueError("bad " * 100_000)

with cseq.MPSequence(Slow, 8, 2, batch_size=2, out_type="null", seed=1).start() as batches:
    print(sorted(i for batch in batches for i in batch.tolist()))
try:
    with cseq.MPSequence(Bad, 8, 1, out_type="null").start() as batches:
        list(batches)
except ValueError as error:
    print(len(str(error)))
"""


@pytest.mark.skipif(keeper_module.STACK_SIGNAL is None, reason="no stacks here")
def test_stacks_in_the_middle_of_a_message(run_script: RunScript) -> None:
    """Stacks that are written while a worker is within a message leave the message whole."""
    done = run_script(BETWEEN)
    assert done.stdout.split("\n")[:2] == [str(list(range(8))), "400000"], done.stderr
