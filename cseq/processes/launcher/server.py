"""The launcher whose workers are forked by a small server process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from cseq._core import Lock, now_ns
from cseq._memory import Descriptor
from cseq.processes.launcher.base import FOREVER, KILL, LAST, START, Launcher, describe_exit
from cseq.processes.launcher.forks import in_forked_children, pair
from cseq.processes.launcher.processes import describe_start, signals_blocked, spawn
from cseq.processes.launcher.record import (
    BORN,
    EXIT,
    FAIL,
    FAILED,
    FORK,
    IMPORT,
    KEPT,
    REASONS,
    RECORD,
    SIGNAL,
    receive,
)
from cseq.processes.launcher.waiting import PidFd, hung_up, readable
from cseq.threads import Latch, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from cseq.processes.launcher.base import Child
    from cseq.processes.launcher.record import Record


LOOK = 0.25  # seconds after which a thread that waits for a server looks whether it is cancelled

# Modules that a server must not import, as this process has found, and why.
_unfit: dict[str, str] = {}

# The servers of this process that workers may be forked from: by what they were started with.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()  # for `_servers`, and their users


def _forget_servers() -> None:
    """Forget the servers of the process that has forked this one."""
    global _servers, _guard
    _servers, _guard = {}, threading.Lock()


in_forked_children(_forget_servers)


def _stamp(module: str) -> int:
    """Return when the file of a module, as this process has imported it, was changed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return os.stat(file).st_mtime_ns if file else 0
    except OSError:
        return 0


class _ServedChild:
    """A worker that a fork server has started and reaps."""

    handle: int | None = None

    def __init__(self, sock: socket.socket, server: ForkServer) -> None:
        self.pid = 0  # until the server has started it
        self.sock = sock
        self.ended = Latch()
        self.code: int | None = None
        self.refusal = 0  # errno of the fork that failed
        self._server = server
        self._owner = os.getpid()
        self._pidfd: PidFd | None = None
        self.serial = server.enrol(self._learn)

    def _learn(self, record: Record) -> bool:
        """Handle a record from the server; return whether it is the last one."""
        if record.what == BORN:
            self.pid = record.value
            self._pidfd = PidFd(Descriptor(int, record.fds[0])) if record.fds else None
            return False
        if record.what == FAIL:
            self.refusal = record.value
        self._end(record.value if record.what == EXIT else None)
        return True

    @property
    def gone(self) -> bool:
        return self.ended.wait(0) or self._has_ended(0)

    def _end(self, code: int | None) -> None:
        """Note the process's end, once.

        A thread finds it without the server only once no record comes any more.
        """
        if not self.ended.wait(0):
            self.code = code
            self.ended.set()
            self._pidfd = None

    def kill(self) -> None:
        try:
            self.send_signal(KILL)
        except PermissionError:  # this process has given up its rights; the server has its own
            self._server.send(SIGNAL, self.serial, KILL)

    def send_signal(self, number: int) -> None:
        pidfd = self._pidfd
        if self.ended.wait(0) or os.getpid() != self._owner:
            return
        if pidfd is not None:
            pidfd.send_signal(number)
        else:
            self._server.send(SIGNAL, self.serial, number)

    def status(self, timeout: float) -> int | None:
        if os.getpid() == self._owner:
            deadline = time.monotonic() + timeout
            self._server.wait(lambda: self.ended.wait(0), deadline)
            if self._server.lost:
                self._has_ended(deadline - time.monotonic())
        return self.code

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the process's end without its server; return whether it has ended."""
        pidfd = self._pidfd
        lost = self._server.lost  # first: what a server has reported is read before it is lost
        ended = pidfd.ended(seconds) if pidfd is not None else lost and hung_up(self.sock)
        if ended and lost and os.getpid() == self._owner:
            self._server.await_end()  # only then are its children another's
            self._end(None if pidfd is None else pidfd.reap())
        return ended


