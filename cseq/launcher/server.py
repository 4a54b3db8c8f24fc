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
from typing import TYPE_CHECKING, Any

from cseq._lock import Lock
from cseq._memory import Descriptor
from cseq.launcher.base import (
    FOREVER,
    KILL,
    LAST,
    START,
    Children,
    apart,
    check_owner,
    describe_exit,
    no_objects,
)
from cseq.launcher.forks import in_forked_children, pair
from cseq.launcher.processes import describe_start, executable_of, signals_blocked, spawn
from cseq.launcher.record import (
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
from cseq.launcher.waiting import PidFd, hung_up, readable
from cseq.threads import Latch, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from cseq.launcher.base import Child
    from cseq.launcher.processes import Process
    from cseq.launcher.record import Record


LOOK = 0.25  # seconds after which a thread that waits for a server looks whether it is cancelled
MOST_TRIES = 4  # servers that are started to find the modules that a server must not import

# Modules that a server must not import, as this process has found, and why.
_unfit: dict[str, str] = {}


# The servers of this process that workers may be forked from: by `_setting`.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()  # for `_servers`, and their users


def _forget_servers() -> None:
    """Forget the servers of the process that has forked this one."""
    global _servers, _guard
    _servers, _guard = {}, threading.Lock()


in_forked_children(_forget_servers)


def _setting(entry: str, threads: int | None) -> str:
    """Return all that a new server, and so its workers, would inherit from this process now."""
    inherited: list[Any] = [describe_start("server", entry), threads, executable_of(os.name)]
    for each in (os.curdir, 1, 2):  # the working directory and the output streams
        try:
            inherited.append(os.stat(each)[:3])
        except OSError:  # it is closed
            inherited.append(None)
    names = ("getresuid", "getresgid", "getgroups")
    inherited += [getattr(os, name)() for name in names if hasattr(os, name)]
    if hasattr(os, "sched_getaffinity"):
        inherited.append(sorted(os.sched_getaffinity(0)))
    return repr(inherited)


def _stamp(module: str) -> int:
    """Return when the file of a module, as this process has imported it, was changed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return os.stat(file).st_mtime_ns if file else 0
    except OSError:
        return 0


class _Cancelled(InterruptedError):
    """A server would have to be started, and no worker will be launched any more."""


class _Import:
    """A module that a fork server imports."""

    def __init__(self, server: ForkServer) -> None:
        self.outcome: int | None = None  # of those in `record`
        self.exited = False  # the server's last record about it has come
        self.serial = server.enrol(self)

    def learn(self, record: Record) -> None:
        """Handle a record from the server."""
        self.outcome, self.exited = record.value, True


class _ServedChild:
    """A worker that a fork server has started and reaps."""

    handle: int | None = None

    def __init__(self, number: int, sock: socket.socket, server: ForkServer) -> None:
        self.number = number
        self.pid = 0
        self.sock = sock
        self.ended = Latch()
        self.code: int | None = None
        self.refusal = 0  # errno of the fork that failed
        self._lock = threading.Lock()  # for `ended`: two threads may find the end
        self._server = server
        self._owner = os.getpid()
        self._pidfd: PidFd | None = None
        self.exited = False  # the server has reported its exit code
        self.serial = server.enrol(self)

    def learn(self, record: Record) -> None:
        """Handle a record from the server."""
        if record.what == BORN:
            self.pid = record.value
            self._pidfd = PidFd(Descriptor(int, record.fds[0])) if record.fds else None
        elif record.what == FAIL:
            self.refusal = record.value
            self.exited = True
        elif record.what == EXIT:
            self.exited = True
            self._end(record.value)

    @property
    def answered(self) -> bool:
        """Whether the server has started the process, or failed to."""
        return bool(self.pid or self.refusal)

    @property
    def gone(self) -> bool:
        return self.exited or self.ended.wait(0) or self._has_ended(0)

    def _end(self, code: int | None) -> None:
        """Note the process's end, once."""
        with self._lock:
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
        if self.exited or os.getpid() != self._owner:
            return
        if pidfd is not None:
            pidfd.send_signal(number)
        else:
            self._server.send(SIGNAL, self.serial, number)

    def status(self, timeout: float) -> int | None:
        if os.getpid() == self._owner:
            deadline = time.monotonic() + timeout
            self._server.wait(lambda: self.exited, deadline)
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
        self.lost = True  # it has died, was told to end, or was not started
        self.is_open = True  # to more launchers
        self.is_retired = False  # no worker is to be forked from it any more
        self.users = 0  # launchers whose workers are its children; under `_guard`
        self._children: dict[int, _ServedChild | _Import] = {}
        self._serials = itertools.count()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sending = Lock()  # the main thread sends signals, too
        self._reading = False  # a thread reads from the socket
        self._process: Process | None = None
        self._pid = 0
        self._sock, self._theirs = pair()

    def start(self, entry: str, threads: int | None) -> None:
        """Start the process; if anything is raised, also by a signal handler, `close` ends it."""
        start = describe_start("server", entry)
        with self._theirs, signals_blocked():
            self._process = spawn(self._theirs, start, "cseq-server", threads)
            self._pid = self._process.pid
            self.lost = False

    def import_(self, module: str, deadline: float, is_cancelled: Callable[[], bool]) -> int | None:
        """Import a module in the server; return the outcome.

        None: it died, was too slow, or the caller does not want it any more.
        """
        name = module.encode()
        made = _Import(self)
        self.send(IMPORT, made.serial, len(name), data=name)
        self.wait(lambda: made.exited or is_cancelled(), deadline)
        return made.outcome

    def enrol(self, child: _ServedChild | _Import) -> int:
        """Give a child, or an import, the number under which the server knows it."""
        serial = next(self._serials)
        with self._lock:
            self._children[serial] = child
        return serial

    def fork(self, child: _ServedChild, theirs: socket.socket, deadline: float) -> bool:
        """Make the server start a child; return False if the server is dead."""
        self.send(FORK, child.serial, child.number, [theirs.fileno()])
        self.wait(lambda: child.answered, deadline)
        if child.refusal:
            raise OSError(child.refusal, f"no worker process: {os.strerror(child.refusal)}")
        if not child.answered and not self.lost:
            raise TimeoutError(
                f"the fork server (process {self._pid}) did not start worker {child.number} in "
                "time; does it import a module that is very slow?"
            )
        return child.answered

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
        if record is not None:
            self._take(record)
        self.lost = self.lost or (news and record is None)
        return news

    def _take(self, record: Record) -> None:
        """Give a record to its child or import, which is removed after its last record."""
        child = self._children[record.serial]
        child.learn(record)
        if child.exited:
            del self._children[record.serial]

    def await_end(self) -> None:
        """Wait a moment for the process to end."""
        if self._process is not None:
            self._process.wait(LAST)

    def kill(self) -> None:
        """Kill the process; `close` reaps it."""
        if self._process is not None:
            self._process.send_signal(KILL)

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
        if any(isinstance(each, _Import) for each in self._children.values()):
            process.send_signal(KILL)  # nothing else ends an import
        code = process.wait(deadline - time.monotonic())
        if not process.gone:
            process.send_signal(KILL)
            code = process.wait(LAST)
        return process.gone, code


class ForkServerLauncher:
    """Every worker is a copy of a small process that has imported what workers need."""

    method = "forkserver"
    takes_objects = False

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry = entry
        self._threads = threads
        self._modules: list[str] = []  # that a server imports before its first fork
        self._cancelled = False
        self._alone = False  # shares no server
        self._seconds = FOREVER  # that these imports may take
        self._suspects: set[str] = set()  # modules during whose import a server has died
        self.importing = ""
        self._children = Children()
        self._used: list[ForkServer] = []  # that have, or had, workers of this launcher
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def prepare(self) -> None:
        """Begin to start the server."""
        with contextlib.suppress(_Cancelled):
            self._serving()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make the server import modules; start another one without those that it must not have."""
        check_owner(self._owner)
        self._modules = [name for name in dict.fromkeys(modules) if name not in _unfit]
        self._seconds = seconds
        with contextlib.suppress(_Cancelled):
            server = self._start()
            if any(server.has.get(name, 0) not in (0, _stamp(name)) for name in self._modules):
                self._give_up()  # another manager's, with modules that were changed since
            elif not self._modules:
                self._be_alone(server)
            self._serving()

    def _be_alone(self, server: ForkServer) -> None:
        """Share no server: these workers are to import everything by themselves."""
        self._alone = True
        with _guard:
            is_own = server.users == 1 and not server.has
            if is_own:
                server.is_open = False
        if not is_own:
            self._drop()

    def cancel(self) -> None:
        """Stop waiting for imports, and use no other server than the present one."""
        self._cancelled = True

    def _serving(self) -> ForkServer:
        """Return a server that has imported its modules and is not known to be dead.

        Raises
        ------
        _Cancelled
            There is none, and `cancel` was called, after which none is started.
        """
        for _ in range(MOST_TRIES):
            server = self._start()
            fault = self._preload_into(server)
            if fault is None:
                return self._start()  # the same one, unless it has ended
            name, reason = fault
            tell(
                logging.INFO,
                "module %s is imported by each worker, not by their server: %s",
                name,
                reason,
            )
            _unfit[name] = reason
            self._modules.remove(name)
            self._give_up()
        tell(
            logging.INFO,
            "all modules are imported by each worker: too many are unfit for their server",
        )
        self._modules = []
        return self._start()

    def _give_up(self) -> None:
        """Retire the present server, for all launchers: another one takes its place."""
        server = self._server
        if server is not None:
            server.is_retired, server.is_open = True, False
        self._drop()

    def _drop(self) -> None:
        """Use the present server no more; it has no worker of this launcher yet."""
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                self._used.remove(server)
                self._leave(server, time.monotonic() + LAST)

    def _preload_into(self, server: ForkServer) -> tuple[str, str] | None:
        """Make a server import what it lacks; return a module that it must not import, and why.

        If the server dies meanwhile, another one is started and imports all of it.
        """
        deadline = time.monotonic() + self._seconds
        while lacking := [name for name in self._modules if name not in server.has]:
            self.importing = name = lacking[0]
            stamp = _stamp(name)
            try:
                outcome = server.import_(name, deadline, lambda: self._cancelled)
            finally:
                self.importing = ""
            if outcome is None:
                if self._cancelled:
                    self._drop()
                    return None
                if not server.lost:
                    return name, f"it takes more than {self._seconds:g} s"
                if name in self._suspects:
                    return name, "it has ended two servers"
                self._suspects.add(name)  # the server may have ended for another reason
                server = self._start()
                continue
            if outcome == FAILED:
                tell(
                    logging.WARNING,
                    "module %s was to be imported for all workers: its import fails",
                    name,
                )
            elif outcome != KEPT:
                return name, REASONS[outcome]
            server.has[name] = stamp
        return None

    def _start(self) -> ForkServer:
        """Return a server that is not known to be dead; start one if there is none."""
        check_owner(self._owner)
        with self._lock:
            server = self._server
            if server is not None and server.lost:
                server.close(time.monotonic() + LAST)
            if server is None or server.lost or server.is_retired:
                if self._cancelled:
                    raise _Cancelled("no worker processes: they are being ended")
                self._server = server = self._share()
            return server

    def _share(self) -> ForkServer:
        """Return the server of the present setting, which is started for its first launcher."""
        setting = _setting(self._entry, self._threads)
        with _guard:
            server = None if self._alone else _servers.get(setting)
            if server is None or server.lost or not (server.is_open and server.users):
                server = ForkServer()
                server.is_open = not self._alone
                if server.is_open:
                    _servers[setting] = server
            server.users += 1
            self._used.append(server)
            if server.lost:
                server.start(self._entry, self._threads)
            return server

    def launch(
        self,
        number: int,
        *,
        local: object = None,
        context: Context | None = None,  # noqa: ARG002
    ) -> Child:
        """Make the server fork a worker."""
        no_objects(self.method, local)
        for _ in range(2):  # a server may be found dead only when it is asked something
            server = self._serving()
            child = self._launch(number, server, time.monotonic() + START)
            if child is not None:
                return child
        _, code = server.close(time.monotonic() + LAST)
        raise OSError(
            f"the fork server {describe_exit(code)} before it could start worker {number}; "
            "if it has printed an error, see above"
        )

    def _launch(self, number: int, server: ForkServer, deadline: float) -> Child | None:
        """Start a worker by this server; None when the server is dead."""
        ours, theirs = pair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            child = _ServedChild(number, ours, server)
            self._children.add(child)  # before it is started, so that `close` ends it in any case
            if not server.fork(child, theirs, deadline):
                return None
            undo.pop_all()
        return child

    def close(self, deadline: float) -> bool:
        """End the workers, then the server."""
        if os.getpid() != self._owner:
            return True  # a process that the user forked: these are not its children
        return apart(lambda: self._close(deadline))

    def _close(self, deadline: float) -> bool:
        children = self._children.end(deadline)
        if not self._lock.acquire(timeout=max(LAST, deadline - time.monotonic())):
            return False  # the thread that starts a server hangs
        try:
            ends = [self._leave(server, deadline) for server in self._used]
            self._used, self._server = [], None
        finally:
            self._lock.release()
        return all(ends) and all(child.gone for child in children)

    def _leave(self, server: ForkServer, deadline: float) -> bool:
        """End a server if no other launcher uses it; return whether it is gone, or used."""
        with _guard:
            server.users -= 1
            if server.users:
                return True
        return server.close(deadline)[0]
