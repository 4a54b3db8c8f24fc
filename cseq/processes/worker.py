"""One worker process: setup, messages and stacks, at both ends of its socket.

::

    trainer                                          worker process
      WorkerProcess.handshake ── Setup, files ────►  enter ──► ring, writer, the user's object
      WorkerProcess.receive ◄── ENTERED, LOADED … ─  send_state
                            ◄── end of file ───────  its end

A worker sends ENTERED before it reads the user's object, which imports the user's modules, LOADED
when it has it (a forked worker at once), then READY. FAILED comes with the exception that kept it
from getting ready; NOTED with a warning, and LOGGED with a record of `logging`, at any time.

On a signal, a worker writes its stacks to an anonymous file that it shares with the trainer, not to
the socket: the signal handler may run while a message is being sent.
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

NOT_THERE = (
    "cseq: worker processes import modules by name, with the sys.path of the training process: put "
    "the module into a folder on it, or call cloudpickle.register_pickle_by_value(module)"
)

ENTERED, LOADED, READY, FAILED, NOTED, LOGGED = b"E", b"L", b"R", b"F", b"N", b"G"
HEADER = struct.Struct("<cQ")  # one of the above, and the length of what follows
LENGTH = struct.Struct("<Q")  # of the setup that follows

# Makes a worker write its stacks to the file that it got for them.
STACK_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
STACK_SECONDS = 1.0  # how long to wait for a worker's stacks
STACK_QUIET = 0.1  # seconds without more text after which the stacks are complete

NO_STACK = "(its stack is not available)\n"


class Setup(NamedTuple):
    """What a worker process gets from the trainer, beside file descriptors."""

    worker: int  # its number, from 0
    owner: int  # its number at the ring, from 1
    ring: tuple[int, int]  # where the ring lies in the file: offset and bytes
    width: int  # bytes between the slots in their file
    slots: int  # that it can take; 0: it takes none
    task: Any  # of its pool: what it has to do
    record: codec.Record | None  # where the user's object lies in its file, if there is one
    levels: Levels | None = None  # of the trainer's loggers; None: it is forked, and has them


# ── in the worker ──────────────────────────────────────────────────────────────────────────


class Entered(NamedTuple):
    """What `enter` gives a worker process."""

    sock: socket.socket
    setup: Setup
    ring: Ring
    writer: TicketWriter
    object_fd: list[int]
    sender: Sender | None  # of what it logs

    def read_object(self, local: Any) -> Any:
        """Return the user's object: read from its file, or `local`, which a fork has inherited.

        The file is mapped copy on write: changes of its arrays stay in this process.
        """
        record, worker = self.setup.record, local
        if record is not None:
            (fd,) = self.object_fd
            try:
                with reading():
                    worker = codec.decode(Mapping(fd, 0, sum(record), own=True), record)
            except ModuleNotFoundError as error:
                failure.annotate(error, NOT_THERE)
                raise
            send_state(self.sock, LOADED)
        if self.ring.closed == 1:  # a trainer that did not see LOADED before it closed kills us
            _leave(0)
        return worker

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Tell the trainer at the end that this worker is ready; or what was raised, and end it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            send_state(self.sock, FAILED, failure.pack(error))
            raise SystemExit from None
        if self.sender is not None:
            self.sender.settle()
        send_state(self.sock, READY)


def enter(sock: socket.socket) -> Entered:
    """Set up a worker process; it ends when the trainer closes `sock`."""
    keep_freed()
    setup, (ring_fd, arena_fd, *more) = _receive_setup(sock)
    if DEBUG:  # see cseq_fault.h
        os.environ["CSEQ_WORKER"] = str(setup.worker)
    threading.Thread(target=exit_on_hangup, args=(sock.fileno(),), daemon=True).start()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=more.pop(0), all_threads=True)
    send_state(sock, LOADED if setup.record is None else ENTERED)
    at, nbytes = setup.ring
    ring = Ring(Mapping(ring_fd, 0, at + nbytes), at=at)
    os.environ.pop("CSEQ_TRACE", None)  # that file is the trainer's
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
    """End this process without a message: the trainer is gone, or closes."""
    os._exit(code)


_outgoing: deque[bytes] = deque()
_sending = threading.RLock()  # whose owner sends what is outgoing
_is_sending = False


def send_state(sock: socket.socket, state: bytes, body: bytes = b"") -> None:
    """Send the trainer a message: the state of this worker, NOTED or LOGGED.

    Any thread may, and a signal handler in the middle of another message: that one is sent first.
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
    """A worker process, as the trainer sees it.

    Attributes
    ----------
    runner_number : int
        Its runner number, from 1.
    state : bytes
        ENTERED, LOADED, READY or FAILED, as the latest message said; empty before there is one.
    entered : int
        When the first message came, in ns of `now_ns`.
    is_overdue : bool
        It was killed because it took longer than its timeout.
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
        """Send the setup and the descriptors that come with it."""
        body = pickle.dumps(setup)
        stacks_fd = [] if self._stacks is None else [self._stacks.fd]
        fds = [ring_fd, arena_fd, *stacks_fd, *object_fd]
        # If the worker is dead already, the socket will be at end of file.
        with contextlib.suppress(ConnectionError):
            descriptors.send(self.child.sock, LENGTH.pack(len(body)), fds, self.child.handle)
            self.child.sock.sendall(body)

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Read from the socket; return the complete messages with a body, None at end of file."""
        try:
            data = self.child.sock.recv(65536)
        except ConnectionError:  # the worker died with unread data in its socket
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
        """Return the worker's stacks, which it writes itself, also while it holds the GIL in C."""
        file = self._stacks  # keeps it open
        if file is None or not self.state or STACK_SIGNAL is None:
            return NO_STACK
        fd = file.fd
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)  # the worker has the same place in the file
        self.child.send_signal(STACK_SIGNAL)
        size, grown = 0, 0.0
        deadline = time.monotonic() + STACK_SECONDS
        quiet = Latch()  # nothing sets it: a pause that other threads can use
        while (now := time.monotonic()) < deadline:
            written = os.fstat(fd).st_size
            if written != size:
                size, grown = written, now
            elif size and now - grown > STACK_QUIET:
                break
            quiet.wait(0.02)
        text = os.pread(fd, size, 0).decode(errors="replace")
        return text or "(it does not answer: is it stopped?)\n"

    def close(self) -> None:
        """Close the socket and the file of its stacks."""
        self.child.sock.close()
        self._stacks = None
