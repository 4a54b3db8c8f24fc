"""The fork server, a small process, and the launcher that asks it for workers.

::

    trainer ── IMPORT, FORK ──► server
            ◄─ numbers ── on a socket that came with the request

A worker keeps the server's end of its own socket, so end of file there means that it is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, NoReturn

from cseq._memory import fork
from cseq.memory import descriptors
from cseq.processes.launcher.base import (
    FOREVER,
    KILL,
    LAST,
    describe_exit,
    flush_output,
    readable,
    reading,
    zombie_status,
)
from cseq.processes.launcher.child import ignore, leave, report, set_name, work
from cseq.processes.launcher.forks import close_in_forks, in_forked_children, pair
from cseq.processes.launcher.processes import Child, Launcher, describe_start, spawn
from cseq.threads import tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cseq.processes.launcher.base import Identity

START = 120.0  # seconds that a fork server may take to start: torch from a cold network disk
LOOK = 0.25  # seconds after which a thread that waits for a server looks whether it still should
IS_LINUX = sys.platform == "linux"

# A request, and an answer: what it is, and a number. A request carries the socket for the answers,
# which the server alone writes; FORK carries the worker's own, too.
MESSAGE = struct.Struct("=cq")
IMPORT = b"i"  # with the length of a module's name, which follows
IMPORTED = b"I"  # with one of these:
KEPT, FAILED, THREADS, FILES = range(4)
FORK = b"f"  # with the worker's number; the answers are REFUSED, or BORN and later ENDED
REFUSED = b"R"  # with the number of the system's error
BORN = b"B"  # with the worker's process number
ENDED = b"E"  # with its exit code

REASONS = {
    THREADS: "starts threads, which forked processes would not have",
    FILES: "opens files, sockets or CUDA, which forked processes would share",
    None: "ends the process",
}
# Threads, by name, that a library starts again in a forked process: jemalloc's (in pyarrow).
FORKING = ("jemalloc_bg_thd",)


def answer(sock: socket.socket, what: bytes, number: int) -> None:
    """Send an answer; that the other end is gone is noticed by reading."""
    with contextlib.suppress(OSError):
        sock.sendall(MESSAGE.pack(what, number))


def answered(sock: socket.socket) -> tuple[bytes, int] | None:
    """Receive an answer, which comes in one piece; None at end of file."""
    with contextlib.suppress(ConnectionError):
        data = sock.recv(MESSAGE.size)
        if data:
            what, number = MESSAGE.unpack(data)
            return what, number
    return None


# ── the server ─────────────────────────────────────────────────────────────────────────────


class Forker:
    """The fork server itself: one thread, which forks and reaps workers, and reports both.

    It ends when the trainer closes its socket, or dies. Each worker has its own socket.
    """

    def __init__(self, sock: socket.socket, entry: str, trainer: Identity) -> None:
        close_in_forks(sock)
        self._sock = sock
        self._entry = entry
        self._trainer = trainer
        self._reports: dict[int, socket.socket] = {}  # of living children, by process number
        self._woken, self._wake = socket.socketpair()

    def serve(self) -> NoReturn:
        """Serve until the trainer is gone; the garbage collector is off."""
        set_name("cseq-server")
        for name in ("numpy", self._entry.partition(":")[0]):
            importlib.import_module(name)
        self._woken.settimeout(0)
        self._wake.settimeout(0)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._sock, select.POLLIN)
        while self._step():
            pass
        os._exit(0)

    def _step(self) -> bool:
        """Wait for a request or the end of a child, and handle it; False: the trainer is gone."""
        ready = [fd for fd, _ in self._poll.poll()]
        if self._woken.fileno() in ready:
            self._woken.recv(4096)  # first: a child that ends later wakes it again
            self._reap()
        if self._sock.fileno() not in ready:
            return True
        try:
            request, fds = descriptors.receive(self._sock, MESSAGE.size, 2)
        except ConnectionError:
            return False
        if not request:
            return False
        what, value = MESSAGE.unpack(request)
        answers = socket.socket(fileno=fds[0])
        if what == FORK:
            self._fork(answers, fds[1], value)
        else:
            name = descriptors.receive_exactly(self._sock, value).decode()
            close_in_forks(answers)
            answer(answers, IMPORTED, _import(name))
            answers.close()
        return True

    def _fork(self, reports: socket.socket, fd: int, number: int) -> None:
        """Start a worker, which owns the socket `fd`, and say its number, also of a dead one."""
        gc.freeze()  # or every worker's garbage collector would copy these pages
        try:
            pid = fork()
        except OSError as error:
            os.close(fd)
            answer(reports, REFUSED, error.errno or 1)
            reports.close()
            return
        if pid == 0:
            self._become_worker(reports, fd, number)
        # Before the answer: from there on, the end of the worker is that of its socket.
        os.close(fd)
        answer(reports, BORN, pid)
        close_in_forks(reports)
        self._reports[pid] = reports

    def _become_worker(self, reports: socket.socket, fd: int, number: int) -> NoReturn:
        """Run a worker in the copy of the server; the end of `reports` will be that of both."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._woken.close()
            self._wake.close()
            gc.enable()
            close_in_forks(reports)
            descriptors.own_offsets()
            sock = socket.socket(fileno=fd)
        except BaseException:  # noqa: BLE001 - it must not go back to serving
            leave(report(number), number)
        work(sock, number, self._entry, self._trainer)

    def _reap(self) -> None:
        """Say of every child that has ended how it did, and reap it."""
        while self._reports and (ended := _ended_child()) is not None:
            pid, code = ended
            with self._reports.pop(pid, contextlib.nullcontext()) as reports:
                if reports is not None:
                    answer(reports, ENDED, code)
            # Not before: until the answer is there, the number is not another process's.
            if IS_LINUX:
                os.waitpid(pid, 0)


