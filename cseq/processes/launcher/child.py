"""Startup and exit of a worker process, from within the process."""

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
from cseq._memory import HAS_GIL, fork_depth
from cseq.memory.descriptors import own_offsets
from cseq.processes.launcher.base import SHIELDED, end_copy, exit_code_of, flush_output, readable
from cseq.processes.launcher.forks import close_in_forks, in_forked_children

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity, Start


LOKY = ("loky", "joblib.externals.loky")
# Modules whose process pools are stopped before `atexit`.
POOLS = ("concurrent.futures.process", *(f"{name}.process_executor" for name in LOKY))


def prepare(start: Start) -> socket.socket:
    """Set up this interpreter and return its socket."""
    _shield()
    _empty_stdin()
    _clear_main()
    sys.argv[:] = start["argv"]
    # If imported later, multiprocessing would mistake this process for the trainer.
    importlib.import_module("multiprocessing")
    _measure_as(start["measured"])
    return _own_socket(start["socket"])


def begin_process(start: Start) -> NoReturn:
    """Run a worker in this interpreter."""
    sock = prepare(start)
    gc.enable()
    work(sock, start["worker"], start["entry"], start["trainer"])


def begin_as_copy(
    sock: socket.socket,
    worker: int,
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
        # Keep garbage collection from copying all pages that contain the trainer's objects. Without
        # a GIL, `freeze` would copy them, because it marks each object.
        if HAS_GIL:
            gc.freeze()
        atexit._clear()
        signal.set_wakeup_fd(-1)
        _drop_handlers()
        threading.current_thread().name = "MainThread"
        _shield()
        _empty_stdin()
        # Replace the trainer's stream, because it may contain buffered input.
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    except BaseException:  # noqa: BLE001
        leave(report(worker), worker)
    work(sock, worker, entry, trainer, local)


_measures = False


def is_measured() -> bool:
    """Return True if coverage is measuring this process and its multiprocessing children."""
    measuring: Any = getattr(sys.modules.get("coverage"), "Coverage", None)
    current = None if measuring is None else measuring.current()
    return current is not None and "multiprocessing" in current.get_option("run:concurrency")


def _measure_as(measures: bool) -> None:  # noqa: FBT001
    global _measures
    _measures = measures


def _measure() -> None:
    """Start coverage as in a `multiprocessing.Process`. An `atexit` function writes its data."""
    coverage: Any = importlib.import_module("coverage")
    measuring = coverage.Coverage(data_suffix=True, auto_data=True)
    measuring._warn_preimported_source = measuring._warn_no_data = False
    measuring.start()
    # Coverage may have installed a SIGTERM handler.
    _shield()


def _own_socket(handle: int | bytes) -> socket.socket:
    if isinstance(handle, bytes):
        sock: socket.socket = cast("Any", socket).fromshare(handle)
        return sock
    os.set_inheritable(handle, False)  # noqa: FBT003
    return socket.socket(fileno=handle)


def _shield() -> None:
    """Ignore signals that are meant for the trainer.

    Executed programs would inherit `SIG_IGN`, but not this handler.
    """
    for signum in SHIELDED:
        signal.signal(signum, ignore)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(signum, False)  # noqa: FBT003
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _unshield() -> None:
    """Restore the default handlers in a fork of a worker."""
    for signum in SHIELDED:
        if signal.getsignal(signum) is ignore:
            usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, usual)


def ignore(signum: int, frame: object) -> None:
    """Ignore a signal."""


def _drop_handlers() -> None:
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)) and signum not in SHIELDED:
            signal.signal(signum, signal.SIG_DFL)


def _empty_stdin() -> None:
    """Make standard input empty, because the terminal belongs to the trainer.

    Closed output streams are reopened, so that no other file can take their descriptors.
    """
    try:
        fd = os.open(os.devnull, os.O_RDWR)
    # A container may lack device files.
    except OSError:
        fd, writer = os.pipe()
        os.close(writer)
    os.dup2(fd, 0)
    for stream in (1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.dup2(fd, stream)
    if fd > 2:
        os.close(fd)


def _clear_main() -> None:
    """Clear ``__main__`` to make room for classes from the user's script."""
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]


def set_name(name: str) -> None:
    """Set the name of this process."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def work(
    sock: socket.socket, worker: int, entry: str, trainer: Identity, local: object = None
) -> NoReturn:
    """Call the worker's entry function and exit. Forks of the worker that get here exit, too."""
    depth = fork_depth()
    try:
        close_in_forks(sock)
        in_forked_children(_unshield)
        if "multiprocessing.process" in sys.modules:
            _adopt(worker, trainer, sock.fileno())
        set_name(f"cseq-w{worker}")
        if _measures:
            _measure()
        module, _, function = entry.partition(":")
        run = getattr(importlib.import_module(module), function)
        code = exit_code_of(run(sock) if local is None else run(sock, local))
        if fork_depth() != depth:
            end_copy(None)
    except BaseException as error:  # noqa: BLE001
        if fork_depth() != depth:
            end_copy(error)
        code = _code_after(error, sock, worker)
    leave(code, worker)


def _adopt(worker: int, trainer: Identity, sentinel: int) -> None:
    """Tell multiprocessing and process pools that this is a new process.

    Otherwise, they would use the parent's threads and finalizers.
    """
    modules: Any = sys.modules
    multiprocessing, module = modules["multiprocessing"], modules["multiprocessing.process"]
    process = multiprocessing.Process(name=f"cseq-w{worker}")
    # Number the workers, because multiprocessing would give each of them number 1.
    process._identity = (worker + 1,)
    module._current_process = process
    module._parent_process = module._ParentProcess(*trainer, sentinel)
    module._children = set()
    util = modules.get("multiprocessing.util")
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


# Keeps joblib's pools alive, because their finalizers would wait for nonexistent threads.
_inherited: list[Any] = []


def _imported(*names: str) -> list[Any]:
    return [sys.modules[name] for name in names if name in sys.modules]


def _hung_up(sock: socket.socket) -> bool:
    """Return True if the other end was closed. Unread data is discarded."""
    try:
        while sock.fileno() >= 0 and readable(sock.fileno(), 0):
            if not sock.recv(65536):
                return True
    except ConnectionError:
        return True
    return sock.fileno() < 0


def _code_after(error: BaseException, sock: socket.socket, worker: int) -> int:
    """Report an exception and return the exit code."""
    if isinstance(error, SystemExit):
        return exit_code_of(error.code)
    if isinstance(error, ConnectionError) and _hung_up(sock):
        return 0
    return report(worker)


def report(worker: int) -> int:
    """Print the exception that ends a worker, and return the exit code."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"cseq: worker {worker} (process {os.getpid()}) raised an exception:\n")
        sys.__excepthook__(*cast("Any", sys.exc_info()))
    return 1


def leave(code: int, worker: int) -> NoReturn:
    """Exit without waiting for threads."""
    try:
        # Stop process pools, because multiprocessing would wait forever for their processes.
        for pools in _imported(*POOLS):
            with contextlib.suppress(OSError):
                pools._python_exit()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001
        report(worker)
    flush_output()
    os._exit(code)
