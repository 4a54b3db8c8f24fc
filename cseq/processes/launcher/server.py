"""The launcher whose workers are forked by a small server process.

::

    trainer ── IMPORT, FORK, SIGNAL ──► server
            ◄─ DONE | BORN, FAIL, EXIT ── on a socket that came with the request

A worker keeps the server's end of its own socket, so end of file there means that it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Literal

from cseq._core import Lock
from cseq._memory import Descriptor
from cseq.processes.launcher.base import (
    BORN,
    ENDED,
    EXIT,
    FAIL,
    FAILED,
    FILES,
    FOREVER,
    FORK,
    IMPORT,
    KEPT,
    LAST,
    SIGNAL,
    THREADS,
    describe_exit,
    hung_up,
    readable,
    receive,
    send,
)
from cseq.processes.launcher.forks import in_forked_children, pair
from cseq.processes.launcher.processes import (
    Child,
    Launcher,
    describe_start,
    signals_blocked,
    spawn,
)
from cseq.threads import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

START = 120.0  # seconds that a fork server may take to start: torch from a cold network disk
LOOK = 0.25  # seconds after which a thread that waits for an import looks whether it is cancelled
REASONS = {
    THREADS: "starts threads, which forked processes would not have",
    FILES: "opens files, sockets or CUDA, which forked processes would share",
    ENDED: "ends the process",
}

# The servers of this process that workers may be forked from, by what they were started with.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()  # for `_servers`, and their users
_found_unfit = False  # since then, a server imports only the modules of an argument `preload`


def _forget_servers() -> None:
    """Forget the servers of the process that has forked this one."""
    global _servers, _guard
    _servers, _guard = {}, threading.Lock()


in_forked_children(_forget_servers)


class ForkServer:
    """One fork server process, as the trainer sees it."""

    def __init__(self) -> None:
        self.has: set[str] = set()  # modules that it has imported
        self.importing = ""  # the one that it is importing
        self.is_unfit = False  # no worker is to be forked from it any more
        self.users = 0  # launchers whose workers are its children; under `_guard`
        self.process: Child | None = None
        self._sending = Lock()  # the main thread sends signals, too
        self._sock, self._theirs = pair()

    def start(self, entry: str, threads: int | None) -> None:
        """Start the process; if anything is raised, `close` ends it."""
        start = describe_start("server", entry)
        with self._theirs, signals_blocked():
            self.process = spawn(self._sock, self._theirs, start, "cseq-server", threads)

    @property
    def is_usable(self) -> bool:
        """Whether workers may be forked from it, as far as can be told.

        Of a dead one, the socket may still be open in a worker that it was about to fork.
        """
        is_dead = self.process is not None and self.process.gone
        return self.users > 0 and not self.is_unfit and not is_dead and not hung_up(self._sock)

    def ask(self, what: bytes, value: int, *fds: int, data: bytes = b"") -> socket.socket:
        """Send a request; return the socket on which the answers come, and the end of file."""
        ours, theirs = pair()
        with theirs, self._sending.hold(), contextlib.suppress(OSError):
            send(self._sock, what, value, 0, theirs.fileno(), *fds)
            self._sock.sendall(data)
        return ours

    def send_signal(self, pid: int, number: int) -> None:
        """Have it send a child of its a signal."""
        with self._sending.hold():
            send(self._sock, SIGNAL, pid, number)

    def import_(self, module: str, seconds: float, is_cancelled: Callable[[], bool]) -> int | None:
        """Import a module in the server; return the outcome.

        None: it was too slow, or the caller does not want it any more.
        """
        name = module.encode()
        self.importing = module
        end = time.monotonic() + seconds
        with self.ask(IMPORT, len(name), data=name) as answer:
            while not readable(answer.fileno(), min(LOOK, end - time.monotonic())):
                if is_cancelled() or time.monotonic() >= end:
                    return None
            record = receive(answer)
        self.importing = ""
        return ENDED if record is None else record.value

    def await_end(self) -> int | None:
        """Wait a moment for the process to end; return its exit code."""
        return None if self.process is None else self.process.status(LAST)

    def close(self, deadline: float) -> bool:
        """End the server and reap it; return whether it is gone."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # it ends
        self._sock.close()
        self._theirs.close()
        if self.process is None:
            return True
        if self.importing:
            self.process.kill()  # nothing else ends an import
        self.process.status(deadline - time.monotonic())
        if not self.process.gone:
            self.process.kill()
            self.process.status(LAST)
        return self.process.gone


