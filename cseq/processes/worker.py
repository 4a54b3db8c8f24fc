"""Both sides of a worker process: setup, messages and stack traces.

::

    trainer                                          worker process
      WorkerProcess.handshake ── Setup, files ────►  enter ──► ring, writer, the user's object
      WorkerProcess.receive ◄── ENTERED, LOADED … ─  send_state
                            ◄── end of file ───────  exit

A worker sends ENTERED before it reads the user's object, LOADED afterwards, and READY once it has
created its indexer, or FAILED after an exception. NOTED is a warning, and LOGGED a log record.

On a signal, a worker writes stack traces to a file that it shares with the trainer. It does not use
the socket, because the signal may arrive while it is sending another message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import struct
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cseq._core import Ring, now_ns
from cseq._lock import exit_on_hangup
from cseq._memory import DEBUG, Descriptor, Mapping, keep_freed
from cseq.encoding import codec, failure
from cseq.encoding._codec import TicketWriter
from cseq.memory import descriptors
from cseq.memory._slots import SlotTable
from cseq.processes.launcher import reading
from cseq.processes.logs import Sender
from cseq.threads import Latch

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from cseq.processes.launcher import Child
    from cseq.processes.logs import Levels

__all__ = [
    "ENTERED",
    "FAILED",
    "LOADED",
    "LOGGED",
    "NOTED",
    "NO_STACK",
    "READY",
    "STACK_SIGNAL",
    "Entered",
    "Setup",
    "WorkerProcess",
    "enter",
    "send_state",
]

NOT_FOUND = (
    "cseq: worker processes import modules by name, with the sys.path of the training process; put "
    "the module into a folder on sys.path, or call cloudpickle.register_pickle_by_value(module)"
)

ENTERED, LOADED, READY, FAILED, NOTED, LOGGED = b"E", b"L", b"R", b"F", b"N", b"G"
# A message header: a kind, and the length of the body that follows. A setup has no kind.
HEADER = struct.Struct("<cQ")
LENGTH = struct.Struct("<Q")

STACK_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
# Seconds to wait for stack traces, and seconds of silence after which they count as complete.
STACK_SECONDS, STACK_QUIET = 1.0, 0.1
NO_STACK = "(the stack is not available)\n"


class Setup(NamedTuple):
    """The setup message for a worker process. File descriptors are sent with it.

    The fields are the runner number minus 1, the owner number on the ring, the offset and size of
    the ring, the slot width in bytes, the number of slots (0 for a converter), the task, the record
    that describes the user's object, and the logger levels. The last two are None if inherited.
    """

    worker: int
    owner: int
    ring: tuple[int, int]
    width: int
    slots: int
    task: Any
    record: codec.Record | None
    levels: Levels | None = None


# ── in the worker ──────────────────────────────────────────────────────────────────────────


class Entered(NamedTuple):
    """The result of `enter`. `sender` forwards log records."""

    sock: socket.socket
    setup: Setup
    ring: Ring
    writer: TicketWriter
    object_fd: list[int]
    sender: Sender | None

    def read_object(self, local: object) -> object:
        """Return the user's object from a copy-on-write file, or `local` in a forked worker."""
        record, worker = self.setup.record, local
        if record is not None:
            (fd,) = self.object_fd
            try:
                with reading():
                    worker = codec.decode(Mapping(fd, 0, sum(record), own=True), record)
            except ModuleNotFoundError as error:
                failure.annotate(error, NOT_FOUND)
                raise
            send_state(self.sock, LOADED)
        # If the trainer has closed the ring, it will kill this worker anyway.
        if self.ring.closed == 1:
            _leave(0)
        return worker

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Send READY when the context ends, or send FAILED and exit if it raises an exception."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            send_state(self.sock, FAILED, failure.pack(error))
            raise SystemExit from None
        if self.sender is not None:
            self.sender.settle()
        send_state(self.sock, READY)


def enter(sock: socket.socket) -> Entered:
    """Set up this process as a worker. The process exits when the trainer closes `sock`."""
    keep_freed()
    setup, (ring_fd, arena_fd, *more) = _receive_setup(sock)
    if DEBUG:
        os.environ["CSEQ_WORKER"] = str(setup.worker)
    threading.Thread(target=exit_on_hangup, args=(sock.fileno(),), daemon=True).start()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=more.pop(0), all_threads=True)
    send_state(sock, LOADED if setup.record is None else ENTERED)
    offset, nbytes = setup.ring
    ring = Ring(Mapping(ring_fd, 0, offset + nbytes), at=offset)
    os.environ.pop("CSEQ_TRACE", None)
    Descriptor(int, ring_fd).close()
    runner_number = setup.worker + 1
    slots = SlotTable(arena_fd, setup.width, setup.slots, runner_number) if setup.slots else None
    sender = None
    if setup.levels is not None:
        sender = Sender(setup.worker, setup.levels, partial(send_state, sock, LOGGED))
    return Entered(sock, setup, ring, TicketWriter(arena_fd, setup.width, slots), more, sender)


