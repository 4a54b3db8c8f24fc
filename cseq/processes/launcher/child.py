"""The new process: how a worker begins and ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, cast

from cseq import system
from cseq._memory import fork_depth
from cseq.memory.descriptors import own_offsets
from cseq.processes.launcher.base import SHIELDED, end_copy, exit_code_of, flush_output, readable
from cseq.processes.launcher.forks import close_in_forks, in_forked_children

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity, Start


LOKY = ("loky", "joblib.externals.loky")
# Modules of process pools, which end their processes where the interpreter ends, before `atexit`.
POOLS = ("concurrent.futures.process", *(f"{name}.process_executor" for name in LOKY))


def prepare(start: Start) -> socket.socket:
    """Make this new interpreter what `start` says; return its socket."""
    _shield()
    _empty_stdin()
    _clear_main()
    sys.argv[:] = start["argv"]
    importlib.import_module("multiprocessing")  # before it can take this for the trainer
    _measure_as(start["measured"])
    return _own_socket(start["socket"])


def begin(start: Start) -> NoReturn:
    """Run the worker that this interpreter is for; its garbage collector is off."""
    sock = prepare(start)
    gc.enable()
    work(sock, start["number"], start["entry"], start["trainer"])


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
        _measure_as(is_measured())
        own_offsets()
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
        leave(report(number), number)
    work(sock, number, entry, trainer, local)


_measures = False  # this process, or the workers that are forked off it, by coverage


def is_measured() -> bool:
    """Whether coverage measures this process, and is to measure what multiprocessing starts."""
    measuring: Any = getattr(sys.modules.get("coverage"), "Coverage", None)
    current = None if measuring is None else measuring.current()
    return current is not None and "multiprocessing" in current.get_option("run:concurrency")


def _measure_as(measures: bool) -> None:  # noqa: FBT001 - its one meaning
    global _measures
    _measures = measures


def _measure() -> None:
    """Begin to measure, as in a `multiprocessing.Process`; what `atexit` runs writes the file."""
    coverage: Any = importlib.import_module("coverage")
    measuring = coverage.Coverage(data_suffix=True, auto_data=True)
    measuring._warn_preimported_source = measuring._warn_no_data = False
    measuring.start()
    _shield()  # it may have a handler for SIGTERM


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
        signal.signal(number, ignore)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)  # noqa: FBT003 - its own way
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _unshield() -> None:
    """Restore the usual handling of signals, in a process that a worker forks."""
    for number in SHIELDED:
        if signal.getsignal(number) is ignore:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def ignore(number: int, frame: object) -> None:
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


def work(
    sock: socket.socket, number: int, entry: str, trainer: Identity, local: object = None
) -> NoReturn:
    """Run a worker's entry, and end the process; one that user code has forked off it, too."""
    depth = fork_depth()
    try:
        close_in_forks(sock)
        in_forked_children(_unshield)
        if "multiprocessing.process" in sys.modules:
            _adopt(number, trainer, sock.fileno())
        set_name(f"cseq-w{number}")
        if _measures:
            _measure()
        module, _, function = entry.partition(":")
        run = getattr(importlib.import_module(module), function)
        code = exit_code_of(run(sock) if local is None else run(sock, local))
        if fork_depth() != depth:
            end_copy(None)
    except BaseException as error:  # noqa: BLE001 - no caller above handles it
        if fork_depth() != depth:
            end_copy(error)
        code = _code_after(error, sock, number)
    leave(code, number)


def _adopt(number: int, trainer: Identity, sentinel: int) -> None:
    """Tell multiprocessing, and process pools, that this is a new process.

    They may have threads and finalizers of the one that it was forked from. A
    `multiprocessing.Process` sees to this itself; its means have no public names.
    """
    known: Any = sys.modules
    multiprocessing, module = known["multiprocessing"], known["multiprocessing.process"]
    process = multiprocessing.Process(name=f"cseq-w{number}")
    process._identity = (number + 1,)  # in the trainer they are counted; each worker has begun anew
    module._current_process = process
    module._parent_process = module._ParentProcess(*trainer, sentinel)
    module._children = set()
    util = known.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.unregister(util._exit_function)
        atexit.register(util._exit_function)
    for pools in _imported(*POOLS):
        pools._threads_wakeups.clear()
    for reusing in _imported(*(f"{name}.reusable_executor" for name in LOKY)):
        _inherited.append(reusing._executor)
        reusing._executor, reusing._executor_lock = None, threading.RLock()


# The pools that joblib would use again, whose threads are not here: their end would wait for these.
_inherited: list[Any] = []


def _imported(*names: str) -> list[Any]:
    """Return the modules, of these names, that are imported."""
    return [sys.modules[name] for name in names if name in sys.modules]


def _hung_up(sock: socket.socket) -> bool:
    """Whether a socket's other end is closed; what was not read yet is dropped."""
    try:
        while sock.fileno() >= 0 and readable(sock.fileno(), 0):
            if not sock.recv(65536):
                return True
    except ConnectionError:
        return True
    return sock.fileno() < 0


def _code_after(error: BaseException, sock: socket.socket, number: int) -> int:
    """Return the exit code of a worker whose entry has raised; report what is an error."""
    if isinstance(error, SystemExit):
        return exit_code_of(error.code)
    if isinstance(error, ConnectionError) and _hung_up(sock):
        return 0  # the trainer is gone: nothing to report
    return report(number)


def report(number: int) -> int:
    """Print the current exception, of a worker of this number; return the exit code for it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr
        sys.stderr.write(f"cseq: worker {number} (process {os.getpid()}) ends with an exception:\n")
        sys.__excepthook__(*cast("Any", sys.exc_info()))
    return 1


def leave(code: int, number: int) -> NoReturn:
    """End the process, without waiting for its threads."""
    try:
        for pools in _imported(
            *POOLS
        ):  # else multiprocessing would wait for their processes for ever
            with contextlib.suppress(OSError):  # one was dropped just now, and is ending
                pools._python_exit()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - no caller above handles it
        report(number)
    flush_output()
    os._exit(code)
