"""Connections between trainers and agents: parcels there, their batches back.

::

    trainer                                            agent
      Link.send ─► thread ══ number, request ═════════►  threads of a Listener ─► make
      done ◄────── thread ◄═ number, answer ═══════════

A message is its number, how many parts it has and how large each is, in 64-bit words,
little-endian; then the bytes of the parts. An answer has the number of its request; answers come
in any order. Its parts after the first one, which are large, are received where the request says.
First both ends prove that they have the key, without sending it. What they send then is neither
encrypted nor signed: the network is trusted, as Ray trusts it.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from cseq.encoding import failure
from cseq.fleet.agent import Failed, Lost
from cseq.fleet.ledger import AHEAD
from cseq.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from cseq.fleet.agent import Land, Outcome

    Answer = list[NDArray[np.uint8]] | Failed

__all__ = ["Link", "Listener"]

log = logging.getLogger("cseq")

OPEN_SECONDS = 10.0  # to connect, and for each step of the proofs
AGAIN_SECONDS = 0.1  # after which a listener that could take no connection tries again
CLOSE_SECONDS = 2.0
# Seconds, seconds, count: of what is sent to find out whether a machine is still there.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
NONCE = PROOF = 32  # bytes
HEAD = struct.Struct("<qq")  # of a message: its number, and how many parts it has
FAILED = -1  # in the place of how many: one part, which is a packed failure
SMALL = 1 << 16  # bytes of a message that is sent with one call


def private(nbytes: int) -> NDArray[np.uint8]:
    """Make room for what is received: a `Land`."""
    return np.empty(nbytes, np.uint8)


class Listener:
    """An agent's end: what trainers connect to.

    Parameters
    ----------
    host : str
        The address of this machine at which the others reach it.
    make : callable
        ``make(request)``: an answer, or `Failed`. On any thread, on several at a time. An
        InterruptedError ends the connection.

    Attributes
    ----------
    port : int
    key : bytes
        What a trainer must have.
    """

    def __init__(self, host: str, make: Callable[[NDArray[np.int64]], Answer]) -> None:
        self._make = make
        self.key = secrets.token_bytes(PROOF)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        self._accepting = Threads()
        self._accepting.add("cseq-listener", self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        """Take connections, until the listener is closed."""
        while not self._closed.is_set():
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError as error:  # it was closed, or there are no more descriptors
                if not self._closed.wait(AGAIN_SECONDS):
                    log.warning("an agent could take no connection: %s", failure.line_of(error))
                continue
            with self._lock:
                self._connections.add(connection)
            if self._closed.is_set():  # `close` may have looked before this was added
                shut(connection)
            try:
                thread(partial(self._welcome, connection, host)).start()
            except RuntimeError as error:  # there are no more threads
                self._part(connection, host, error)

    def _welcome(self, connection: socket.socket, host: str) -> None:
        """Serve a trainer that has the key, until either end closes the connection."""
        others: list[threading.Thread] = []
        refused = None
        try:
            prove(connection, self.key, b"agent", b"trainer")
            reading, writing = threading.Lock(), threading.Lock()
            serve = partial(self._serve, connection, reading, writing)
            # One for each parcel that it may have here, and one for a ping beside them: a trainer
            # that reads no answers stops these, and no other trainer's.
            for _ in range(AHEAD + 1):
                other = thread(serve)
                other.start()
                others.append(other)
            serve()
        except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: no more threads
            refused = error
            shut(connection)
        for other in others:
            other.join()
        self._part(connection, host, refused)

    def _part(self, connection: socket.socket, host: str, refused: Exception | None) -> None:
        """Close a connection."""
        if refused is not None:
            why = failure.line_of(refused)
            log.warning("an agent has refused what came from %s: %s", host, why)
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(
        self, connection: socket.socket, reading: threading.Lock, writing: threading.Lock
    ) -> None:
        """Read a request, make what it asks for and write the answer, again and again."""
        try:
            while True:
                with reading:
                    number, request = receive(connection, lambda _: private)
                assert not isinstance(request, Failed)
                answer = self._make(request[0].view(np.int64))
                with writing:
                    transmit(connection, number, answer)
                del answer  # its slots are free now
        except (OSError, EOFError):  # either end has closed it
            pass
        finally:
            shut(connection)  # the other threads end, too

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self._closed.set()
        shut(self._socket)
        self._socket.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            shut(connection)
        self._accepting.join(time.monotonic() + CLOSE_SECONDS)


class Link:
    """A trainer's end: a connection to an agent. Its methods return at once, on any thread.

    What is sent before the connection is there waits for it.

    Parameters
    ----------
    host, port, key
        Of the agent's `Listener`.

    Attributes
    ----------
    lost : Lost or None
        Why it is over.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._address, self._key = (host, port), key
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._awaited: dict[int, tuple[Callable[[Outcome], None], Land]] = {}
        self._requests: SimpleQueue[tuple[int, NDArray[np.int64]] | None] = SimpleQueue()
        self._socket: socket.socket | None = None
        self.lost: Lost | None = None

    def open(self) -> None:
        """Begin to connect."""
        threads = Threads()
        threads.add("cseq-link", self._run)
        threads.start()

    def send(
        self, request: NDArray[np.int64], done: Callable[[Outcome], None], land: Land = private
    ) -> None:
        """Send a parcel; `done` is called once, with what becomes of it.

        The parts of its answer after the first one are received in what `land` returns, which is
        called on a thread of this link.
        """
        with self._lock:
            if self.lost is None:
                number = next(self._numbers)
                self._awaited[number] = done, land
                self._requests.put((number, request))
                return
        done(self.lost)

    def close(self) -> None:
        """End the connection: what is under way is lost. In a forked process it stays."""
        if self._pid == os.getpid():
            self._end("it was closed")

    def _end(self, cause: str) -> None:
        """Say that all that is under way is lost, and what comes."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost = Lost(cause)
            awaited, self._awaited = self._awaited, {}
            self._requests.put(None)
            if self._socket is not None:
                shut(self._socket)
        for done, _ in awaited.values():
            done(lost)

    def _run(self) -> None:
        """Connect, and read answers until either end closes the connection."""
        try:
            connection = self._connect()
        except (OSError, EOFError) as error:
            self._end(self._cause(error))
            return
        with connection:
            writing = thread(partial(self._write, connection))
            try:
                writing.start()
                while True:
                    number, outcome = receive(connection, self._land)
                    with self._lock:
                        done = self._awaited.pop(number)[0]
                    done(outcome)
                    del done, outcome  # they may be large, and the next one long in coming
            except Exception as error:  # noqa: BLE001 - also no memory, or no thread: all is lost
                self._end(self._cause(error))
            if writing.ident is not None:
                writing.join()

    def _land(self, number: int) -> Land:
        """Return what says where an answer is received."""
        with self._lock:
            return self._awaited[number][1]

    def _connect(self) -> socket.socket:
        """Return a connection to an agent that has the key, and has seen that this end has it."""
        connection = socket.create_connection(self._address, OPEN_SECONDS)
        try:
            prove(connection, self._key, b"trainer", b"agent")
            with self._lock:
                if self.lost is not None:
                    raise EOFError(self.lost.cause)
                self._socket = connection
        except BaseException:
            connection.close()
            raise
        return connection

    def _write(self, connection: socket.socket) -> None:
        """Write requests until the connection is over. An agent may be slow to read them."""
        try:
            while (asked := self._requests.get()) is not None:
                number, request = asked
                transmit(connection, number, [request.view(np.uint8)])
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._end(self._cause(error))

    def _cause(self, error: BaseException) -> str:
        """Say in one line what has ended the connection."""
        host, port = self._address
        return f"connection to {host}, port {port}: {failure.line_of(error)}"


def thread(target: Callable[[], None]) -> threading.Thread:
    """Make a thread of one end of a connection."""
    return threading.Thread(target=target, name="cseq-link", daemon=True)


def prove(connection: socket.socket, key: bytes, me: bytes, other: bytes) -> None:
    """Prove to the other end of a new connection that this one has the key, and let it do the same.

    Raises
    ------
    PermissionError
        It has another key, or none.
    OSError, EOFError
        The connection is over, or the other end silent.
    """
    connection.settimeout(OPEN_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    mine = secrets.token_bytes(NONCE)
    connection.sendall(mine)
    theirs = exactly(connection, NONCE).tobytes()
    connection.sendall(hmac.digest(key, me + theirs + mine, "sha256"))
    proof = exactly(connection, PROOF).tobytes()
    if not hmac.compare_digest(proof, hmac.digest(key, other + mine + theirs, "sha256")):
        raise PermissionError("the other end has not the key of the agent")
    connection.settimeout(None)


def transmit(connection: socket.socket, number: int, answer: Answer) -> None:
    """Write a message."""
    if isinstance(answer, Failed):
        count, parts = FAILED, [np.frombuffer(answer.packed, np.uint8)]
    else:
        count, parts = len(answer), answer
    sizes = [part.nbytes for part in parts]
    head = HEAD.pack(number, count) + struct.pack(f"<{len(sizes)}q", *sizes)
    if sum(sizes) < SMALL:
        connection.sendall(b"".join([head, *(part.data for part in parts)]))
        return
    connection.sendall(head)
    for part in parts:
        connection.sendall(part.data)


def receive(connection: socket.socket, land_of: Callable[[int], Land]) -> tuple[int, Answer]:
    """Read a message; `land_of(number)` makes room for its parts after the first one."""
    number, count = HEAD.unpack(exactly(connection, HEAD.size).data)
    sizes = exactly(connection, 8 * abs(count)).view("<i8").tolist()
    land = land_of(number)
    parts = [
        exactly(connection, size, land if place else private) for place, size in enumerate(sizes)
    ]
    return number, Failed(parts[0].tobytes()) if count == FAILED else parts


def exactly(connection: socket.socket, size: int, land: Land = private) -> NDArray[np.uint8]:
    """Read so many bytes, into what `land` returns.

    Raises
    ------
    EOFError
        The other end has closed the connection before.
    """
    found = land(size)
    rest = found.data
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError("it was closed at the other end")
        rest = rest[count:]
    return found


def shut(connection: socket.socket) -> None:
    """End what is done with a connection on any thread; whoever made it closes it."""
    with contextlib.suppress(OSError):  # it was closed, or not yet connected
        connection.shutdown(socket.SHUT_RDWR)
