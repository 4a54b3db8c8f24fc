"""The trainer's side of fork servers, and their launcher.

::

    trainer ── IMPORT, FORK ──► server
            ◄─ replies ── on a socket that is sent with the request

A worker inherits the server's end of this socket. EOF means that both processes are gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from cseq.processes.launcher.base import (
    ENDED,
    FAILED,
    FILES,
    FOREVER,
    FORK,
    IMPORT,
    KILL,
    LAST,
    MESSAGE,
    REFUSED,
    THREADS,
    answered,
    describe_exit,
    readable,
    zombie_status,
)
from cseq.processes.launcher.forks import in_forked_children, pair
from cseq.processes.launcher.processes import Child, Launcher, describe_start, spawn
from cseq.threads import log_later

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVER = "cseq.processes.launcher.server"
# Seconds allowed for a server to start, and seconds between checks by a waiting thread.
START, LOOK = 120.0, 0.25
REASONS = {
    THREADS: "starts threads, which forked processes would not have",
    FILES: "opens files, sockets or CUDA, which forked processes would share",
    None: "ends the process",
}

# Fork servers, keyed by their start arguments.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()
# True if workers must import the modules themselves.
_any_unfit = False


def _forget_servers() -> None:
    global _servers, _guard
    _servers, _guard = {}, threading.Lock()


in_forked_children(_forget_servers)


class ForkServer:
    """The trainer's side of a fork server."""

    def __init__(self, entry: str, threads: int | None) -> None:
        self.has: set[str] = set()
        self.is_unfit, self.users = False, 0
        self.importers: list[Launcher] = []
        self.process = spawn(describe_start(entry, SERVER), "cseq-server", threads)

    @property
    def is_usable(self) -> bool:
        """Whether the server has users, can fork safely and is running."""
        return self.users > 0 and not self.is_unfit and not self.process.gone

    def ask(self, kind: bytes, value: int, *fds: int, data: bytes = b"") -> socket.socket:
        """Send a request and return the socket for the replies."""
        ours, theirs = pair()
        # Send the request in one piece, because other launchers may send theirs at the same time.
        request = MESSAGE.pack(kind, value) + data
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.process.sock, [request], [theirs.fileno(), *fds])
        return ours

    def close(self, deadline: float) -> bool:
        """Stop the server and reap it. Return True if it is gone."""
        self.process.sock.close()
        self.process.status(deadline - time.monotonic())
        if not self.process.gone:
            self.process.send_signal(KILL)
            self.process.status(LAST)
        return self.process.gone


class _ServedChild(Child):
    """A worker that a fork server starts and reaps.

    A zombie counts as exited, because the server may take minutes to reap it.
    """

    def __init__(self, sock: socket.socket, pid: int, reports: socket.socket) -> None:
        super().__init__(sock, pid)
        self._reports = reports

    def _send(self, number: int, *, tree: bool) -> None:
        # Once the exit has been reported, the pid may belong to another process.
        if not readable(self._reports.fileno(), 0):
            super()._send(number, tree=tree)

    def status(self, timeout: float) -> int | None:
        """Return the same exit code as `Child.status`, even if the report arrives late."""
        super().status(timeout)
        self._has_ended(unreported=True)
        return self.code

    def _has_ended(self, *, unreported: bool = False) -> bool:
        with self._lock.hold():
            if self.ended.wait(0):
                return True
            # Read the status first. If no report has arrived after that, the pid was the worker's.
            status = zombie_status(self.pid)
            if readable(self._reports.fileno(), 0):
                report = answered(self._reports)
                self.code = None if report is None else report[1]
            elif status:
                self.code = os.waitstatus_to_exitcode(status)
            elif status is None or not unreported:
                return False
            self.ended.set()
            self._reports.close()
            return True


