"""Connections between a trainer and an agent: what is asked is answered once, or lost."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from waiting import until

from cseq.fleet import link as links
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.link import Link, Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from functools import partial

    Answer = Any
    Connect = Callable[[Callable[[Any], Answer]], "Both"]

HOST = "127.0.0.1"
SECONDS = 20.0


class Both:
    """Both ends of a connection, and what has come back."""

    def __init__(self, make: Callable[[Any], Answer]) -> None:
        self.listener = Listener(HOST, make)
        self.came: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.link = self.connect(self.listener.key)

    def connect(self, key: bytes) -> Link:
        """Make a connection more."""
        link = Link(HOST, self.listener.port, key)
        link.open()
        return link

    def send(self, number: int, link: Link | None = None) -> None:
        """Ask for something."""
        request = np.array([number])
        (link or self.link).send(request, lambda outcome: self.came.put((number, outcome)))

    def next(self) -> tuple[int, Any]:
        """Return what comes next, and to which request."""
        return self.came.get(timeout=SECONDS)

    def close(self) -> None:
        """Close both ends."""
        self.link.close()
        self.listener.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make connections, and see that none of their threads stays."""
    before, made = set(threading.enumerate()), []

    def make(answer: Callable[[Any], Answer]) -> Both:
        made.append(Both(answer))
        return made[-1]

    yield make
    for both in made:
        both.close()
    until(lambda: not set(threading.enumerate()) - before)  # some may not have begun to run


def echo(request: Any) -> Answer:
    """Answer with the request."""
    return [request.view(np.uint8)]


def pattern(number: int, size: int) -> Any:
    """Return bytes that are others for each number."""
    return (np.arange(size, dtype=np.uint64) * (2 * number + 1) >> 3).astype(np.uint8)


def test_parts_of_any_size_arrive_as_they_were(connect):
    """None, empty ones, and some that a socket takes in many pieces."""
    sizes = [0, 1, 63, 65_535, 65_536, 1_000_003, 40_000_000]
    both = connect(lambda request: [pattern(k, size) for k, size in enumerate(sizes)][: request[0]])
    for number in range(len(sizes) + 1):
        both.send(number)
    for _ in range(len(sizes) + 1):
        number, parts = both.next()
        assert len(parts) == number
        for k, part in enumerate(parts):
            np.testing.assert_array_equal(part, pattern(k, sizes[k]))


def test_large_parts_are_received_where_their_request_says(connect):
    """The first part never."""
    sizes = [3_000_000, 0, 70_000, 1_000_000]
    both = connect(lambda _: [pattern(k, size) for k, size in enumerate(sizes)])
    rooms = [np.empty(size, np.uint8) for size in sizes[1:]]
    asked, left = [], list(rooms)

    def land(nbytes):
        asked.append(nbytes)
        return left.pop(0)

    both.link.send(np.array([0]), lambda outcome: both.came.put((0, outcome)), land)
    both.send(1)
    for _ in range(2):
        number, parts = both.next()
        for k, part in enumerate(parts):
            np.testing.assert_array_equal(part, pattern(k, sizes[k]))
        is_there = [any(part is room for room in rooms) for part in parts]
        assert is_there == ([False] * 4 if number else [False, True, True, True])
    assert asked == sizes[1:]


def test_answers_come_in_any_order(connect):
    """The second and third request are answered before the first, which waits for them."""
    rest = threading.Semaphore(0)

    def make(request: Any) -> Answer:
        if not request[0]:
            assert rest.acquire(timeout=SECONDS)
            assert rest.acquire(timeout=SECONDS)
        return echo(request)

    both = connect(make)
    for number in range(3):
        both.send(number)
    first = sorted(both.next()[0] for _ in range(2))
    rest.release(2)
    assert [*first, both.next()[0]] == [1, 2, 0]


def test_a_ping_is_answered_beside_all_parcels(connect):
    """An agent that works on as many as it may have gives a sign of life."""
    over = threading.Event()
    both = connect(lambda request: echo(request) if not request[0] or over.wait(SECONDS) else [])
    for _ in range(links.AHEAD + 1):
        both.send(1)
    both.send(0)
    assert both.next()[0] == 0
    over.set()
    assert [both.next()[0] for _ in range(links.AHEAD + 1)] == [1] * (links.AHEAD + 1)


def test_what_was_answered_is_not_kept(connect):
    """Not until the next answer, which may be long in coming: it has a whole pool."""

    class Done:
        def __init__(self) -> None:
            self.is_called = threading.Event()

        def __call__(self, _: Any) -> None:
            self.is_called.set()

    both, done = connect(echo), Done()
    both.link.send(np.array([1]), done)
    assert done.is_called.wait(SECONDS)
    here = weakref.ref(done)
    del done
    until(lambda: here() is None)


def test_without_memory_for_an_answer_the_connection_is_lost(connect):
    """What else is under way, too: it is made by others."""

    def land(_: int) -> Any:
        raise MemoryError("no room for it")

    both = connect(lambda _: [pattern(0, 1), pattern(1, 100_000)])
    both.link.send(np.array([1]), lambda outcome: both.came.put((1, outcome)), land)
    assert "MemoryError: no room for it" in both.next()[1].cause
    both.send(2)
    assert both.next() == (2, both.link.lost)


