"""The new process's side: a worker, or the server that forks workers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, cast

from cseq import system
from cseq._memory import Descriptor, fork, fork_depth
from cseq.memory.descriptors import receive_exactly
from cseq.processes.launcher.base import (
    BORN,
    DONE,
    EXIT,
    FAIL,
    FAILED,
    FILES,
    FORK,
    IMPORT,
    KEPT,
    SHIELDED,
    THREADS,
    end_copy,
    exit_code_of,
    flush_output,
    hung_up,
    reading,
    receive,
    send,
)
from cseq.processes.launcher.forks import close_in_forks, in_forked_children

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity, Start

# Threads, by name, that a library starts again in a forked process: jemalloc's (in pyarrow).
FORKING = ("jemalloc_bg_thd",)


def begin(start: Start) -> NoReturn:
    """Run the worker or the server that this interpreter is for; its garbage collector is off."""
    _shield()
    _empty_stdin()
    _clear_main()
    sys.argv[:] = start["argv"]
    importlib.import_module("multiprocessing")  # before it can take this for the trainer
    sock = _own_socket(start["socket"])
    if start["role"] == "server":
        _Forker(sock, start["entry"], start["trainer"]).serve()
    gc.enable()
    _work(sock, start["number"], start["entry"], start["trainer"])


def begin_as_copy(
    sock: socket.socket,
    number: int,
    entry: str,
    local: object,
    threads: int | None,
    trainer: Identity,
) -> NoReturn:
    """Run a worker in a forked copy of the trainer."""
    try:
        system.limit_threads(threads)
        gc.freeze()  # the trainer's objects: looking through them would copy their pages
        atexit._clear()
        signal.set_wakeup_fd(-1)
        _drop_handlers()
        threading.current_thread().name = "MainThread"  # that of the supervisor has forked
        _shield()
        _empty_stdin()
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the old has read ahead
    except BaseException:  # noqa: BLE001 - it must not go back into the user's code
        _leave(_report(number), number)
    _work(sock, number, entry, trainer, local)


def _own_socket(handle: int | bytes) -> socket.socket:
    """Make the socket of the handle that this process was given."""
    if isinstance(handle, bytes):
        sock: socket.socket = cast("Any", socket).fromshare(handle)
        return sock
    os.set_inheritable(handle, False)  # noqa: FBT003 - its own way
    return socket.socket(fileno=handle)


def _shield() -> None:
    """Ignore signals that are meant for the trainer.

    By a handler: signals that are ignored by `SIG_IGN` are ignored by executed programs, too, and a
    worker could not stop its own children by SIGTERM.
    """
    for number in SHIELDED:
        signal.signal(number, _ignore)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)  # noqa: FBT003 - its own way
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _unshield() -> None:
    """Restore the usual handling of signals, in a process that a worker forks."""
    for number in SHIELDED:
        if signal.getsignal(number) is _ignore:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _ignore(number: int, frame: object) -> None:
    """Do nothing about a signal."""


def _drop_handlers() -> None:
    """Reset the trainer's signal handlers: they are not for workers."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in SHIELDED:
            signal.signal(number, signal.SIG_DFL)


def _empty_stdin() -> None:
    """Make standard input empty: input of the terminal is for the trainer.

    Standard streams that the trainer has closed are opened, or files of the user's libraries would
    get their numbers.
    """
    try:
        fd = os.open(os.devnull, os.O_RDWR)
    except OSError:  # a container without devices: the end of a pipe, which cannot be written to
        fd, other = os.pipe()
        os.close(other)
    os.dup2(fd, 0)
    for stream in (1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.dup2(fd, stream)
    if fd > 2:
        os.close(fd)


def _clear_main() -> None:
    """Remove all names from ``__main__``: classes of the user's script will be put there."""
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]