class ForkServer:
    """One fork server process, as the trainer sees it."""

    def __init__(self) -> None:
        self.has: dict[str, int] = {}  # modules that it has imported, and their `_stamp` then
        self.importing = ""  # the one that it is importing
        self.lost = True  # it has died, was told to end, or was not started
        self.is_retired = False  # no worker is to be forked from it any more
        self.users = 0  # launchers whose workers are its children; under `_guard`
        # What handles the records about a child or an import, and returns whether one is the last.
        self._learns: dict[int, Callable[[Record], bool]] = {}
        self._serials = itertools.count()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sending = Lock()  # the main thread sends signals, too
        self._reading = False  # a thread reads from the socket
        self._process: Child | None = None
        self._sock, self._theirs = pair()

    def start(self, entry: str, threads: int | None) -> None:
        """Start the process; if anything is raised, also by a signal handler, `close` ends it."""
        start = describe_start("server", entry)
        with self._theirs, signals_blocked():
            self._process = spawn(self._sock, self._theirs, start, "cseq-server", threads)
            self.lost = False

    def is_usable(self) -> bool:
        """Whether workers may be forked from it, as far as its socket tells."""
        self.wait(lambda: False, time.monotonic())
        return self.users > 0 and not (self.lost or self.is_retired)

    def import_(self, module: str, seconds: float, is_cancelled: Callable[[], bool]) -> int | None:
        """Import a module in the server; return the outcome.

        None: it died, was too slow, or the caller does not want it any more.
        """
        name = module.encode()
        outcome: list[int] = []

        def learn(record: Record) -> bool:
            outcome.append(record.value)
            self.importing = ""
            return True

        self.importing = module
        self.send(IMPORT, self.enrol(learn), len(name), data=name)
        self.wait(lambda: bool(outcome) or is_cancelled(), time.monotonic() + seconds)
        return outcome[0] if outcome else None

    def enrol(self, learn: Callable[[Record], bool]) -> int:
        """Return the number under which the server knows a child or an import."""
        serial = next(self._serials)
        with self._lock:
            self._learns[serial] = learn
        return serial

    def fork(
        self, child: _ServedChild, number: int, theirs: socket.socket, deadline: float
    ) -> bool:
        """Make the server start a child; return False if the server is dead."""
        self.send(FORK, child.serial, number, [theirs.fileno()])
        self.wait(lambda: bool(child.pid or child.refusal), deadline)
        if child.refusal:
            raise OSError(child.refusal, f"no worker process: {os.strerror(child.refusal)}")
        if not child.pid and not self.lost:
            raise TimeoutError(
                f"the fork server did not start worker {number} in time; does it import a module "
                "that is very slow?"
            )
        return bool(child.pid)

    def send(
        self, what: bytes, serial: int, value: int, fds: Sequence[int] = (), data: bytes = b""
    ) -> None:
        """Send a record and the data after it; that a server is dead is noticed by reading."""
        with self._sending.hold(), contextlib.suppress(OSError):
            socket.send_fds(self._sock, [RECORD.pack(what, serial, value)], fds)
            self._sock.sendall(data)

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Handle the server's records until `done()`, or the server is lost, or time is up.

        One thread at a time reads, for all that wait.
        """
        with self._lock:
            while not done() and not self.lost:
                left = deadline - time.monotonic()
                if self._reading:
                    if not self._changed.wait(max(0.0, min(left, LOOK))) and left <= LOOK:
                        return
                elif not self._read(min(left, LOOK)) and left <= LOOK:
                    return

    def _read(self, seconds: float) -> bool:
        """Wait for one record and handle it; return False if none came in time."""
        self._reading = True
        self._changed.release()
        try:
            news = readable(self._sock.fileno(), seconds)
            record = receive(self._sock) if news else None
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        if record is not None and self._learns[record.serial](record):
            del self._learns[record.serial]
        self.lost = self.lost or (news and record is None)
        return news

    def await_end(self) -> None:
        """Wait a moment for the process to end."""
        if self._process is not None:
            self._process.status(LAST)

    def close(self, deadline: float) -> tuple[bool, int | None]:
        """End the server and reap it; return whether it is gone, and its exit code."""
        with self._lock:
            self.lost = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, ends the server
            # It does not read for long. Its descriptor is not closed under a reader that hangs.
            left = max(LAST, deadline - time.monotonic())
            if self._changed.wait_for(lambda: not self._reading, left):
                self._sock.close()
            self._theirs.close()
        process = self._process
        if process is None:
            return True, None
        if self.importing:
            process.kill()  # nothing else ends an import
        code = process.status(deadline - time.monotonic())
        if not process.gone:
            process.kill()
            code = process.status(LAST)
        return process.gone, code


class ForkServerLauncher(Launcher):
    """Every worker is a copy of a small process that has imported what workers need."""

    method = "forkserver"

    def __init__(self, entry: str, threads: int | None) -> None:
        super().__init__(entry, threads)
        self._modules: list[str] = []  # that a server imports before its first fork
        self._seconds = FOREVER  # that each of these imports may take
        self._cancelled = False
        self._alone = False
        self._servers: list[ForkServer] = []  # the present one is the last

    @property
    def importing(self) -> str:
        """The module that is being imported for all workers now."""
        return self._servers[-1].importing if self._servers else ""

    def prepare(self, *, alone: bool = False) -> None:
        """Begin to start the server."""
        self._alone = alone
        self._present()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make the server import modules; start another one without those that it must not have."""
        self._modules, self._seconds = list(dict.fromkeys(modules)), seconds
        server = self._present()
        if any(server.has.get(name, 0) not in (0, _stamp(name)) for name in self._modules):
            self._retire(server)  # another manager's, with modules that were changed since
        self._serving()

    def cancel(self) -> None:
        """Stop waiting for imports, and launch no worker any more."""
        self._cancelled = True

    def _serving(self) -> ForkServer | None:
        """Return a server that has imported what it can of the modules; None: after `cancel`."""
        while not self._cancelled:
            server = self._present()
            known = server.has.keys() | _unfit.keys()
            lacking = [name for name in self._modules if name not in known]
            if not lacking:
                return server
            self._import(server, lacking[0])
        return None

    def _import(self, server: ForkServer, name: str) -> None:
        """Have a server import a module; retire it if it must not be forked then."""
        stamp = _stamp(name)
        since = now_ns()
        outcome = server.import_(name, self._seconds, lambda: self._cancelled)
        self.imports.append((name, since, now_ns()))
        if outcome in (KEPT, FAILED):
            server.has[name] = stamp
            if outcome == FAILED:
                text = "module %s was to be imported for all workers: its import fails"
                tell(logging.WARNING, text, name)
        elif outcome is not None or not self._cancelled:
            reason = "it ends their server"
            if outcome is not None:
                reason = REASONS[outcome]
            elif not server.lost:
                reason = f"it takes more than {self._seconds:g} s"
            _unfit[name] = reason
            text = "module %s is imported by each worker, not by their server: %s"
            tell(logging.INFO, text, name, reason)
            self._retire(server)

    def _present(self) -> ForkServer:
        """Return the present server; one that is dead or retired is replaced."""
        self._check_owner()
        with _guard:
            server = self._servers[-1] if self._servers else None
            if server is not None and server.is_usable():
                return server
            if server is not None and server.lost:
                server.close(time.monotonic() + LAST)
            setting = repr((describe_start("server", self._entry), self._threads))
            server = None if self._alone else _servers.get(setting)
            if server is None or not server.is_usable():
                server = ForkServer()
                if not self._alone:
                    _servers[setting] = server
            server.users += 1
            self._servers.append(server)
            if server.lost:
                server.start(self._entry, self._threads)
            return server

    def _retire(self, server: ForkServer) -> None:
        """Fork no worker from a server any more; none of this launcher's is from there."""
        server.is_retired = True
        self._servers.remove(server)
        self._leave(server, time.monotonic() + LAST)

    def _launch(self, number: int, local: object, context: Context | None) -> Child:
        del local, context
        deadline = time.monotonic() + START
        for _ in range(2):  # a server may be found dead only when it is asked something
            server = self._serving()
            if server is None:
                raise InterruptedError("no worker processes: they are being ended")
            ours, theirs = pair()
            with theirs, contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                child = _ServedChild(ours, server)
                self._add(child)  # before it is started, so that `close` ends it in any case
                if server.fork(child, number, theirs, deadline):
                    undo.pop_all()
                    return child
        assert server is not None
        _, code = server.close(time.monotonic() + LAST)
        raise OSError(
            f"the fork server {describe_exit(code)} before it could start worker {number}; "
            "if it has printed an error, see above"
        )

    def _end_servers(self, deadline: float) -> bool:
        self._servers = [each for each in self._servers if not self._leave(each, deadline)]
        return not self._servers

    def _leave(self, server: ForkServer, deadline: float) -> bool:
        """End a server if no other launcher uses it; return whether it is gone, or used."""
        if not _guard.acquire(timeout=max(LAST, deadline - time.monotonic())):
            return False  # the thread that starts a server hangs
        server.users -= 1
        _guard.release()
        return server.users > 0 or server.close(deadline)[0]
