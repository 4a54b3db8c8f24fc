"""Processes that the trainer starts itself: new interpreters, and copies of it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import marshal
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cseq import compute
from cseq._core import Lock
from cseq.memory.descriptors import anonymous_file
from cseq.processes.launcher.base import KILL, KILLED, SHIELDED
from cseq.processes.launcher.waiting import PidFd
from cseq.threads import Latch, tell

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator

    from cseq.processes.launcher.base import Identity, Start

PAUSE = 0.005  # seconds between two looks at a process that cannot be waited for


class PosixProcess:
    """A child of this process; only this process may wait for it and kill it.

    Parameters
    ----------
    pid : int
    sock : socket
        The trainer's end of the connection to it.
    inherited : object
        Kept until the child has been found to have ended.
    """

    handle: int | None = None

    def __init__(self, pid: int, sock: socket.socket, inherited: object = None) -> None:
        self.pid = pid
        self.sock = sock
        self.ended = Latch()
        self.code: int | None = None
        self._owner = os.getpid()
        # The number is free once the process is reaped. A signal handler of the main thread may
        # send a signal while that thread is sending one.
        self._lock = Lock()
        self._pidfd = PidFd.open(pid)
        self._inherited = inherited

    @property
    def gone(self) -> bool:
        """See `Child`."""
        self.status(0)
        return self.ended.wait(0)

    def kill(self) -> None:
        """Kill it, unless it is gone."""
        try:
            self.send_signal(KILL)
        except PermissionError:  # the rights that it was started with have been given up
            tell(logging.WARNING, "process %d cannot be killed: no permission", self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is gone: another one may then have its id.

        The main thread sends signals, too: without the lock, where a pidfd makes that safe.
        """
        if os.getpid() != self._owner:
            return
        pidfd = self._pidfd  # another thread may drop it meanwhile
        if pidfd is not None:
            pidfd.send_signal(number)
            return
        with self._lock.hold():
            if not self.ended.wait(0):
                os.kill(self.pid, number)

    def status(self, timeout: float) -> int | None:
        """See `Child`."""
        deadline = time.monotonic() + timeout
        while os.getpid() == self._owner and not self._reap():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            pidfd = self._pidfd  # another thread may drop it meanwhile
            if pidfd is None:  # macOS, old kernels
                time.sleep(min(left, PAUSE))
            else:
                pidfd.ended(left)
        return self.code

    def _reap(self) -> bool:
        """Reap the process, if it has ended; return whether it has."""
        with self._lock.hold():
            if not self.ended.wait(0):
                with contextlib.suppress(ChildProcessError):  # other code has reaped it: no status
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid == 0:
                        return False
                    self.code = os.waitstatus_to_exitcode(status)
                self.ended.set()
                self._pidfd = self._inherited = None
        return True


class _WindowsProcess:
    """A child of this process on Windows, where a handle keeps its number from being used again."""

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.pid = popen.pid
        self.sock = sock
        self.ended = Latch()
        self.code: int | None = None
        self._lock = Lock()
        self._popen = popen
        self.handle: int | None = int(cast("Any", popen)._handle)

    @property
    def gone(self) -> bool:
        self.status(0)
        return self.ended.wait(0)

    def kill(self) -> None:
        self.send_signal(KILL)

    def send_signal(self, number: int) -> None:
        if number != KILL:
            self._popen.send_signal(number)
        elif not self.gone:
            with contextlib.suppress(PermissionError):  # it has ended just now
                importlib.import_module("_winapi").TerminateProcess(self.handle, KILLED)

    def status(self, timeout: float) -> int | None:
        with contextlib.suppress(_subprocess().TimeoutExpired):
            self._popen.wait(max(0.0, timeout))
        with self._lock.hold():
            self.code = self._popen.returncode
            if self.code is not None:
                self.ended.set()
        return self.code