def _receive_setup(sock: socket.socket) -> tuple[Setup, list[int]]:
    head, fds = descriptors.receive(sock, LENGTH.size, 8)
    (length,) = LENGTH.unpack(head or _leave())
    setup: Setup = pickle.loads(descriptors.receive_exactly(sock, length) or _leave())
    return setup, fds


def _leave(code: int = 1) -> NoReturn:
    """Exit without a message, because the trainer is gone or shutting down."""
    os._exit(code)


_outgoing: deque[bytes] = deque()
# Held while a message is sent. Reentrant, because a signal handler may send one, too.
_sending = threading.RLock()
_is_sending = False


def send_state(sock: socket.socket, state: bytes, body: bytes = b"") -> None:
    """Send the state of this worker, or a NOTED or LOGGED message. Thread-safe.

    If a signal handler calls this during another call, its message is sent after the first one.
    """
    global _is_sending
    with _sending:
        _outgoing.append(HEADER.pack(state, len(body)) + body)
        if _is_sending:
            return
        _is_sending = True
        try:
            while _outgoing:
                sock.sendall(_outgoing.popleft())
        finally:
            _is_sending = False


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


class WorkerProcess:
    """The trainer's side of a worker process.

    Attributes
    ----------
    runner_number : int
        The runner's number, starting from 1.
    state : bytes
        The latest state (ENTERED, LOADED, READY or FAILED), or b"".
    entered : int
        The time (`now_ns`) at which the first message was received.
    is_overdue : bool
        Whether the worker was killed because of a timeout.
    """

    def __init__(self, runner_number: int, child: Child) -> None:
        self.runner_number = runner_number
        self.child = child
        self.state = b""
        self.entered = 0
        self.is_overdue = False
        self._stacks: Descriptor | None = None
        if STACK_SIGNAL is not None:
            self._stacks = descriptors.anonymous_file("cseq-stacks")[0]
        self._buffer = bytearray()

    def handshake(self, setup: Setup, ring_fd: int, arena_fd: int, *object_fd: int) -> None:
        """Send the setup and the file descriptors."""
        body = pickle.dumps(setup)
        stacks_fd = [] if self._stacks is None else [self._stacks.fd]
        fds = [ring_fd, arena_fd, *stacks_fd, *object_fd]
        # If the worker is dead, `receive` will reach EOF.
        with contextlib.suppress(ConnectionError):
            descriptors.send(self.child.sock, LENGTH.pack(len(body)), fds, self.child.handle)
            self.child.sock.sendall(body)

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Read from the socket. Return the complete messages that have a body, or None at EOF."""
        try:
            data = self.child.sock.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            return None
        messages = []
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER.size:
            state, length = HEADER.unpack_from(buffer)
            end = HEADER.size + length
            if len(buffer) < end:
                break
            body = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            if not self.state:
                self.entered = now_ns()
            if state not in (NOTED, LOGGED):
                self.state = state
            if body:
                messages.append((state, body))
        return messages

    def stack(self) -> str:
        """Return the worker's stack traces, even while C code holds the GIL."""
        # This reference keeps the file open if `close` is called meanwhile.
        file = self._stacks
        if file is None or not self.state or STACK_SIGNAL is None:
            return NO_STACK
        fd = file.fd
        # Rewind the file here, because both processes share its offset.
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        self.child.send_signal(STACK_SIGNAL)
        size, grown = 0, 0.0
        deadline = time.monotonic() + STACK_SECONDS
        # Waiting for a latch that is never set pauses this thread without holding the GIL.
        quiet = Latch()
        while (now := time.monotonic()) < deadline:
            written = os.fstat(fd).st_size
            if written != size:
                size, grown = written, now
            elif size and now - grown > STACK_QUIET:
                break
            quiet.wait(0.02)
        text = os.pread(fd, size, 0).decode(errors="replace")
        return text or "(the process does not respond; it may be stopped)\n"

    def close(self) -> None:
        """Close the socket and the file for stack traces."""
        self.child.sock.close()
        self._stacks = None