def set_name(name: str) -> None:
    """Set the name that the system's process list shows."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def _work(
    sock: socket.socket, number: int, entry: str, trainer: Identity, local: object = None
) -> NoReturn:
    """Run a worker's entry, and end the process; one that user code has forked off it, too."""
    depth = fork_depth()
    try:
        close_in_forks(sock)
        in_forked_children(_unshield)
        if "multiprocessing.process" in sys.modules:
            identity = importlib.import_module("cseq.processes.launcher.identity")
            identity.adopt(number, trainer, sock.fileno())
        set_name(f"cseq-w{number}")
        module, _, function = entry.partition(":")
        run = getattr(importlib.import_module(module), function)
        code = exit_code_of(run(sock) if local is None else run(sock, local))
        if fork_depth() != depth:
            end_copy(None)
    except BaseException as error:  # noqa: BLE001 - no caller above handles it
        if fork_depth() != depth:
            end_copy(error)
        code = _code_after(error, sock, number)
    _leave(code, number)


def _code_after(error: BaseException, sock: socket.socket, number: int) -> int:
    """Return the exit code of a worker whose entry has raised; report what is an error."""
    if isinstance(error, SystemExit):
        return exit_code_of(error.code)
    if isinstance(error, ConnectionError) and hung_up(sock):
        return 0  # the trainer is gone: nothing to report
    return _report(number)


def _report(number: int) -> int:
    """Print the current exception, of a worker of this number; return the exit code for it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr
        sys.stderr.write(f"cseq: worker {number} (process {os.getpid()}) ends with an exception:\n")
        sys.__excepthook__(*cast("Any", sys.exc_info()))
    return 1


def _leave(code: int, number: int) -> NoReturn:
    """End the process, without waiting for its threads."""
    try:
        if "concurrent.futures.process" in sys.modules:
            importlib.import_module("cseq.processes.launcher.identity").close_pools()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - no caller above handles it
        _report(number)
    flush_output()
    os._exit(code)


class _Forker:
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
        self._listen()
        while self._step():
            pass
        os._exit(0)

    def _listen(self) -> None:
        """Make the end of a child wake the loop."""
        self._woken.settimeout(0)
        self._wake.settimeout(0)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._sock, select.POLLIN)

    def _step(self) -> bool:
        """Wait for a request or the end of a child, and handle it; False: the trainer is gone."""
        ready = [fd for fd, _ in self._poll.poll()]
        if self._woken.fileno() in ready:
            self._woken.recv(4096)  # first: a child that ends later wakes it again
            self._reap()
        if self._sock.fileno() not in ready:
            return True
        record = receive(self._sock)
        if record is None:
            return False
        answers = socket.socket(fileno=record.fds[0])
        if record.what == FORK:
            self._fork(answers, record.fds[1], record.value)
        elif record.what == IMPORT:
            name = receive_exactly(self._sock, record.value).decode()
            close_in_forks(answers)
            send(answers, DONE, _import(name))
            answers.close()
        return True

    def _fork(self, reports: socket.socket, fd: int, number: int) -> None:
        """Start a worker, which owns the socket `fd`."""
        gc.freeze()  # or every worker's garbage collector would copy these pages
        try:
            pid = fork()
        except OSError as error:
            os.close(fd)
            send(reports, FAIL, error.errno or 1)
            reports.close()
            return
        if pid == 0:
            self._become_worker(reports, fd, number)
        os.close(fd)
        close_in_forks(reports)
        self._reports[pid] = reports

    def _become_worker(self, reports: socket.socket, fd: int, number: int) -> NoReturn:
        """Run a worker in the copy of the server; the end of `reports` will be that of both.

        So the worker itself says that it is born: the server may die before it could.
        """
        try:
            pidfds = []
            with contextlib.suppress(AttributeError, OSError):  # macOS, old kernels
                pidfds = [Descriptor(os.pidfd_open, os.getpid())]
            send(reports, BORN, os.getpid(), *(pidfd.fd for pidfd in pidfds))
            del pidfds
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._woken.close()
            self._wake.close()
            gc.enable()
            close_in_forks(reports)
            sock = socket.socket(fileno=fd)
        except BaseException:  # noqa: BLE001 - it must not go back to serving
            _leave(_report(number), number)
        _work(sock, number, self._entry, self._trainer)

    def _reap(self) -> None:
        """Reap every child that has ended, and say how."""
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._reports.pop(pid, contextlib.nullcontext()) as reports:
                if reports is not None:
                    send(reports, EXIT, os.waitstatus_to_exitcode(status))


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
