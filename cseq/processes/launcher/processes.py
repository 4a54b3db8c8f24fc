"""The trainer's side: child processes, launchers and new interpreters."""

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
    """A child process, as the trainer sees it.

    `gone` and `status` reap the process, and set `ended` and `code`. They are only called by
    threads that watch workers, because the exit status would be lost if a signal handler raised in
    one of them. Any thread may read `ended` and `code`, and may send signals.

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
        A latch that is set when the process has exited, and the exit code, which is set before the
        latch if it is known.
    """

    handle: int | None = None

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock, self.pid = sock, pid
        self.ended = Latch()
        self.code: int | None = None
        self._parent_pid = os.getpid()
        # Held while a signal is sent, because the pid may be reused after the process is reaped.
        # The lock is reentrant, because a signal handler may send a signal during this time.
        self._lock = Lock()

    @property
    def gone(self) -> bool:
        """Whether the process has definitely exited, and no longer accesses memory."""
        self.status(0)
        return self.ended.wait(0)

    def kill(self) -> None:
        """Kill the process, unless it is gone. On Linux, also kill its descendants."""
        self.send_signal(KILL, tree=True)

    def send_signal(self, signum: int, *, tree: bool = False) -> None:
        """Send a signal to the process, unless it is gone, but never to a later process.

        On Linux, with `tree=True`, the descendants of the process also get the signal.
        """
        if os.getpid() != self._parent_pid:
            return
        try:
            with self._lock.hold():
                if not self.ended.wait(0):
                    self._send(signum, tree=tree)
        except PermissionError:
            log_later(
                logging.WARNING, "process %d gets no signal %d: no permission", self.pid, signum
            )

    def status(self, timeout: float) -> int | None:
        """Wait until the process exits, and return the exit code.

        Return None if the process does not exit within `timeout` seconds (`gone` is False), or if
        the exit code is unknown (`gone` is True), because the fork server died before the process
        or because other code in the trainer has reaped it.
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
        """Reap the process. Return False if it has not exited."""
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
    """A child process on Windows, where a pid is not reused as long as a handle is open."""

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
    """The base class of all start methods.

    A launcher may only be used in the process that created it, and only by threads in which signal
    handlers do not run. `cancel` is thread-safe.

    Parameters
    ----------
    entry, threads
        See `make_launcher`.

    Attributes
    ----------
    takes_objects : bool
        Whether workers inherit `context`, and `local`, which is passed to ``entry(sock, local)``.
    importing : str
        The module that is being imported for all workers, or "".
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
        """Start a fork server without waiting for it. `preload` says if it will import modules."""

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Make a fork server import modules for all workers, before the next `launch`.

        If importing a module before a fork is not safe, ends the server or takes longer than
        `seconds`, workers import all modules on their own, and a log message names the module.
        """

    def cancel(self) -> None:
        """Interrupt `launch` and do not start more workers."""
        self._cancelled = True

    def launch(self, worker: int) -> Child:
        """Start a worker process, which calls ``entry(sock)``. Its name contains its number.

        Raises
        ------
        OSError
            If the process cannot be started, if it does not start in time (TimeoutError), or if
            `cancel` was called (InterruptedError).
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
            raise InterruptedError("no worker was started, because the workers are being ended")

    def close(self, deadline: float) -> bool:
        """Kill workers that are still running, and stop the servers.

        A server that is still running at `deadline` (`time.monotonic`) is killed. Return True if
        all processes are gone and have been reaped. Otherwise, this may be called again.
        """
        children = set(self._children)
        for child in children:
            if not child.gone:
                child.kill()
        for child in children:
            child.status(max(LAST, deadline - time.monotonic()))
        return self._end_servers(deadline) and all(child.gone for child in children)

    def _end_servers(self, deadline: float) -> bool:  # noqa: ARG002
        """Stop the servers that have started workers. Return True if they are gone."""
        return True


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a socket for this process, and a socket for a process that is started in this context.

    Signals that are meant for the trainer are blocked in this thread until the context exits, and
    in the new process until it can ignore them.
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