def _subprocess() -> Any:
    """Import subprocess, which forked workers do not need."""
    return importlib.import_module("subprocess")


# Signals wait until the new process is ready to ignore them, and until this one has recorded it.
@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals that are meant for the trainer, in this thread and what it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
from cseq.processes.launcher.child import begin
begin(start)
"""


class _Means(NamedTuple):
    """How a system hands a socket and the standard streams to a new interpreter."""

    shares: bool  # as bytes made for its process number, not as an inherited descriptor
    flags: int  # creation flags
    streams: dict[str, int]  # what it has in place of streams that this process lacks


def means_of(os_name: str) -> _Means:
    """Choose the means for a system."""
    if os_name != "nt":
        return _Means(shares=False, flags=0, streams={})
    # pythonw has none: subprocess would give pipes without a reader, and a long print would fail.
    lacking = [name for name in ("stdout", "stderr") if getattr(sys, f"__{name}__") is None]
    streams = dict.fromkeys(lacking, _subprocess().DEVNULL)
    return _Means(shares=True, flags=0x200, streams=streams)  # CREATE_NEW_PROCESS_GROUP: no Ctrl-C


def spawn(
    ours: socket.socket,
    theirs: socket.socket,
    start: Start,
    title: str,
    threads: int | None = None,
) -> PosixProcess | _WindowsProcess:
    """Start a new interpreter that runs `begin(start)` with the socket `theirs`.

    `threads` is how many threads its libraries compute with, and those of its children.
    """
    means = means_of(os.name)
    executable, environment = executable_of(os.name)
    environment |= compute.variables(threads, environment)
    subprocess = _subprocess()
    flags = subprocess._args_from_interpreter_flags()  # -X, -W, -O …, as multiprocessing has it
    command = [executable, *flags, "-c", _BOOTSTRAP, title]
    options = {"env": environment, "creationflags": means.flags, **means.streams}
    if means.shares:
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
        with contextlib.suppress(OSError), popen.stdin as pipe:
            # If it is dead already, its socket is at end of file.
            own = cast("Any", theirs).share(popen.pid)
            pipe.write(marshal.dumps(start | {"socket": own}))
    else:  # no pipe of `Popen`: its ends may get the numbers of closed standard streams
        given, _ = anonymous_file("cseq-start")
        os.write(given.fd, marshal.dumps(start | {"socket": theirs.fileno()}))
        os.lseek(given.fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(command, stdin=given.fd, pass_fds=[theirs.fileno()], **options)
    if os.name == "nt":
        return _WindowsProcess(popen, ours)
    popen.returncode = 0  # PosixProcess waits for it
    return PosixProcess(popen.pid, ours)


def trainer_identity() -> Identity:
    """Return this process's."""
    process: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if process is None else process.current_process().name
    return name, os.getpid()


def describe_start(role: str, entry: str, **more: Any) -> Start:
    """Describe to a new interpreter what it is."""
    words = [str(word) for word in sys.argv] if hasattr(sys, "argv") else []
    return {"role": role, "entry": entry, "path": _search_path(), "argv": words, **more} | {
        "trainer": trainer_identity()
    }


def _search_path() -> list[str]:
    """Return sys.path, with the folder of this very cseq if it is not there (any more)."""
    path = [os.fsdecode(place) for place in sys.path if isinstance(place, (str, bytes))]
    home = os.path.dirname(os.path.abspath(sys.modules["cseq"].__path__[0]))
    # Relative ones stay as they are: the working directory may have been deleted.
    known = [os.path.normpath(place) for place in path if os.path.isabs(place)]
    return path if home in known else [*path, home]


def executable_of(os_name: str) -> tuple[str, dict[str, str]]:
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
    if os_name == "nt" and executable == sys.executable != base:
        # A virtual environment's python.exe starts another process; this is what it would do.
        return base, {**os.environ, "__PYVENV_LAUNCHER__": executable}
    return executable, dict(os.environ)
