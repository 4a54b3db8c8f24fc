"""A fork server as the trainer sees it; the launcher that asks it for workers.

::

    trainer ── IMPORT, FORK ──► server
            ◄─ numbers ── on a socket that came with the request

A worker keeps the server's end of its own socket, so end of file there means that it is gone.
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
from cseq.threads import tell

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVER = "cseq.processes.launcher.server"  # the module that a server runs
START = 120.0  # seconds that a fork server may take to start: torch from a cold network disk
LOOK = 0.25  # seconds after which a thread that waits for a server looks whether it still should
REASONS = {
    THREADS: "starts threads, which forked processes would not have",
    FILES: "opens files, sockets or CUDA, which forked processes would share",
    None: "ends the process",
}

# The servers of this process that workers may be forked from, by what they were started with.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()  # for `_servers`, and their users
_found_unfit = False  # since then, each worker imports what it needs


def _forget_servers() -> None:
    global _servers, _guard
    _servers, _guard = {}, threading.Lock()


in_forked_children(_forget_servers)


class ForkServer:
    """One fork server process, as the trainer sees it."""

    def __init__(self, entry: str, threads: int | None) -> None:
        self.has: set[str] = set()  # modules that it has imported
        self.is_unfit = False  # no worker is to be forked from it any more
        self.users = 0  # launchers whose workers are its children; under `_guard`
        self.importers: list[Launcher] = []  # those that wait for an import, in their order
        self.process = spawn(describe_start(entry, SERVER), "cseq-server", threads)

    @property
    def is_usable(self) -> bool:
        """Whether workers may be forked from it, as far as can be told."""
        return self.users > 0 and not self.is_unfit and not self.process.gone

    def ask(self, what: bytes, value: int, *fds: int, data: bytes = b"") -> socket.socket:
        """Send a request; return the socket on which the answers come, and the end of file."""
        ours, theirs = pair()
        request = MESSAGE.pack(what, value) + data  # in one piece: others may ask, too
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.process.sock, [request], [theirs.fileno(), *fds])
        return ours

    def close(self, deadline: float) -> bool:
        """End the server, and reap it; return whether it is gone."""
        self.process.sock.close()  # it ends, unless it is importing
        self.process.status(deadline - time.monotonic())
        if not self.process.gone:
            self.process.send_signal(KILL)
            self.process.status(LAST)
        return self.process.gone


class _ServedChild(Child):
    """A worker that a fork server has started and reaps: it reports how the worker ends.

    The server is one thread, which may be importing for minutes, or stopped. So a worker that was
    not reaped has ended, too.
    """

    def __init__(self, sock: socket.socket, pid: int, reports: socket.socket) -> None:
        super().__init__(sock, pid)
        self._reports = reports

    def _send(self, number: int, *, tree: bool) -> None:
        if not readable(self._reports.fileno(), 0):  # else another process may have its number
            super()._send(number, tree=tree)

    def status(self, timeout: float) -> int | None:
        """Do as `Child.status` does; the report of a worker that has ended may come too late."""
        super().status(timeout)
        self._has_ended(unreported=True)
        return self.code

    def _has_ended(self, *, unreported: bool = False) -> bool:
        with self._lock.hold():
            if self.ended.wait(0):
                return True
            # First: if there is no report afterwards, this was the worker's (`Forker._reap`).
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
    """Every worker is a copy of a small process that has imported what workers need."""

    def __init__(self, entry: str, threads: int | None) -> None:
        super().__init__(entry, threads)
        self._modules: Sequence[str] = ()  # that a server imports before its first fork
        self._preloads = True
        self._seconds = FOREVER  # that each of these imports may take
        self._servers: list[ForkServer] = []  # the present one is the last

    def prepare(self, *, preload: bool = True) -> None:
        """Begin to start the server."""
        self._preloads = preload
        self._present()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Have the server import modules before it forks the next worker."""
        self._modules, self._seconds = modules, seconds

    def _answer(
        self, server: ForkServer, answers: socket.socket, seconds: float
    ) -> tuple[bytes, int] | None:
        """Wait for an answer of a server; None: it is dead, or another launcher finds it unfit.

        What it imports for others before does not count as `seconds`.
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
                    "the fork server did not answer in time; does it import a module that is very "
                    "slow?"
                )
        return answered(answers)

    def _serving(self) -> ForkServer:
        """Return a server that has imported the modules."""
        while True:
            self._check()
            server = self._present()
            wanted = self._modules if self._preloads and not _found_unfit else ()
            lacking = [name for name in wanted if name not in server.has]
            if not lacking:
                self.importing = ""
                return server
            self._import(server, lacking[0])

    def _import(self, server: ForkServer, name: str) -> None:
        """Have a server import a module; fork no worker from it if that must not be."""
        global _found_unfit
        self.importing, data = name, name.encode()
        server.importers.append(self)
        try:
            reason = f"takes more than {self._seconds:g} s"
            outcome: int | None = FAILED
            with contextlib.suppress(TimeoutError), server.ask(IMPORT, len(data), data=data) as got:
                _, outcome = self._answer(server, got, self._seconds) or (ENDED, None)
                reason = REASONS.get(outcome, "")
            # What another launcher imports has ended it: nothing is known of this module.
            if outcome is None and (server.is_unfit or server.importers[0] is not self):
                return
            server.is_unfit = server.is_unfit or bool(reason)
        finally:
            server.importers.remove(self)
        if not reason:
            server.has.add(name)
            if outcome == FAILED:
                text = "module %s was to be imported for all workers: its import fails"
                tell(logging.WARNING, text, name)
            return
        self._servers.remove(server)  # none of this launcher's workers is from there
        self._leave(server, time.monotonic() + LAST)
        _found_unfit = True
        tell(
            logging.WARNING,
            "module %s %s when it is imported; so each worker imports all modules itself. Import "
            "that one in a function: the others are then imported once, for all workers",
            name,
            reason,
        )

    def _present(self) -> ForkServer:
        """Return the present server; one that is dead or unfit is replaced."""
        with _guard:
            if self._servers and self._servers[-1].is_usable:
                return self._servers[-1]
            preloads = self._preloads and not _found_unfit
            key = repr((describe_start(self._entry, SERVER), self._threads, preloads))
            server = _servers.get(key)
            if server is None or not server.is_usable:
                server = _servers[key] = ForkServer(self._entry, self._threads)
            server.users += 1
            self._servers.append(server)
            return server

    def _launch(self, number: int) -> Child:
        for _ in range(2):  # a server may be found dead only when it is asked something
            server = self._serving()
            with contextlib.ExitStack() as undo:  # without its socket, the worker ends
                ours, theirs = pair()
                undo.callback(ours.close)
                with theirs:
                    reports = undo.enter_context(server.ask(FORK, number, theirs.fileno()))
                found = self._answer(server, reports, START)
                if found is not None:
                    what, value = found
                    if what == REFUSED:
                        raise OSError(value, f"no worker process: {os.strerror(value)}")
                    undo.pop_all()
                    return _ServedChild(ours, value, reports)
            code = server.process.status(LAST)  # or it would be found alive, and asked again
        raise OSError(
            f"the fork server {describe_exit(code)} before it could start worker {number}; if it "
            "has printed an error, see above"
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
        if server.users > 0:
            return True
        if self.importing:
            server.process.send_signal(KILL)  # nothing else ends an import
        return server.close(deadline)
