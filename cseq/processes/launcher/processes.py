"""The trainer's side of child processes, and the launchers that start them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import marshal
import os
import signal
import sys
import time
from contextvars import Context
from typing import TYPE_CHECKING, Any, cast

from cseq import system
from cseq._lock import Lock
from cseq._memory import fork
from cseq.memory.descriptors import anonymous_file
from cseq.processes.launcher.base import (
    FOREVER,
    KILL,
    KILLED,
    LAST,
    SHIELDED,
    descendants,
    flush_output,
)
from cseq.processes.launcher.child import begin_as_copy, is_measured
from cseq.processes.launcher.forks import handing_over, pair
from cseq.threads import Latch, await_logged, log_later

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator, Sequence

    from cseq.processes.launcher.base import Identity, Start

WORKER = "cseq.processes.launcher.child"
PAUSE = 0.001


class Child:
    """A child process.

    `gone` and `status` reap the process. Only threads that watch workers call them, because a
    signal handler that raises an exception would lose the exit status. Any thread may send signals.

    Parameters
    ----------
    sock : socket
        The trainer's end of the connection to the process.
    pid : int
        The process id.

    Attributes
    ----------
    handle : int or None
        The handle of the process on Windows.
    ended, code : Latch, int or None
        A latch that is set when the process has exited, and the exit code (set first), if known.
    """

    handle: int | None = None

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock, self.pid = sock, pid
        self.ended = Latch()
        self.code: int | None = None
        self._parent_pid = os.getpid()
        # The lock is held while a signal is sent, because a reaped pid may be reused. It is
        # reentrant, because a signal handler may send a signal.
        self._lock = Lock()

    @property
    def gone(self) -> bool:
        """Whether the process has exited and no longer accesses memory."""
        self.status(0)
        return self.ended.wait(0)

    def kill(self) -> None:
        """Kill the process and, on Linux, its descendants."""
        self.send_signal(KILL, tree=True)

    def send_signal(self, signum: int, *, tree: bool = False) -> None:
        """Send a signal to the process, unless it is gone. `tree` includes descendants (Linux)."""
        if os.getpid() != self._parent_pid:
            return
        try:
            with self._lock.hold():
                if not self.ended.wait(0):
                    self._send(signum, tree=tree)
        except PermissionError:
            log_later(
                logging.WARNING, "no permission to send signal %d to process %d", signum, self.pid
            )

    def status(self, timeout: float) -> int | None:
        """Wait until the process exits, and return the exit code.

        Return None after `timeout` seconds (`gone` is False). Also return None for an unknown exit
        code (`gone` is True): the fork server died, or other code has reaped the process.
        """
        deadline = time.monotonic() + timeout
        while not self._has_ended():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, PAUSE))
        return self.code

    def _send(self, signum: int, *, tree: bool) -> None:
        started = descendants(self.pid) if tree else []
        for pid in (self.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _has_ended(self) -> bool:
        """Reap the process. Return False if it is still running."""
        with self._lock.hold():
            if not self.ended.wait(0):
                # If other code has reaped the process, the status is lost.
                with contextlib.suppress(ChildProcessError):
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid == 0:
                        return False
                    self.code = os.waitstatus_to_exitcode(status)
                self.ended.set()
        return True


class _WindowsChild(Child):
    """A child process on Windows. An open handle keeps its pid from being reused."""

    def __init__(self, sock: socket.socket, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(sock, popen.pid)
        self._popen = popen
        self.handle = int(cast("Any", popen)._handle)

    def _send(self, signum: int, *, tree: bool) -> None:  # noqa: ARG002
        if signum != KILL:
            self._popen.send_signal(signum)
        elif self._popen.poll() is None:
            with contextlib.suppress(PermissionError):
                importlib.import_module("_winapi").TerminateProcess(self.handle, KILLED)

    def _has_ended(self) -> bool:
        with self._lock.hold():
            self.code = self._popen.poll()
            if self.code is not None:
                self.ended.set()
        return self.ended.wait(0)


class Launcher:
    """Base class for launchers. Each start method has its own subclass.

    Use a launcher only in the process that created it, and in threads without signal handlers.
    `cancel` is thread-safe.

    Parameters
    ----------
    entry, threads
        See `make_launcher`.

    Attributes
    ----------
    takes_objects : bool
        Whether workers inherit `context` and `local`.
    importing : str
        The module that is being imported, or "".
    """

    takes_objects = False
    local: object = None
    importing = ""

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry, self._threads = entry, threads
        self._children: set[Child] = set()
        self._cancelled = False
        self.context = Context()

    def prepare(self, *, preload: bool = True) -> None:
        """Start a fork server without waiting. If `preload` is set, it will import modules."""

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make a fork server import modules for all workers.

        If this is not safe or takes longer than `seconds`, workers import all modules themselves,
        and a message is logged.
        """

    def cancel(self) -> None:
        """Interrupt `launch`, and start no more workers."""
        self._cancelled = True

    def launch(self, worker: int) -> Child:
        """Start a worker process.

        Raises
        ------
        OSError
            If the process cannot be started in time (TimeoutError) or at all, or if `cancel` was
            called (InterruptedError).
        """
        self._check()
        self._children -= {child for child in set(self._children) if child.ended.wait(0)}
        child = self._launch(worker)
        self._children.add(child)
        return child

    def _launch(self, worker: int) -> Child:
        raise NotImplementedError

    def _check(self) -> None:
        if self._cancelled:
            raise InterruptedError("no worker was started, because the workers are being stopped")

    def close(self, deadline: float) -> bool:
        """Kill workers that are still running, and stop the servers.

        A server that is running at `deadline` (`time.monotonic`) is killed. Return True if all
        processes are gone. Otherwise, this may be called again.
        """
        children = set(self._children)
        for child in children:
            if not child.gone:
                child.kill()
        for child in children:
            child.status(max(LAST, deadline - time.monotonic()))
        return self._end_servers(deadline) and all(child.gone for child in children)

    def _end_servers(self, deadline: float) -> bool:  # noqa: ARG002
        """Stop using the servers, and end unused ones. Return False on failure."""
        return True


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a socket for this process, and one for a process started within this context.

    Signals for the trainer are blocked in this thread, and in the new process until it ignores
    them.
    """
    ours, theirs = pair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs, contextlib.ExitStack() as unblock:
            if hasattr(signal, "pthread_sigmask"):
                before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
                unblock.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            yield ours, theirs
        undo.pop_all()


# The code that a new interpreter runs. It sets sys.path before importing cseq, so that files in the
# current folder do not shadow the standard library. Without `gc.disable`, garbage collection would
# repeatedly traverse imported objects.
_BOOTSTRAP = """\
import gc, marshal, os, sys
gc.disable()
try:
    start = marshal.load(open(0, "rb", closefd=False))
