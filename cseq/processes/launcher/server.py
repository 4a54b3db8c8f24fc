"""The fork server process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from cseq._memory import fork
from cseq.memory import descriptors
from cseq.processes.launcher.base import (
    BORN,
    ENDED,
    FAILED,
    FILES,
    FORK,
    IMPORTED,
    KEPT,
    MESSAGE,
    REFUSED,
    THREADS,
    answer,
    flush_output,
    reading,
)
from cseq.processes.launcher.child import ignore, leave, prepare, report, set_name, work
from cseq.processes.launcher.forks import close_in_forks

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity, Start

IS_LINUX = sys.platform == "linux"
# Names of threads that their libraries restart after a fork, such as pyarrow's jemalloc.
FORKING = ("jemalloc_bg_thd",)


def begin_process(start: Start) -> NoReturn:
    """Run the server in this interpreter."""
    Forker(prepare(start), start["entry"], start["trainer"]).serve()


class Forker:
    """The fork server. It forks and reaps workers in a single thread."""

    def __init__(self, sock: socket.socket, entry: str, trainer: Identity) -> None:
        close_in_forks(sock)
        self._sock = sock
        self._entry = entry
        self._trainer = trainer
        self._reports: dict[int, socket.socket] = {}
        self._woken, self._wake = socket.socketpair()

    def serve(self) -> NoReturn:
        """Handle requests until the trainer is gone."""
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
        """Handle a request or a worker's exit. Return False if the trainer is gone."""
        ready = [fd for fd, _ in self._poll.poll()]
        if self._woken.fileno() in ready:
            # Drain the socket before reaping, so that a later exit wakes up the server again.
            self._woken.recv(4096)
            self._reap()
        if self._sock.fileno() not in ready:
            return True
        try:
            request, fds = descriptors.receive(self._sock, MESSAGE.size, 2)
        except ConnectionError:
            return False
        if not request:
            return False
        kind, value = MESSAGE.unpack(request)
        answers = socket.socket(fileno=fds[0])
        if kind == FORK:
            self._fork(answers, fds[1], value)
        else:
            name = descriptors.receive_exactly(self._sock, value).decode()
            close_in_forks(answers)
            answer(answers, IMPORTED, _import(name))
            answers.close()
        return True

    def _fork(self, reports: socket.socket, fd: int, worker: int) -> None:
        """Fork a worker with the socket `fd`, and report its process id."""
        # Keep each worker's garbage collector from copying the server's pages.
        gc.freeze()
        try:
            pid = fork()
        except OSError as error:
            os.close(fd)
            answer(reports, REFUSED, error.errno or 1)
            reports.close()
            return
        if pid == 0:
            self._become_worker(reports, fd, worker)
        # Close this copy before the reply, so that the socket closes when the worker exits.
        os.close(fd)
        answer(reports, BORN, pid)
        close_in_forks(reports)
        self._reports[pid] = reports

    def _become_worker(self, reports: socket.socket, fd: int, worker: int) -> NoReturn:
        """Run a worker in this forked copy of the server."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._woken.close()
            self._wake.close()
            gc.enable()
            close_in_forks(reports)
            descriptors.own_offsets()
            sock = socket.socket(fileno=fd)
        except BaseException:  # noqa: BLE001
            leave(report(worker), worker)
        work(sock, worker, self._entry, self._trainer)

    def _reap(self) -> None:
        while self._reports and (ended := _ended_child()) is not None:
            pid, code = ended
            with self._reports.pop(pid, contextlib.nullcontext()) as reports:
                if reports is not None:
                    answer(reports, ENDED, code)
            # Report before reaping, because the process id may be reused afterwards.
            if IS_LINUX:
                os.waitpid(pid, 0)


def _ended_child() -> tuple[int, int] | None:
    """Return the process id and exit code of an exited child, or None. On Linux, do not reap it."""
    if not IS_LINUX:
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, os.waitstatus_to_exitcode(status)) if pid else None
    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    exits = info.si_code == os.CLD_EXITED
    return info.si_pid, info.si_status if exits else -info.si_status


def _import(name: str) -> int:
    """Import a module, and return the outcome: KEPT, FAILED, THREADS or FILES."""
    tasks, files, outcome = _tasks(), _files(), KEPT
    try:
        with reading():
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001
        outcome = FAILED
    flush_output()
    if _tasks() - tasks:
        return THREADS
    return FILES if _files() - files else outcome


def _tasks() -> set[str]:
    """Return the ids of this process's threads, except for `FORKING`, if known."""
    tasks = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file,
            ):
                if file.read().strip() not in FORKING:
                    tasks.add(task)
    return tasks


def _files() -> set[tuple[str, str]]:
    """Return the open descriptors (including CUDA's) and what they refer to, if known."""
    files = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                files.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return files