# The program that a new interpreter runs. It sets sys.path as in the trainer before it imports
# cseq, so that files in the current folder do not shadow modules of the standard library. It
# disables the garbage collector, which would traverse imported objects again and again.
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
    """Start a new interpreter, which calls `begin_process(start)` in the module that `start` names.

    Libraries in this interpreter and its children use `threads` compute threads.
    """
    executable, environment = _executable()
    environment |= system.thread_variables(threads, environment)
    subprocess = importlib.import_module("subprocess")
    flags = subprocess._args_from_interpreter_flags()
    command = [executable, *flags, "-c", _BOOTSTRAP, title]
    with connected() as (ours, theirs):
        if os.name == "nt":
            # pythonw has no streams, and subprocess would create pipes that nobody reads.
            lacking = [name for name in ("stdout", "stderr") if getattr(sys, f"__{name}__") is None]
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                # A new process group does not get Ctrl-C.
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
                **dict.fromkeys(lacking, subprocess.DEVNULL),
            )
            # Ignore errors, because if the process is dead, the socket is at end of file.
            with contextlib.suppress(OSError), popen.stdin as pipe:
                own = cast("Any", theirs).share(popen.pid)
                pipe.write(marshal.dumps(start | {"socket": own}))
            return _WindowsChild(ours, popen)
        # Do not use a pipe of `Popen`, which may get the numbers of closed standard streams.
        given, _ = anonymous_file("cseq-start")
        fd = theirs.fileno()
        os.write(given.fd, marshal.dumps(start | {"socket": fd}))
        os.lseek(given.fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(command, env=environment, stdin=given.fd, pass_fds=[fd])
        # Keep `Popen` from waiting, because `Child` waits for the process.
        popen.returncode = 0
        return Child(ours, popen.pid)


def trainer_identity() -> Identity:
    """Return the identity of this process."""
    process: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if process is None else process.current_process().name
    return name, os.getpid()


def describe_start(entry: str, module: str, worker: int | None = None) -> Start:
    """Create the first message to a new interpreter, which is a worker or a fork server."""
    words = [str(word) for word in sys.argv] if hasattr(sys, "argv") else []
    start: Start = {"module": module, "entry": entry, "worker": worker}
    start |= {"path": _search_path(), "argv": words}
    return start | {"trainer": trainer_identity(), "measured": is_measured()}


def _search_path() -> list[str]:
    """Return sys.path, to which the folder of cseq is added if it is missing."""
    path = [os.fsdecode(folder) for folder in sys.path if isinstance(folder, (str, bytes))]
    home = os.path.dirname(os.path.abspath(sys.modules["cseq"].__path__[0]))
    # Relative paths remain relative, because the working directory may have been deleted.
    folders = [os.path.normpath(folder) for folder in path if os.path.isabs(folder)]
    return path if home in folders else [*path, home]


def _executable() -> tuple[str, dict[str, str]]:
    executable = sys.executable
    if "multiprocessing.spawn" in sys.modules or getattr(sys, "frozen", False) or not executable:
        spawn = importlib.import_module("multiprocessing.spawn")
        executable = os.fsdecode(spawn.get_executable() or "")
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        raise OSError(
            f"there is no Python interpreter to start worker processes with: {executable!r} is "
            "this program. Set an interpreter with multiprocessing.set_executable(), or use "
            "threads (MTSequence) or start_method='fork'"
        )
    base = getattr(sys, "_base_executable", executable)
    if os.name == "nt" and executable == sys.executable != base:
        # Start the base interpreter, like python.exe of a virtual environment, which is a stub.
        return base, {**os.environ, "__PYVENV_LAUNCHER__": executable}
    return executable, dict(os.environ)


class SpawnLauncher(Launcher):
    """Starts each worker as a new interpreter."""

    def _launch(self, worker: int) -> Child:
        return spawn(describe_start(self._entry, WORKER, worker), f"cseq-w{worker}", self._threads)


class ForkLauncher(Launcher):
    """Starts each worker as a forked copy of the trainer."""

    takes_objects = True

    def _launch(self, worker: int) -> Child:
        flush_output()
        # The thread that logs may hold locks of the standard streams.
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