def _ended_child() -> tuple[int, int] | None:
    """Return process number and exit code of a child that has ended; Linux does not reap it."""
    if not IS_LINUX:
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, os.waitstatus_to_exitcode(status)) if pid else None
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    exits = found.si_code == os.CLD_EXITED
    return found.si_pid, found.si_status if exits else -found.si_status


def _import(name: str) -> int:
    """Import a module for all workers, and say whether they can be forked with it."""
    tasks, files, outcome = _tasks(), _files(), KEPT
    try:
        with reading():
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - a worker that imports it will see it raise
        outcome = FAILED
    flush_output()
    if _tasks() - tasks:
        return THREADS
    return FILES if _files() - files else outcome


def _tasks() -> set[str]:
    """List the threads of this process that a fork would lose, where the system lists threads."""
    found = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(OSError),  # one that has just ended
                open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file,
            ):
                if file.read().strip() not in FORKING:
                    found.add(task)
    return found


def _files() -> set[tuple[str, str]]:
    """List the open descriptors of this process, where the system lists them; CUDA has some."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that has listed them
                found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


# ── in the trainer ─────────────────────────────────────────────────────────────────────────

# The servers of this process that workers may be forked from, by what they were started with.
_servers: dict[str, ForkServer] = {}
_guard = threading.Lock()  # for `_servers`, and their users
_found_unfit = False  # since then, a server imports only the modules of an argument `preload`


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
        self.process = spawn(describe_start(entry), "cseq-server", threads)

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
        self._listed: Sequence[str] = ()  # modules that a server imports before its first fork
        self._found: Sequence[str] = ()  # and those that are left out where one is unfit
        self._lists_all = False  # no others are wanted
        self._seconds = FOREVER  # that each of these imports may take
        self._servers: list[ForkServer] = []  # the present one is the last

    def prepare(self, preload: Sequence[str] | Literal[False] | None = None) -> None:
        """Begin to start the server."""
        self._listed, self._lists_all = tuple(preload or ()), preload is False
        self._present()

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Have the server import modules before it forks the next worker."""
        self._found, self._seconds = modules, seconds

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
            found = () if self._lists_all or _found_unfit else self._found
            lacking = [name for name in (*self._listed, *found) if name not in server.has]
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
        with _guard:
            if self._servers and self._servers[-1].is_usable:
                return self._servers[-1]
            modules = self._listed if self._lists_all or _found_unfit else "all"
            key = repr((describe_start(self._entry), self._threads, modules))
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
