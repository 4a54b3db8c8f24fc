"""Keeps worker processes alive: starts, watches, replaces and ends them.

A thread sleeps on the workers' sockets. A worker sends two messages (the user's code begins; ready,
or the exception that kept it from getting ready), and warnings. End of file means that the process
ends; its exit status confirms that before its tickets are posted again.

On a signal, a worker writes its stacks to an anonymous file that it shares with the trainer, not to
the socket: the signal handler may run in the middle of a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import struct
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cseq._core import now_ns
from cseq.descriptors import anonymous_file
from cseq.launcher import describe_exit
from cseq.launcher.base import FOREVER
from cseq.threads import Latch, Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cseq._core import Descriptor
    from cseq.launcher import Child, Launcher

__all__ = [
    "ENTERED",
    "FAILED",
    "LAST_GRACE",
    "NOTED",
    "READY",
    "STACK_SIGNAL",
    "Keeper",
    "Steward",
    "send_state",
]

log = logging.getLogger("cseq")

ENTERED, READY, FAILED, NOTED = b"E", b"R", b"F", b"N"
HEADER = struct.Struct("<cQ")  # one of the above, and the length of what follows

# Makes a worker write its stacks to the file that it got for them.
STACK_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))

FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')  # a line of a stack, the innermost first

GRACE = 5.0  # seconds that workers get to end by themselves
LAST_GRACE = 2.0  # and to be gone after they were killed
STACK_SECONDS = 1.0  # how long a stack is waited for
STACK_QUIET = 0.1  # a stack is complete when nothing more has come for so long


def send_state(sock: socket.socket, state: bytes, body: bytes = b"") -> None:
    """Send the trainer a message: ENTERED, then READY or FAILED; NOTED, a warning, at any time."""
    sock.sendall(HEADER.pack(state, len(body)) + body)


class Steward(Protocol):
    """Decides what happens to workers (`Staff`); called on the keeper's thread."""

    def greet(self, owner: int, sock: socket.socket, stacks: int) -> None:
        """Send a new worker its setup, and the descriptor to write its stacks to."""

    def failed(self, owner: int, packed: bytes) -> None:
        """Handle a worker that could not get ready: the exception that it has packed."""

    def died(self, owner: int, exitcode: int | None, *, was_ready: bool) -> bool:
        """Handle the end of a worker; return whether to replace it."""

    def broke(self, error: BaseException) -> None:
        """Handle an error that ends the keeper itself."""