@pytest.mark.parametrize("work", ["_write", "_welcome", "_serve"])
def test_without_a_thread_the_connection_is_lost_and_the_next_is_served(connect, monkeypatch, work):
    """Of either end; `_serve`: without the second one of an agent."""
    both, make, left = connect(echo), links.thread, ["one"] if work == "_serve" else []
    both.send(0)
    assert both.next()[0] == 0

    def start() -> None:
        raise RuntimeError("can't start new thread")

    def thread(target: partial[None]) -> threading.Thread:
        made = make(target)
        if target.func.__name__ == work and not (left and left.pop()):
            monkeypatch.setattr(made, "start", start)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(links, "thread", thread)
        lost = both.connect(both.listener.key)
        until(lambda: lost.lost is not None)
    both.send(1, lost)
    assert both.next() == (1, lost.lost)
    other = both.connect(both.listener.key)
    both.send(2, other)
    assert both.next()[0] == 2
    other.close()


def test_a_failure_arrives_as_itself(connect):
    """What the server has raised is packed there."""
    both = connect(lambda _: Failed(b"packed"))
    both.send(0)
    assert both.next() == (0, Failed(b"packed"))


@pytest.mark.parametrize("key", [b"", b"x" * 32], ids=["none", "another"])
def test_without_the_key_nothing_is_made(connect, key, caplog):
    """What it sends is lost; the agent says who came, and serves the others."""
    asked = []
    both = connect(lambda request: asked.append(request) or echo(request))
    stranger = both.connect(key)
    both.send(5, stranger)
    number, lost = both.next()
    assert (number, type(lost)) == (5, Lost)
    assert f"port {both.listener.port}" in lost.cause
    assert not asked
    both.send(6)
    assert both.next()[0] == 6
    until(lambda: "has not the key" in caplog.text)


def test_another_listener_is_refused():
    """A trainer sends nothing to what has its agent's port, and not its key."""
    with socket.create_server((HOST, 0)) as other:
        link = Link(HOST, other.getsockname()[1], b"k" * 32)
        came: queue.Queue[Any] = queue.Queue()
        link.send(np.array([1]), came.put)
        link.open()
        connection, _ = other.accept()
        with connection:
            connection.sendall(bytes(32))
            read = links.exactly(connection, 64)  # its nonce and its proof
            assert len(read) == 64
            connection.sendall(bytes(32))
            assert "has not the key" in came.get(timeout=SECONDS).cause
            assert connection.recv(1) == b""


def test_nobody_listens() -> None:
    """What was sent before is lost, and what is sent after."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    link = Link(HOST, port, b"")
    came: queue.Queue[Any] = queue.Queue()
    link.send(np.array([1]), came.put)
    link.open()
    lost = came.get(timeout=SECONDS)
    assert "ConnectionRefusedError" in lost.cause
    link.send(np.array([2]), came.put)
    assert came.get(timeout=SECONDS) == lost == link.lost


def test_a_listener_that_says_nothing(monkeypatch):
    """The machine takes the connection, the agent is stopped."""
    monkeypatch.setattr(links, "OPEN_SECONDS", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        link = Link(HOST, silent.getsockname()[1], b"")
        came: queue.Queue[Any] = queue.Queue()
        link.send(np.array([1]), came.put)
        link.open()
        assert "timed out" in came.get(timeout=SECONDS).cause


@pytest.mark.parametrize("end", ["link", "listener", "interrupted"])
def test_what_is_under_way_is_lost_once(connect, end):
    """Whichever end closes the connection; a later answer finds nobody."""
    begun, over = threading.Semaphore(0), threading.Event()

    def make(request: Any) -> Answer:
        begun.release()
        assert over.wait(SECONDS)
        if end == "interrupted":
            raise InterruptedError("the server was closed")
        return echo(request)

    both = connect(make)
    for number in range(5):
        both.send(number)
    for _ in range(links.AHEAD + 1):
        assert begun.acquire(timeout=SECONDS)
    if end == "interrupted":
        over.set()
    else:
        getattr(both, end).close()
    came = [both.next() for _ in range(5)]
    over.set()
    assert sorted(number for number, _ in came) == [0, 1, 2, 3, 4]
    assert all(isinstance(outcome, Lost) for _, outcome in came)
    both.send(5)
    assert both.next() == (5, both.link.lost)
    assert both.came.empty()


def test_a_trainer_that_reads_nothing_stops_no_other(connect):
    """Its answers fill the connection, and keep the threads of this connection alone."""
    large = np.zeros(64 << 20, np.uint8)
    both = connect(lambda request: [large] if request[0] < 0 else echo(request))
    stopped = socket.create_connection((HOST, both.listener.port))
    with stopped:
        links.prove(stopped, both.listener.key, b"trainer", b"agent")
        for number in range(10):
            links.transmit(stopped, number, [np.array([-1]).view(np.uint8)])
        assert stopped.recv(1)
        for number in range(20):
            both.send(number)
        assert sorted(both.next()[0] for _ in range(20)) == list(range(20))


def test_sending_does_not_wait_for_an_agent_that_reads_nothing(connect):
    """Three requests are in work, and one is larger than what a socket takes."""
    over = threading.Event()
    both = connect(lambda request: echo(request) if over.wait(SECONDS) else [])
    for number in range(links.AHEAD + 1):
        both.send(number)
    before = time.thread_time()
    both.link.send(np.zeros(8 << 20, np.int64), lambda outcome: both.came.put((3, outcome)))
    both.send(4)
    assert time.thread_time() - before < SECONDS
    assert both.came.empty()
    over.set()
    assert sorted(both.next()[0] for _ in range(5)) == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_copy_of_a_forked_process_ends_nothing(connect):
    """It has the same socket, which `close` would shut for both."""
    both = connect(echo)
    both.send(1)
    assert both.next()[0] == 1
    child = os.fork()
    if not child:
        both.link.close()
        os._exit(0 if both.link.lost is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    both.send(2)
    assert both.next()[0] == 2
