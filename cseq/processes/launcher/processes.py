"""The trainer's side: its processes, what starts them, and new interpreters."""

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
from cseq.threads import Latch, await_told, tell

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator, Sequence

    from cseq.processes.launcher.base import Identity, Start

WORKER = "cseq.processes.launcher.child"  # the module that a worker runs
PAUSE = 0.001  # seconds between two looks at a process


class Child:
    """A process that was started here, as the trainer sees it: a child of this process.

    `gone` and `status` find out how it ends. An exception of a signal handler in their middle would
    lose what they have found, so they are for the threads that watch workers. Any thread may look
    at `ended` and `code`, which these set, and send signals.

    Parameters
    ----------
    sock : socket
        The trainer's end of the connection to it.
    pid : int

    Attributes
    ----------
    handle : int or None
        Of the process, on Windows.
    ended : Latch
        Set once the process is known to have ended.
    code : int or None
        Its exit code, set before that; None: not known.
    """

    handle: int | None = None

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.ended = Latch()
        self.code: int | None = None
        self._owner = os.getpid()
        # The number is free once the process is reaped. A signal handler of the main thread may
        # send a signal while that thread is sending one.
        self._lock = Lock()

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended: it will not touch memory again."""
        self.status(0)
        return self.ended.wait(0)

    def kill(self) -> None:
        """Kill it, unless it is gone, with the processes that it has started."""
        self.send_signal(KILL, tree=True)

    def send_signal(self, number: int, *, tree: bool = False) -> None:
        """Send a signal, unless the process is gone; never to a later one with the same number.

        `tree`: also to the processes that it has started, on Linux.
        """
        if os.getpid() != self._owner:
            return
        try:
            with self._lock.hold():
                if not self.ended.wait(0):
                    self._send(number, tree=tree)
        except PermissionError:  # this process has given up its rights
            tell(logging.WARNING, "process %d gets no signal %d: no permission", self.pid, number)

    def status(self, timeout: float) -> int | None:
        """Wait for the process to end, and return its exit code.

        None if it has not ended within `timeout` seconds (`gone` is False), or has ended and its
        status is unknown (`gone` is True): its fork server died before it, or other code in this
        process reaped it.
        """
        deadline = time.monotonic() + timeout
        while not self._has_ended():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, PAUSE))
        return self.code

    def _send(self, number: int, *, tree: bool) -> None:
        """Send a signal; the process is not reaped."""
        started = descendants(self.pid) if tree else []
        for pid in (self.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _has_ended(self) -> bool:
        """Reap the process, if it has ended; return whether it has."""
        with self._lock.hold():
            if not self.ended.wait(0):
                with contextlib.suppress(ChildProcessError):  # other code has reaped it: no status
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid == 0:
                        return False
                    self.code = os.waitstatus_to_exitcode(status)
                self.ended.set()
        return True


class _WindowsChild(Child):
    """On Windows, a handle keeps the process's number from being used again."""

    def __init__(self, sock: socket.socket, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(sock, popen.pid)
        self._popen = popen
        self.handle = int(cast("Any", popen)._handle)

    def _send(self, number: int, *, tree: bool) -> None:  # noqa: ARG002
        if number != KILL:
            self._popen.send_signal(number)
        elif self._popen.poll() is None:
            with contextlib.suppress(PermissionError):  # it has ended just now
                importlib.import_module("_winapi").TerminateProcess(self.handle, KILLED)

    def _has_ended(self) -> bool:
        with self._lock.hold():
            self.code = self._popen.poll()
            if self.code is not None:
                self.ended.set()
        return self.ended.wait(0)


class Launcher:
    """One way to start workers; the base of all of them.

    Its methods are for threads in which no signal handler runs, but `cancel` for any; and for the
    process that has made it, not for one that was forked from it.

    Parameters
    ----------
    entry, threads
        See `make_launcher`.

    Attributes
    ----------
    takes_objects : bool
        Whether workers inherit objects: then they are called as ``entry(sock, local)``.
    local : object
        What they inherit.
    context : Context
        The context variables that they have then.
    importing : str
        The module that is being imported for all workers now; "" if none is.
    """

    takes_objects = False
    local: object = None
    importing = ""

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry = entry
        self._threads = threads
        self._children: set[Child] = set()
        self._cancelled = False
        self.context = Context()

    def prepare(self, *, preload: bool = True) -> None:
        """Begin to start what `launch` needs (a fork server), without waiting for it.

        Without `preload`, it imports no modules for the workers.
        """

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Have `launch` import modules once for all workers, before the next of them.

        Only a fork server does so; other workers import by themselves. If one of these modules must
        not be imported before a fork, ends the server, or takes longer than `seconds`, the workers
        import all of them, and the log names it.
        """

    def cancel(self) -> None:
        """Interrupt `launch`; no worker is launched any more."""
        self._cancelled = True

    def launch(self, number: int) -> Child:
        """Start a worker process, which calls ``entry(sock)``.

        Parameters
        ----------
        number : int
            The worker's number, for its name in the system's process list.

        Raises
        ------
        OSError
            When the process cannot be started, not in time (TimeoutError), or not any more, after
            `cancel` (InterruptedError).
        """
        self._check()
        self._children -= {other for other in set(self._children) if other.ended.wait(0)}
        child = self._launch(number)
        self._children.add(child)
        return child

    def _launch(self, number: int) -> Child:
        raise NotImplementedError

    def _check(self) -> None:
        if self._cancelled:
            raise InterruptedError("no worker processes: they are being ended")

    def close(self, deadline: float) -> bool:
        """End all processes that were started here: workers that are left are killed.

        If a process lives on, a second call tries again.

        Parameters
        ----------
        deadline : float
            In seconds of `time.monotonic`. A server that has not ended by then is killed.

        Returns
        -------
        bool
            Whether everything is gone and reaped.
        """
        children = set(self._children)
        for child in children:
            if not child.gone:
                child.kill()
        for child in children:
            child.status(max(LAST, deadline - time.monotonic()))
        return self._end_servers(deadline) and all(child.gone for child in children)

    def _end_servers(self, deadline: float) -> bool:  # noqa: ARG002
        """End what has started the workers; return whether it is gone."""
        return True


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give this process's socket, and one for a process that is started meanwhile.

    Signals for the trainer are blocked in this thread and what it starts: they wait until the new
    process is ready to ignore them.
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


# The program of a new interpreter. It sets the trainer's sys.path before it imports cseq, so that
# no file in the current folder hides a module of the standard library. The garbage collector is off
# meanwhile: it would visit the imported objects again and again.
_BOOTSTRAP = """\
import gc, marshal, os, sys
gc.disable()
try:
    start = marshal.load(open(0, "rb", closefd=False))
except EOFError:
    os._exit(0)  # the trainer is gone
sys.path[:] = start["path"]
from importlib import import_module
import_module(start["module"]).begin(start)
"""


def spawn(start: Start, title: str, threads: int | None) -> Child:
    """Start a new interpreter that runs `begin(start)` of the module that `start` names.

    Its libraries, and its children's, compute with `threads` threads.
    """
    executable, environment = _executable()
    environment |= system.thread_variables(threads, environment)
    subprocess = importlib.import_module("subprocess")  # which forked workers do not need
    flags = subprocess._args_from_interpreter_flags()  # -X, -W, -O …, as multiprocessing has it
    command = [executable, *flags, "-c", _BOOTSTRAP, title]
    with connected() as (ours, theirs):
        if os.name == "nt":
            # pythonw has no streams: subprocess would give pipes that are not read.
            lacking = [name for name in ("stdout", "stderr") if getattr(sys, f"__{name}__") is None]
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,  # no Ctrl-C
                **dict.fromkeys(lacking, subprocess.DEVNULL),
            )
            with contextlib.suppress(OSError), popen.stdin as pipe:
                # If it is dead already, its socket is at end of file.
                own = cast("Any", theirs).share(popen.pid)
                pipe.write(marshal.dumps(start | {"socket": own}))
            return _WindowsChild(ours, popen)
        # No pipe of `Popen`: its ends may get the numbers of closed standard streams.
        given, _ = anonymous_file("cseq-start")
        fd = theirs.fileno()
        os.write(given.fd, marshal.dumps(start | {"socket": fd}))
        os.lseek(given.fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(command, env=environment, stdin=given.fd, pass_fds=[fd])
        popen.returncode = 0  # `Child` waits for it
        return Child(ours, popen.pid)


def trainer_identity() -> Identity:
    """Return this process's."""
    process: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if process is None else process.current_process().name
    return name, os.getpid()


def describe_start(entry: str, module: str, number: int | None = None) -> Start:
    """Describe to a new interpreter what it is: the worker of a number, or a fork server."""
    words = [str(word) for word in sys.argv] if hasattr(sys, "argv") else []
    start: Start = {"module": module, "entry": entry, "number": number}
    start |= {"path": _search_path(), "argv": words}
    return start | {"trainer": trainer_identity(), "measured": is_measured()}


def _search_path() -> list[str]:
    """Return sys.path, with the folder of this very cseq if it is not there (any more)."""
    path = [os.fsdecode(place) for place in sys.path if isinstance(place, (str, bytes))]
    home = os.path.dirname(os.path.abspath(sys.modules["cseq"].__path__[0]))
    # Relative ones stay as they are: the working directory may have been deleted.
    known = [os.path.normpath(place) for place in path if os.path.isabs(place)]
    return path if home in known else [*path, home]


def _executable() -> tuple[str, dict[str, str]]:
    """Find the interpreter, and the environment it needs."""
    executable = sys.executable
    if "multiprocessing.spawn" in sys.modules or getattr(sys, "frozen", False) or not executable:
        spawn = importlib.import_module("multiprocessing.spawn")
        executable = os.fsdecode(spawn.get_executable() or "")  # set_executable() counts
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        raise OSError(
            f"there is no Python interpreter to start worker processes with: {executable!r} is "
            "this program. Set one with multiprocessing.set_executable(), or use "
            "threads (MTSequence) or start_method='fork'"
        )
    base = getattr(sys, "_base_executable", executable)
    if os.name == "nt" and executable == sys.executable != base:
        # A virtual environment's python.exe starts another process; this is what it would do.
        return base, {**os.environ, "__PYVENV_LAUNCHER__": executable}
    return executable, dict(os.environ)


class SpawnLauncher(Launcher):
    """Every worker is a new interpreter."""

    def _launch(self, number: int) -> Child:
        return spawn(describe_start(self._entry, WORKER, number), f"cseq-w{number}", self._threads)


class ForkLauncher(Launcher):
    """Every worker is a copy of the trainer."""

    takes_objects = True

    def _launch(self, number: int) -> Child:
        flush_output()
        await_told(time.monotonic() + LAST)  # the thread has locks of the standard streams
        if self._threads is not None:
            system.find_openblas()
        setting = number, self._entry, self.local, self._threads, trainer_identity()
        with connected() as (ours, theirs), handing_over(theirs):
            pid = fork()
            if pid == 0:
                self.context.run(begin_as_copy, theirs, *setting)
            theirs.close()
            return Child(ours, pid)