class _Ward:
    """A worker that is watched."""

    def __init__(self, owner: int, child: Child) -> None:
        self.owner = owner
        self.child = child
        self.state = b""  # the latest message's
        self.entered = 0  # when ENTERED came, in ns of `now_ns`
        self.stacks: Descriptor | None = anonymous_file("cseq-stacks")[0]
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Add received bytes; return the complete messages that are more than a state."""
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
            if state == ENTERED:
                self.entered = now_ns()
            if state != NOTED:
                self.state = state
            if body:
                messages.append((state, body))
        return messages

    @property
    def stacks_fd(self) -> int:
        """The descriptor of the file that it writes its stacks to."""
        return -1 if self.stacks is None else self.stacks.fd

    def stack(self, number: int) -> str:
        """Make the worker write its stacks, by a signal, and return them; "" when it does not."""
        file = self.stacks  # keeps it open
        if file is None:
            return ""
        fd = file.fd
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)  # the worker has the same place in the file
        self.child.send_signal(number)
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
        return os.pread(fd, size, 0).decode(errors="replace")


def _activity(stacks: str) -> str:
    """Say what a worker that is not ready does, from its stacks; its main thread comes last."""
    frames = FRAME.findall(stacks.rsplit("\n\n", maxsplit=1)[-1])
    imports = [path for path, _, function in frames if function == "<module>" and path[0] != "<"]
    if imports:  # the last of them is the outermost
        folder, file = os.path.split(imports[-1])
        name = os.path.basename(folder) if file == "__init__.py" else os.path.splitext(file)[0]
        return f"imports {name}"
    if not frames:
        return "starts"
    path, line, function = frames[0]
    return f"is made ready: it is in {function}, {path}:{line}"


class Keeper:
    """The worker processes of one pool.

    Parameters
    ----------
    launcher : Launcher
    steward : Steward
    owners : sequence of int
        The workers' numbers at the ring, from 1.
    local : object
        Handed to workers that share memory with the trainer (`Launcher.takes_objects`).
    """

    def __init__(
        self, launcher: Launcher, steward: Steward, owners: Sequence[int], local: object
    ) -> None:
        self._launcher = launcher
        self._steward = steward
        self._owners = owners
        self._local = local if launcher.takes_objects else None
        self._wards: dict[int, _Ward] = {}
        self._noted = False
        self._lock = threading.Lock()  # around _wards and _closing
        self._closing = False
        self._prepared = Latch()  # the launcher is
        self._wanted = Latch()  # workers may be started
        self.launched = Latch()  # all workers have been started once
        self._empty = Latch()  # all workers are gone and no more will come
        self._gone: bool | None = None  # so is all that the launcher has started; once it is closed
        self._selector: selectors.BaseSelector  # the thread's own
        self._bell: socket.socket | None = None  # wakes the thread
        self._preload: Callable[[], None]  # known once they are wanted
        self._thread = Threads()
        self._thread.add("cseq-keeper", self._run)

    def prepare(self) -> None:
        """Begin to prepare the launcher.

        That is done in a thread, where no signal handler can raise and a process get lost. If it
        fails, the steward is told.
        """
        self._thread.start()
        self._prepared.wait()  # whatever is done here meanwhile would keep the GIL from it

    def launch(self, modules: Sequence[str] = (), seconds: float = FOREVER) -> None:
        """Begin to start the workers; does not wait for them.

        `Launcher.preload` says what the arguments are.
        """
        self._preload = partial(self._launcher.preload, modules, seconds)
        self._wanted.set()

    def waits_for(self) -> str:
        """Say what a start waits for; "" once a worker is ready."""
        with self._lock:
            wards = list(self._wards.values())
        if any(ward.state == READY for ward in wards):
            return ""
        module = self._launcher.importing
        if module:
            return f"module {module} is imported for all of them"
        for ward in wards:
            if ward.state == ENTERED:
                return f"worker {ward.owner - 1} {_activity(self.stack(ward.owner))}"
        return "their processes start"

    def child(self, owner: int) -> Child | None:
        """Return a worker's process, if there is one; it can be asked also after its end."""
        ward = self._wards.get(owner)
        return None if ward is None else ward.child

    def pid(self, owner: int) -> int | None:
        """Return a worker's process id, if it is known."""
        child = self.child(owner)
        return None if child is None else child.pid

    def is_ready(self, owner: int) -> bool:
        """Whether a worker has said that it is ready, and is not known to be gone."""
        ward = self._wards.get(owner)
        return ward is not None and ward.state == READY

    def starting(self) -> list[tuple[int, int]]:
        """List the workers in which the user's code makes one ready, and since when (`now_ns`)."""
        with self._lock:
            wards = list(self._wards.values())
        return [(ward.owner, ward.entered) for ward in wards if ward.state == ENTERED]

    def kill(self, owner: int) -> None:
        """Kill a worker; its death is handled as any other."""
        ward = self._wards.get(owner)
        if ward is not None:
            ward.child.kill()

    def stack(self, owner: int) -> str:
        """Return a worker's stacks, which it writes itself, also when its interpreter is stuck."""
        ward = self._wards.get(owner)
        if ward is None or not ward.state or STACK_SIGNAL is None:
            return "(its stack cannot be asked for)\n"
        return ward.stack(STACK_SIGNAL) or "(it does not answer: stopped?)\n"

    # -- the thread

    def _run(self) -> None:
        """Run the keeper's thread."""
        try:
            bell, ear = socket.socketpair()
            with bell, ear, selectors.DefaultSelector() as self._selector:
                self._selector.register(ear, selectors.EVENT_READ, None)
                self._bell = bell  # a thread that does not see it yet has set _closing before
                self._serve()
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            self._steward.broke(error)
        finally:
            self._prepared.set()
            self.launched.set()
            self._empty.set()

    def _serve(self) -> None:
        """Start the workers, and watch them until all are gone and no more are wanted."""
        self._launcher.prepare()
        self._prepared.set()
        self._wanted.wait()
        if not self._closing:
            self._preload()
        for owner in self._owners:
            self._launch(owner)
        self.launched.set()
        while not (self._closing and not self._wards):
            for key, _ in self._selector.select():
                if key.data is None:
                    key.fileobj.recv(64)  # type: ignore[union-attr]
                else:
                    self._hear(key.data)

    def _launch(self, owner: int) -> None:
        """Start one worker."""
        if self._closing:
            return
        child = self._launcher.launch(owner - 1, local=self._local)
        ward = _Ward(owner, child)
        with self._lock:
            self._wards[owner] = ward
        self._selector.register(child.sock, selectors.EVENT_READ, ward)
        if self._closing:
            child.kill()
        # Should it be dead already, its socket is about to say so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._steward.greet(owner, child.sock, ward.stacks_fd)

    def _hear(self, ward: _Ward) -> None:
        """Handle what a worker has sent, or its end of file."""
        try:
            data = ward.child.sock.recv(65536)
        except ConnectionResetError:  # it died with something of ours unread
            data = b""
        if not data:
            self._bury(ward)
            return
        for state, body in ward.feed(data):
            if state == FAILED:
                self._steward.failed(ward.owner, body)
            elif not self._noted:  # all workers would send the same
                self._noted = True
                log.warning("%s", body.decode())

    def _bury(self, ward: _Ward) -> None:
        """Make certain that a worker is gone; replace it if the steward says so."""
        child, owner = ward.child, ward.owner
        child.kill()  # its socket is closed, which need not mean that all of it is gone
        exitcode = child.status(LAST_GRACE)
        if not child.gone:
            raise RuntimeError(f"worker {owner - 1} (pid {child.pid}) was killed and does not end")
        self._selector.unregister(child.sock)
        with self._lock:
            del self._wards[owner]
        child.sock.close()
        if self._closing:
            if exitcode not in (0, None, -signal.SIGKILL):
                log.warning("worker %d %s", owner - 1, describe_exit(exitcode))
        elif self._steward.died(owner, exitcode, was_ready=ward.state == READY):
            self._launch(owner)

    # -- the end

    def close(self) -> None:
        """End all workers, whose ring is closed; kill those that do not end within `GRACE`.

        Twice is fine, also where a signal handler has raised in the first one.

        Raises
        ------
        RuntimeError
            A process does not end although it was killed.
        """
        self._closing = True
        self._wanted.set()
        self._launcher.cancel()
        if self._bell is not None:
            with contextlib.suppress(OSError):  # it is closed: the thread has ended
                self._bell.send(b"!")
        if self._thread.begun and not self._empty.wait(GRACE):
            with self._lock:
                wards = list(self._wards.values())
            for ward in wards:
                log.warning("worker %d is busy: killed after %g s", ward.owner - 1, GRACE)
                ward.child.kill()
            self._empty.wait(LAST_GRACE)
        if self._gone is None:  # the thread broke, or hangs
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        if not self._gone:
            raise RuntimeError("worker processes were killed and do not end")
        self._thread.join(time.monotonic() + LAST_GRACE)
        for ward in self._wards.values():  # if the thread broke, none was reaped
            ward.child.sock.close()
            ward.stacks = None