class ForkServerLauncher(Launcher):
    """Forks workers from a small process that has imported their modules."""

    def __init__(self, entry: str, threads: int | None) -> None:
        super().__init__(entry, threads)
        # The modules to import before the first fork, and the time limit for each.
        self._modules: Sequence[str] = ()
        self._preloads = True
        self._seconds = FOREVER
        self._servers: list[ForkServer] = []

    def prepare(self, *, preload: bool = True) -> None:
        """Start the server without waiting for it."""
        self._preloads = preload
        self._present()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make the server import modules before the next worker is forked."""
        self._modules, self._seconds = modules, seconds

    def _answer(
        self, server: ForkServer, answers: socket.socket, seconds: float
    ) -> tuple[bytes, int] | None:
        """Wait for a reply. Return None if the server is dead or unfit.

        Earlier imports for other launchers do not count toward the time limit.
        """
        end = time.monotonic() + seconds
        while not readable(answers.fileno(), min(LOOK, end - time.monotonic())):
            self._check()
            if (server.is_unfit or server.process.gone) and not readable(answers.fileno(), 0):
                return None
            if server.importers and server.importers[0] is not self:
                end = time.monotonic() + seconds
            if time.monotonic() >= end:
                raise TimeoutError(
                    "the fork server did not answer in time; it may still be importing a "
                    "slow module"
                )
        return answered(answers)

    def _serving(self) -> ForkServer:
        while True:
            self._check()
            server = self._present()
            wanted = self._modules if self._preloads and not _any_unfit else ()
            lacking = [name for name in wanted if name not in server.has]
            if not lacking:
                self.importing = ""
                return server
            self._import(server, lacking[0])

    def _import(self, server: ForkServer, name: str) -> None:
        """Make a server import a module. Stop using the server if it can no longer fork safely."""
        global _any_unfit
        self.importing, data = name, name.encode()
        server.importers.append(self)
        try:
            reason = f"takes more than {self._seconds:g} s"
            outcome: int | None = FAILED
            with contextlib.suppress(TimeoutError), server.ask(IMPORT, len(data), data=data) as end:
                _, outcome = self._answer(server, end, self._seconds) or (ENDED, None)
                reason = REASONS.get(outcome, "")
            # The server exited or became unusable during another launcher's import.
            if outcome is None and (server.is_unfit or server.importers[0] is not self):
                return
            server.is_unfit = server.is_unfit or bool(reason)
        finally:
            server.importers.remove(self)
        if not reason:
            server.has.add(name)
            if outcome == FAILED:
                text = "module %s could not be imported in advance for all workers"
                log_later(logging.WARNING, text, name)
            return
        self._servers.remove(server)
        self._leave(server, time.monotonic() + LAST)
        _any_unfit = True
        log_later(
            logging.WARNING,
            "importing module %s %s, so each worker imports all modules itself. Import that "
            "module in a function; then the others are imported once for all workers",
            name,
            reason,
        )

    def _present(self) -> ForkServer:
        """Return a usable server, starting one if necessary."""
        with _guard:
            if self._servers and self._servers[-1].is_usable:
                return self._servers[-1]
            preloads = self._preloads and not _any_unfit
            key = repr((describe_start(self._entry, SERVER), self._threads, preloads))
            server = _servers.get(key)
            if server is None or not server.is_usable:
                server = _servers[key] = ForkServer(self._entry, self._threads)
            server.users += 1
            self._servers.append(server)
            return server

    def _launch(self, worker: int) -> Child:
        # Try twice, because a server may have died unnoticed.
        for _ in range(2):
            server = self._serving()
            # After an error, the socket is closed, which makes the worker exit.
            with contextlib.ExitStack() as undo:
                ours, theirs = pair()
                undo.callback(ours.close)
                with theirs:
                    reports = undo.enter_context(server.ask(FORK, worker, theirs.fileno()))
                reply = self._answer(server, reports, START)
                if reply is not None:
                    kind, value = reply
                    if kind == REFUSED:
                        text = f"a worker process could not be started: {os.strerror(value)}"
                        raise OSError(value, text)
                    undo.pop_all()
                    return _ServedChild(ours, value, reports)
            # Wait for a dying server to exit, because it could otherwise be reused.
            code = server.process.status(LAST)
        raise OSError(
            f"the fork server {describe_exit(code)} before it could start worker {worker}; see "
            "above for any error that it printed"
        )

    def _end_servers(self, deadline: float) -> bool:
        self._servers = [server for server in self._servers if not self._leave(server, deadline)]
        return not self._servers

    def _leave(self, server: ForkServer, deadline: float) -> bool:
        """Stop using a server, and end it if no other launcher uses it. Return False on failure."""
        if not _guard.acquire(timeout=max(LAST, deadline - time.monotonic())):
            return False
        server.users -= 1
        _guard.release()
        if server.users > 0:
            return True
        if self.importing:
            server.process.send_signal(KILL)
        return server.close(deadline)