except EOFError:
    os._exit(0)
sys.path[:] = start["path"]
from importlib import import_module
import_module(start["module"]).begin_process(start)
"""


def spawn(start: Start, title: str, threads: int | None) -> Child:
    """Start a new interpreter that calls `begin_process(start)`."""
    executable, environment = _executable()
    environment |= system.thread_variables(threads, environment)
    subprocess = importlib.import_module("subprocess")
    flags = subprocess._args_from_interpreter_flags()
    command = [executable, *flags, "-c", _BOOTSTRAP, title]
    with connected() as (ours, theirs):
        if os.name == "nt":
            # pythonw has no standard streams, and pipes would have no reader.
            lacking = [name for name in ("stdout", "stderr") if getattr(sys, f"__{name}__") is None]
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                # A new process group does not receive Ctrl-C.
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
                **dict.fromkeys(lacking, subprocess.DEVNULL),
            )
            # Ignore an error: if the process is already dead, the socket will reach EOF.
            with contextlib.suppress(OSError), popen.stdin as pipe:
                own = cast("Any", theirs).share(popen.pid)
                pipe.write(marshal.dumps(start | {"socket": own}))
            return _WindowsChild(ours, popen)
        # A pipe created by `Popen` could reuse the descriptors of closed standard streams.
        given, _ = anonymous_file("cseq-start")
        fd = theirs.fileno()
        os.write(given.fd, marshal.dumps(start | {"socket": fd}))
        os.lseek(given.fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(command, env=environment, stdin=given.fd, pass_fds=[fd])
        # Keep `Popen` from waiting for the process, because `Child` reaps it.
        popen.returncode = 0
        return Child(ours, popen.pid)


def trainer_identity() -> Identity:
    """Return the `Identity` of this process."""
    process: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if process is None else process.current_process().name
    return name, os.getpid()


def describe_start(entry: str, module: str, worker: int | None = None) -> Start:
    """Create the first message to a new interpreter."""
    words = [str(word) for word in sys.argv] if hasattr(sys, "argv") else []
    start: Start = {"module": module, "entry": entry, "worker": worker}
    start |= {"path": _search_path(), "argv": words}
    return start | {"trainer": trainer_identity(), "measured": is_measured()}


def _search_path() -> list[str]:
    """Return sys.path, including the folder that contains cseq."""
    path = [os.fsdecode(folder) for folder in sys.path if isinstance(folder, (str, bytes))]
    home = os.path.dirname(os.path.abspath(sys.modules["cseq"].__path__[0]))
    # Relative paths stay relative, because the working directory may be deleted.
    folders = [os.path.normpath(folder) for folder in path if os.path.isabs(folder)]
    return path if home in folders else [*path, home]


def _executable() -> tuple[str, dict[str, str]]:
    executable = sys.executable
    if "multiprocessing.spawn" in sys.modules or getattr(sys, "frozen", False) or not executable:
        spawn = importlib.import_module("multiprocessing.spawn")
        executable = os.fsdecode(spawn.get_executable() or "")
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        raise OSError(
            f"worker processes cannot be started, because {executable!r} is not a Python "
            "interpreter. Set an interpreter with multiprocessing.set_executable(), or use "
            "threads (MTSequence) or start_method='fork'"
        )
    base = getattr(sys, "_base_executable", executable)
    if os.name == "nt" and executable == sys.executable != base:
        # A virtual environment's python.exe is a stub, so start the base interpreter instead.
        return base, {**os.environ, "__PYVENV_LAUNCHER__": executable}
    return executable, dict(os.environ)


class SpawnLauncher(Launcher):
    """Starts each worker in a new interpreter."""

    def _launch(self, worker: int) -> Child:
        return spawn(describe_start(self._entry, WORKER, worker), f"cseq-w{worker}", self._threads)


class ForkLauncher(Launcher):
    """Forks each worker from the trainer."""

    takes_objects = True

    def _launch(self, worker: int) -> Child:
        flush_output()
        # The logging thread may be holding locks on the standard streams.
        await_logged(time.monotonic() + LAST)
        if self._threads is not None:
            system.find_openblas()
        setting = worker, self._entry, self.local, self._threads, trainer_identity()
        with connected() as (ours, theirs), handing_over(theirs):
            pid = fork()
            if pid == 0:
                self.context.run(begin_as_copy, theirs, *setting)
            theirs.close()
            return Child(ours, pid)