class _ServedChild(Child):
    """A worker that a fork server has started and reaps: it reports how the worker ends."""

    def __init__(self, sock: socket.socket, server: ForkServer, reports: socket.socket) -> None:
        super().__init__(sock, 0)  # until the server has started it
        self._pidfd = None
        self._server = server
        self._reports = reports
        self._refusal = 0  # errno of the fork that failed

    def await_birth(self, number: int, seconds: float) -> bool:
        """Wait until it is started; return False if the server is dead."""
        end = time.monotonic() + seconds
        while not self._has_ended() and not self.pid:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"the fork server did not start worker {number} in time; does it import a "
                    "module that is very slow?"
                )
            self._await(end - time.monotonic())
        if self._refusal:
            raise OSError(self._refusal, f"no worker process: {os.strerror(self._refusal)}")
        return self.pid > 0 or self.code is not None

    def _send(self, number: int) -> None:
        self._server.send_signal(self.pid, number)

    def _has_ended(self) -> bool:
        with self._lock.hold():
            while not self.ended.wait(0) and readable(self._reports.fileno(), 0):
                record = receive(self._reports)
                if record is not None and record.what == BORN:
                    self._pidfd = Descriptor(int, record.fds[0]) if record.fds else None
                    self.pid = record.value
                    continue
                if record is not None and record.what == FAIL:
                    self._refusal = record.value
                elif record is not None and record.what == EXIT:
                    self.code = record.value
                self._end()
                self._reports.close()
            return self.ended.wait(0)

    def _await(self, seconds: float) -> None:
        reports = self._reports.fileno()
        if reports >= 0:  # another thread may have read the last one
            readable(reports, seconds)


class ForkServerLauncher(Launcher):
    """Every worker is a copy of a small process that has imported what workers need."""

    method = "forkserver"

    def __init__(self, entry: str, threads: int | None) -> None:
        super().__init__(entry, threads)
        self._listed: Sequence[str] = ()  # modules that a server imports before its first fork
        self._found: Sequence[str] = ()  # and those that are left out where one is unfit
        self._lists_all = False  # no others are wanted
        self._seconds = FOREVER  # that each of these imports may take
        self._cancelled = False
        self._servers: list[ForkServer] = []  # the present one is the last

    @property
    def importing(self) -> str:
        """The module that is being imported for all workers now."""
        return self._servers[-1].importing if self._servers else ""

    def prepare(self, preload: Sequence[str] | Literal[False] | None = None) -> None:
        """Begin to start the server."""
        self._listed, self._lists_all = tuple(preload or ()), preload is False
        self._present()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make the server import modules."""
        self._found, self._seconds = modules, seconds
        self._serving()

    def cancel(self) -> None:
        """Stop waiting for imports, and launch no worker any more."""
        self._cancelled = True

    def _serving(self) -> ForkServer | None:
        """Return a server that has imported the modules; None: after `cancel`."""
        while not self._cancelled:
            server = self._present()
            found = () if self._lists_all or _found_unfit else self._found
            lacking = [name for name in (*self._listed, *found) if name not in server.has]
            if not lacking:
                return server
            self._import(server, lacking[0])
        return None

    def _import(self, server: ForkServer, name: str) -> None:
        """Have a server import a module; fork no worker from it if that must not be."""
        global _found_unfit
        outcome = server.import_(name, self._seconds, lambda: self._cancelled)
        if outcome in (KEPT, FAILED):
            server.has.add(name)
            if outcome == FAILED:
                text = "module %s was to be imported for all workers: its import fails"
                tell(logging.WARNING, text, name)
            return
        if outcome is None and self._cancelled:
            return
        reason = f"takes more than {self._seconds:g} s" if outcome is None else REASONS[outcome]
        server.is_unfit = True
        self._servers.remove(server)  # none of this launcher's workers is from there
        self._leave(server, time.monotonic() + LAST)
        if name in self._listed:
            raise ValueError(
                f"preload={list(self._listed)!r}: module {name} {reason} when it is imported; "
                "leave it out: each worker imports it"
            )
        _found_unfit = True
        tell(
            logging.WARNING,
            "module %s %s when it is imported; so each worker imports all modules itself. Import "
            "that one in a function, or name the others in preload=: these are imported once",
            name,
            reason,
        )

    def _present(self) -> ForkServer:
        """Return the present server; one that is dead or unfit is replaced."""
        self._check_owner()
        with _guard:
            if self._servers and self._servers[-1].is_usable:
                return self._servers[-1]
            modules = self._listed if self._lists_all or _found_unfit else "all"
            key = repr((describe_start("server", self._entry), self._threads, modules))
            server = _servers.get(key)
            if server is None or not server.is_usable:
                server = _servers[key] = ForkServer()
            server.users += 1
            self._servers.append(server)
            if server.process is None:
                server.start(self._entry, self._threads)
            return server

    def _launch(self, number: int, local: object, context: Context | None) -> Child:
        del local, context
        deadline = time.monotonic() + START
        code = None
        for _ in range(2):  # a server may be found dead only when it is asked something
            server = self._serving()
            if server is None:
                raise InterruptedError("no worker processes: they are being ended")
            ours, theirs = pair()
            with theirs:
                reports = server.ask(FORK, number, theirs.fileno())
            child = _ServedChild(ours, server, reports)
            self._add(child)  # before it is started, so that `close` ends it in any case
            with contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                if child.await_birth(number, deadline - time.monotonic()):
                    undo.pop_all()
                    return child
            code = server.await_end()
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
        return server.users > 0 or server.close(deadline)
