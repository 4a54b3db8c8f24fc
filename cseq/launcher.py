"""Starting worker processes: fork server, spawn and fork behind one protocol.

A worker process is born with one thing, its end of a pair of connected sockets, and runs
``entry(sock)``. The trainer keeps the other end. That socket is also the lifeline: end of file
means, in the trainer, that the worker is dead or dying, and in the worker, that the trainer is.

::

    trainer ── Launcher.launch(number) ──> Child(number, pid, sock) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy and cseq imported) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

What holds for all three:

- A worker never runs the user's script. Its ``sys.path`` and ``sys.argv`` are the trainer's, its
  standard input is empty, and it may start processes of its own.
- Signals that are meant for the trainer (`SHIELDED`: Ctrl-C, a job scheduler's notice) do nothing
  to workers and server, from their first instruction on. Their own children get the usual ones.
- Nobody but worker and trainer holds an end of their socket: a process that the user forks off
  either of them closes its copies (`close_in_forks`), programs that are executed never get any.
- Exit codes are as in `subprocess`: minus the signal's number for a killed process.
- A worker ends when ``entry`` returns: its ``atexit`` functions run, stray threads do not keep it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import marshal
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "SHIELDED",
    "Child",
    "Launcher",
    "close_in_forks",
    "default_start_method",
    "describe_exit",
    "make_launcher",
    "start_methods",
]

ENTRY = "cseq.pools.process:main"
START = 120.0  # seconds that a fork server may take to start: torch from a cold network disk
LAST = 1.0  # seconds for what was killed to be gone, past a deadline

KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows they are the same

# Sent to all processes of a terminal or of a job; what to do about them is the trainer's decision.
SHIELDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)

Start: TypeAlias = dict[str, Any]  # what a new interpreter is told first


class Child(Protocol):
    """A worker process, as the trainer sees it. Any thread may call any method."""

    number: int
    pid: int
    sock: socket.socket

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended: it will not touch memory again."""

    def kill(self) -> None:
        """Kill the process, unless it is gone."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is gone; never to another one that has got its number."""

    def status(self, timeout: float) -> int | None:
        """Wait for the process to end, and return its exit code.

        None when it has not ended in time (`gone` is False), or has ended with nobody knowing how
        (`gone` is True): its fork server died before it, or someone else asked for it first.
        """


class Launcher(Protocol):
    """One way to start workers. Any thread may call any method."""

    method: str
    takes_objects: bool

    def prepare(self) -> None:
        """Begin to start what `launch` will need, and do not wait for it."""

    def launch(self, number: int, *, local: object = None, timeout: float = START) -> Child:
        """Start a worker process, which calls ``entry(sock)``.

        Parameters
        ----------
        number : int
            The worker's number, for its name in the system's process list.
        local : object
            Where `takes_objects` is True: given to the worker as it is, ``entry(sock, local)``.
        timeout : float
            Seconds.

        Raises
        ------
        OSError
            When the process cannot be started, or not in time (TimeoutError).
        """

    def close(self, deadline: float) -> bool:
        """End everything that was started here: children that are left are killed.

        Parameters
        ----------
        deadline : float
            In `time.monotonic` seconds. What has not ended by then is killed.

        Returns
        -------
        bool
            Whether everything is gone and reaped.
        """


def start_methods(os_name: str = os.name, features: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the start methods that a system has, the best first.

    `features` are names among 'fork' and 'send_fds'; by default what this Python has.
    """
    if features is None:
        has = {"fork": hasattr(os, "fork"), "send_fds": hasattr(socket, "send_fds")}
        features = [name for name, there in has.items() if there]
    if os_name == "nt" or "fork" not in features:
        return ("spawn",)
    return ("forkserver", "spawn", "fork") if "send_fds" in features else ("spawn", "fork")


def default_start_method() -> str:
    """Name of the start method for whoever does not choose one."""
    return start_methods()[0]


def make_launcher(
    method: str | None = None, *, entry: str = ENTRY, preload: Sequence[str] = ()
) -> Launcher:
    """Make a launcher; it starts nothing before its first `launch` (or `prepare`).

    Parameters
    ----------
    method : str or None
        'forkserver', 'spawn' or 'fork'; None for `default_start_method`.
    entry : str
        ``module:function`` that workers run.
    preload : sequence of str
        Modules that a fork server imports too, so that its workers have them at once. One that
        cannot be imported is left out, with a line on standard error.

    Raises
    ------
    ValueError
        When this system does not have the method.
    """
    method = method or default_start_method()
    if method not in start_methods():
        names = ", ".join(map(repr, start_methods()))
        raise ValueError(f"start_method={method!r} does not exist here; choose one of {names}")
    if method == "forkserver":
        return _ForkServerLauncher(entry, preload)
    return _SpawnLauncher(entry) if method == "spawn" else _ForkLauncher(entry)


def describe_exit(code: int | None) -> str:
    """Say how a process ended, for a message: 'was killed by SIGKILL', 'exited with code 3'."""
    if code is None:
        return "ended (its exit code is not known)"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


# --- sockets that forked processes must not keep -------------------------------------------------

_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_fork_guard = threading.RLock()  # held while a socket exists that is not in _private yet


def close_in_forks(sock: socket.socket) -> None:
    """Have processes that are forked off this one close their copy of a socket.

    Otherwise they keep the connection open, and its other end never sees end of file.
    """
    _private.add(sock)


def _after_fork_in_child() -> None:
    """Close the sockets, and forget the guard: the thread that held it does not exist here."""
    global _fork_guard
    _fork_guard = threading.RLock()
    for sock in list(_private):
        sock.close()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _fork_guard.acquire(),  # noqa: PLW0108 - a child has another guard
        after_in_parent=lambda: _fork_guard.release(),  # noqa: PLW0108
        after_in_child=_after_fork_in_child,
    )


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connect two sockets, neither of them in the place of a standard stream."""
    with _fork_guard, contextlib.ExitStack() as low:
        while True:
            ours, theirs = socket.socketpair()
            close_in_forks(ours)
            close_in_forks(theirs)
            if os.name == "nt" or min(ours.fileno(), theirs.fileno()) > 2:
                return ours, theirs
            low.enter_context(ours)
            low.enter_context(theirs)


# --- waiting -------------------------------------------------------------------------------------


def _readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor has something to read, end of file included."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _hung_up(sock: socket.socket) -> bool:
    """Whether a socket's other end is closed (unread data notwithstanding)."""
    if sock.fileno() < 0:
        return True
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))


class _PidFd:
    """A descriptor that stands for a process: readable when it has ended, and never recycled."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, pid: int) -> _PidFd | None:
        """Open one, where the system has them."""
        with contextlib.suppress(AttributeError, OSError):
            return cls(os.pidfd_open(pid))
        return None

    def ended(self, seconds: float) -> bool:
        """Wait for the process to end, and say whether it has."""
        return _readable(self._fd, seconds)

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)


def _wait_for(pid: int) -> None:
    """Wait for a child to end, without reaping it."""
    with contextlib.suppress(ChildProcessError):  # someone else has reaped it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _ended_kqueue(pid: int, seconds: float) -> bool:
    """Wait for a child to end, as BSD and macOS do it."""
    kqueue = cast("Any", select)
    with contextlib.closing(kqueue.kqueue()) as queue:
        flags = kqueue.KQ_EV_ADD | kqueue.KQ_EV_ONESHOT
        event = kqueue.kevent(pid, kqueue.KQ_FILTER_PROC, flags, kqueue.KQ_NOTE_EXIT)
        try:
            return bool(queue.control([event], 1, max(0.0, seconds)))
        except ProcessLookupError:  # it has ended already
            return True


# --- processes that the trainer starts itself ----------------------------------------------------


class _Process(Protocol):
    """A child of the trainer."""

    pid: int

    @property
    def gone(self) -> bool: ...
    def send_signal(self, number: int) -> None: ...
    def wait(self, timeout: float) -> int | None: ...


class _PosixProcess:
    """A child of this process, which alone may wait for it and kill it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.gone = False
        self._code: int | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()  # the number is free once the process is reaped
        self._pidfd = _PidFd.open(pid)
        self._waiter: threading.Thread | None = None

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.gone or os.getpid() != self._owner:
                return
            if self._pidfd is not None:
                self._pidfd.send_signal(number)
            else:
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        if os.getpid() == self._owner:
            self._reap()
            if not self.gone and timeout > 0 and self._has_ended(timeout):
                self._reap()
        return self._code

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the process to end, in whatever way there is, without reaping it."""
        pidfd = self._pidfd  # another thread may drop it meanwhile
        if pidfd is not None:
            return pidfd.ended(seconds)
        if hasattr(select, "kqueue"):
            return _ended_kqueue(self.pid, seconds)
        return self._ended_thread(seconds)

    def _ended_thread(self, seconds: float) -> bool:
        """Wait for the process to end in a thread, as only that can be waited for in time."""
        with self._lock:
            if self._waiter is None:
                self._waiter = threading.Thread(
                    target=_wait_for, args=(self.pid,), daemon=True, name="cseq-wait"
                )
                self._waiter.start()
        self._waiter.join(seconds)
        return not self._waiter.is_alive()

    def _reap(self) -> None:
        with self._lock:
            if self.gone:
                return
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # someone else was faster: how it ended is lost
                self.gone = True
            else:
                self.gone = pid == self.pid
                self._code = os.waitstatus_to_exitcode(status) if self.gone else None
            self._pidfd = None if self.gone else self._pidfd


class _WindowsProcess:
    """A child of this process on Windows, where a handle keeps its number from being used again."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self._popen = popen

    @property
    def gone(self) -> bool:
        return self._popen.poll() is not None

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(_subprocess().TimeoutExpired):
            self._popen.wait(max(0.0, timeout))
        return self._popen.returncode


def _subprocess() -> Any:
    """Import subprocess, which forked workers do not need."""
    return importlib.import_module("subprocess")


# Signals wait until the new process is ready to ignore them, and until this one has noted it.
@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
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


# What a new interpreter runs. It comes to this module with the trainer's sys.path, so no file in
# the current folder can stand in for a module of the standard library.
_BOOTSTRAP = """\
import marshal, os, sys
try:
    start = marshal.load(open(0, "rb", closefd=False))
except EOFError:
    os._exit(0)  # the trainer is gone
sys.path[:] = start["path"]
from cseq.launcher import begin
begin(start)
"""


class _Means(NamedTuple):
    """How a system hands a socket to a new interpreter."""

    shares: bool  # as bytes made for its process number, not as an inherited descriptor
    flags: int  # creation flags


def _means(os_name: str) -> _Means:
    """Choose the means for a system."""
    if os_name == "nt":
        return _Means(shares=True, flags=0x200)  # CREATE_NEW_PROCESS_GROUP: no Ctrl-C
    return _Means(shares=False, flags=0)


def _spawn(theirs: socket.socket, start: Start, title: str) -> _Process:
    """Start a new interpreter that runs `begin(start)` with a socket of its own."""
    means = _means(os.name)
    executable, environment = _executable(os.name)
    popen = _subprocess().Popen(
        [executable, *_interpreter_flags(), "-c", _BOOTSTRAP, title],
        stdin=_subprocess().PIPE,
        env=environment,
        pass_fds=() if means.shares else (theirs.fileno(),),
        creationflags=means.flags,
    )
    share = cast("Any", theirs).share if means.shares else None
    start = start | {"socket": share(popen.pid) if share else theirs.fileno()}
    with contextlib.suppress(OSError), popen.stdin as pipe:
        pipe.write(marshal.dumps(start))  # one that is dead already is seen by its socket
    if os.name == "nt":
        return _WindowsProcess(popen)
    popen.returncode = 0  # _PosixProcess waits for it
    return _PosixProcess(popen.pid)


def _start(role: str, entry: str, **more: Any) -> Start:
    """Describe to a new interpreter what it is."""
    words = [str(word) for word in sys.argv] if hasattr(sys, "argv") else []
    return {"role": role, "entry": entry, "path": _search_path(), "argv": words, **more}


def _search_path() -> list[str]:
    """Return sys.path, with the folder of this very cseq if it is not there (any more)."""
    path = [os.fsdecode(place) for place in sys.path if isinstance(place, (str, bytes))]
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return path if home in map(os.path.abspath, path) else [*path, home]


def _interpreter_flags() -> list[str]:
    """Return the trainer's options -X, -W, -O …, as multiprocessing passes them."""
    flags: list[str] = _subprocess()._args_from_interpreter_flags()
    return flags


def _executable(os_name: str) -> tuple[str, dict[str, str] | None]:
    """Find the interpreter, and the environment it needs."""
    executable = sys.executable
    if "multiprocessing.spawn" in sys.modules or getattr(sys, "frozen", False) or not executable:
        spawn = importlib.import_module("multiprocessing.spawn")
        executable = os.fsdecode(spawn.get_executable() or "")  # set_executable() counts
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        raise OSError(
            f"there is no Python interpreter to start worker processes with: {executable!r} is "
            "this program. Name one by multiprocessing.set_executable(), or use "
            "thread_type='thread' or start_method='fork'"
        )
    base = getattr(sys, "_base_executable", executable)
    if os_name == "nt" and executable == sys.executable != base:
        # A virtual environment's python.exe starts another process; this is what it would do.
        return base, {**os.environ, "__PYVENV_LAUNCHER__": executable}
    return executable, None


# --- launchers: spawn and fork -------------------------------------------------------------------


class _DirectChild:
    """A worker that is the trainer's own child process."""

    def __init__(self, number: int, sock: socket.socket, process: _Process) -> None:
        self.number = number
        self.pid = process.pid
        self.sock = sock
        self._process = process

    @property
    def gone(self) -> bool:
        self._process.wait(0)
        return self._process.gone

    def kill(self) -> None:
        self.send_signal(KILL)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def status(self, timeout: float) -> int | None:
        return self._process.wait(timeout)


class _Children:
    """Those that were launched and may still live: the end of a launcher is the end of them."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._many = 16
        self._lock = threading.Lock()

    def add(self, child: Child) -> None:
        """Note a child, and forget, once they are many, those that are gone."""
        with self._lock:
            if len(self._children) >= self._many:
                self._children = [other for other in self._children if not other.gone]
                self._many = 16 + 2 * len(self._children)
            self._children.append(child)

    def end(self, deadline: float) -> list[Child]:
        """Kill and reap them all; return them."""
        with self._lock:
            children, self._children = self._children, []
        for child in children:
            child.kill()
        for child in children:
            child.status(max(LAST, deadline - time.monotonic()))
        return children


class _DirectLauncher:
    """What spawn and fork share."""

    method = ""
    takes_objects = False

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._children = _Children()
        self._owner = os.getpid()

    def prepare(self) -> None:
        """Do nothing: nothing is needed."""

    def launch(
        self,
        number: int,
        *,
        local: object = None,
        timeout: float = START,  # noqa: ARG002 - it does not take long
    ) -> Child:
        _check_owner(self._owner)
        ours, theirs = _pair()
        try:
            with theirs, _signals_blocked():
                process = self._start(number, theirs, local)
                child = _DirectChild(number, ours, process)
                self._children.add(child)
        except BaseException:
            ours.close()
            raise
        return child

    def _start(self, number: int, theirs: socket.socket, local: object) -> _Process:
        raise NotImplementedError

    def close(self, deadline: float) -> bool:
        if os.getpid() != self._owner:
            return True  # a process that the user forked: these are not its children
        return all(child.gone for child in self._children.end(deadline))


def _check_owner(owner: int) -> None:
    """Refuse to work in a process that the user forked."""
    if os.getpid() != owner:
        raise OSError(
            f"this launcher belongs to process {owner}, and this one, {os.getpid()}, was forked "
            "from it; make and start a manager here"
        )


class _SpawnLauncher(_DirectLauncher):
    """Every worker is a new interpreter."""

    method = "spawn"

    def _start(self, number: int, theirs: socket.socket, local: object) -> _Process:
        _no_objects(self.method, local)
        return _spawn(theirs, _start("worker", self._entry, number=number), f"cseq-w{number}")


class _ForkLauncher(_DirectLauncher):
    """Every worker is a copy of the trainer."""

    method = "fork"
    takes_objects = True

    def _start(self, number: int, theirs: socket.socket, local: object) -> _Process:
        for stream in (sys.stdout, sys.stderr):  # or it would be printed twice
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        with _fork_guard:  # for a moment this socket is not private
            _private.discard(theirs)
            pid = _fork()
            if pid == 0:
                _begin_as_copy(theirs, number, self._entry, local)
            theirs.close()
        return _PosixProcess(pid)


def _no_objects(method: str, local: object) -> None:
    """Refuse an object that would have to be pickled."""
    if local is not None:
        raise TypeError(f"start method {method!r} cannot give a Python object to a worker as it is")


def _fork() -> int:
    """Fork; that the process may have threads is known."""
    if sys.version_info < (3, 12):  # no warning about that
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# --- launchers: fork server ----------------------------------------------------------------------

# One record each way: what, which child (a serial number), and a value; 'fork' carries a socket.
_RECORD = struct.Struct("=cqq")
_FORK = b"f"  # to the server; value: the worker's number
_SIGNAL = b"s"  # to the server; value: the signal's number
_BORN = b"b"  # from the server; value: the process number; carries a pidfd where there are any
_FAIL = b"e"  # from the server; value: errno of the fork
_EXIT = b"x"  # from the server; value: the exit code


class _Record(NamedTuple):
    """A record that was received."""

    what: bytes
    serial: int
    value: int
    fds: list[int]


def _receive(sock: socket.socket) -> _Record | None:
    """Receive a record; None at end of file."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    fds: list[int] = []
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < _RECORD.size:
            more, new, _, _ = socket.recv_fds(sock, _RECORD.size - len(data), 1, flags)
            fds += new
            data += more
            if not more:
                break
    for fd in fds:
        _keep_from_programs(fd)
    if len(data) < _RECORD.size:
        return None
    what, serial, value = _RECORD.unpack(data)
    return _Record(what, serial, value, fds)


def _keep_from_programs(fd: int) -> None:
    """Have a descriptor closed in programs that are executed."""
    os.set_inheritable(fd, False)  # noqa: FBT003


class _ServedChild:
    """A worker that a fork server has started and reaps."""

    def __init__(self, number: int, sock: socket.socket, server: _Server) -> None:
        self.number = number
        self.pid = 0
        self.sock = sock
        self.refusal = 0  # errno of the fork that failed
        self.serial = server.enrol(self)
        self._server = server
        self._owner = os.getpid()
        self._pidfd: _PidFd | None = None
        self._code: int | None = None
        self._exited = False

    def learn(self, record: _Record) -> None:
        """Take in what the server says."""
        if record.what == _BORN:
            self.pid = record.value
            self._pidfd = _PidFd(record.fds[0]) if record.fds else None
        elif record.what == _FAIL:
            self.refusal = record.value
            self._exited = True
        elif record.what == _EXIT:
            self._code = record.value
            self._exited = True
            self._pidfd = None

    @property
    def answered(self) -> bool:
        """Whether the server has done what it was asked to."""
        return bool(self.pid or self.refusal)

    @property
    def exited(self) -> bool:
        """Whether the server has said how it ended."""
        return self._exited

    @property
    def gone(self) -> bool:
        return self._exited or self._has_ended(0)

    def kill(self) -> None:
        self.send_signal(KILL)

    def send_signal(self, number: int) -> None:
        pidfd = self._pidfd
        if self._exited or os.getpid() != self._owner:
            return
        if pidfd is not None:
            pidfd.send_signal(number)
        else:
            self._server.send(_SIGNAL, self.serial, number)

    def status(self, timeout: float) -> int | None:
        if os.getpid() == self._owner:
            deadline = time.monotonic() + timeout
            self._server.wait(lambda: self._exited, deadline)
            if self._server.lost:
                self._has_ended(deadline - time.monotonic())
        return self._code

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the process's end without its server, and say whether it has ended."""
        pidfd = self._pidfd
        if pidfd is not None:
            return pidfd.ended(seconds)
        return self._server.lost and _hung_up(self.sock)


class _Server:
    """The trainer's hand on one fork server process."""

    def __init__(self, entry: str, preload: Sequence[str]) -> None:
        self.lost = False  # it is dead, or was told to end
        self._children: dict[int, _ServedChild] = {}
        self._serials = itertools.count()
        self._changed = threading.Condition()
        self._reading = False  # some thread is
        self._sock, theirs = _pair()
        start = _start("server", entry, preload=[*map(str, preload)])
        try:
            with theirs, _signals_blocked():
                self._process = _spawn(theirs, start, "cseq-server")
        except BaseException:
            self._sock.close()
            raise

    def enrol(self, child: _ServedChild) -> int:
        """Give a child the number under which the server knows it."""
        serial = next(self._serials)
        with self._changed:
            self._children[serial] = child
        return serial

    def fork(self, child: _ServedChild, theirs: socket.socket, deadline: float) -> bool:
        """Have a child started; False when the server is dead."""
        self.send(_FORK, child.serial, child.number, [theirs.fileno()])
        self.wait(lambda: child.answered, deadline)
        if child.refusal:
            raise OSError(child.refusal, f"no worker process: {os.strerror(child.refusal)}")
        if not child.answered and not self.lost:
            raise TimeoutError(
                f"the fork server (process {self._process.pid}) did not start worker "
                f"{child.number} in time; is something that it imports very slow?"
            )
        return child.answered

    def send(self, what: bytes, serial: int, value: int, fds: Sequence[int] = ()) -> None:
        """Send a record; a server that is dead is noticed when it is read from."""
        with self._changed, contextlib.suppress(OSError):
            socket.send_fds(self._sock, [_RECORD.pack(what, serial, value)], fds)

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Take in what the server says until something is done, the server lost, or time is up.

        One thread at a time reads, for all that wait.
        """
        with self._changed:
            while not done() and not self.lost:
                left = deadline - time.monotonic()
                if self._reading:
                    if not self._changed.wait(max(0.0, left)):
                        return
                elif not self._read(left):
                    return

    def _read(self, seconds: float) -> bool:
        """Wait for one record and take it in; False when there was none in time."""
        self._reading = True
        self._changed.release()
        try:
            news = _readable(self._sock.fileno(), seconds)
            record = _receive(self._sock) if news else None
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        if record is not None:
            self._take(record)
        self.lost = self.lost or (news and record is None)
        return news

    def _take(self, record: _Record) -> None:
        """Hand a record to its child, and forget a child with its last record."""
        child = self._children[record.serial]
        child.learn(record)
        if child.exited:
            del self._children[record.serial]

    def close(self, deadline: float) -> tuple[bool, int | None]:
        """End the server and reap it; say whether it is gone, and its exit code."""
        with self._changed:
            self.lost = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes who reads, and ends the server
            while self._reading:
                self._changed.wait()
            self._sock.close()
        code = self._process.wait(deadline - time.monotonic())
        if not self._process.gone:
            self._process.send_signal(KILL)
            code = self._process.wait(LAST)
        return self._process.gone, code


class _ForkServerLauncher:
    """Every worker is a copy of a small process that has imported what workers need."""

    method = "forkserver"
    takes_objects = False

    def __init__(self, entry: str, preload: Sequence[str]) -> None:
        self._entry = entry
        self._preload = tuple(preload)
        self._children = _Children()
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def prepare(self) -> None:
        self._serving()

    def _serving(self) -> _Server:
        """Return a server that is not known to be dead; start one if there is none."""
        _check_owner(self._owner)
        with self._lock:
            if self._server is not None and self._server.lost:
                self._server.close(time.monotonic() + LAST)
                self._server = None
            if self._server is None:
                self._server = _Server(self._entry, self._preload)
            return self._server

    def launch(self, number: int, *, local: object = None, timeout: float = START) -> Child:
        _no_objects(self.method, local)
        deadline = time.monotonic() + timeout
        for _ in range(2):  # a server may be found dead only when it is asked something
            server = self._serving()
            child = self._launch(number, server, deadline)
            if child is not None:
                return child
        _, code = server.close(time.monotonic() + LAST)
        raise OSError(
            f"the fork server {describe_exit(code)} before it could start worker {number}; "
            "if it has printed an error, see above"
        )

    def _launch(self, number: int, server: _Server, deadline: float) -> Child | None:
        """Start a worker by this server; None when the server is dead."""
        ours, theirs = _pair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            child = _ServedChild(number, ours, server)
            self._children.add(child)  # before there is one: whatever happens, it is ended
            if not server.fork(child, theirs, deadline):
                return None
            undo.pop_all()
        return child

    def close(self, deadline: float) -> bool:
        if os.getpid() != self._owner:
            return True  # a process that the user forked: these are not its children
        children = self._children.end(deadline)
        with self._lock:
            server, self._server = self._server, None
        gone = server is None or server.close(deadline)[0]
        return gone and all(child.gone for child in children)


# --- in the new process --------------------------------------------------------------------------


def begin(start: Start) -> NoReturn:
    """Be what a new interpreter was started for."""
    _shield()
    _empty_stdin()
    _clear_main()
    sys.argv[:] = start["argv"]
    sock = _own_socket(start["socket"])
    if start["role"] == "server":
        _Forker(sock, start["entry"]).serve(start["preload"])
    _work(sock, start["number"], start["entry"])


def _begin_as_copy(sock: socket.socket, number: int, entry: str, local: object) -> NoReturn:
    """Be a worker, as a copy of the trainer just made."""
    try:
        gc.freeze()  # the trainer's objects: looking through them would copy their pages
        atexit._clear()
        signal.set_wakeup_fd(-1)
        _drop_handlers()
        _shield()
        _empty_stdin()
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the old has read ahead
    except BaseException:  # noqa: BLE001 - it must not go back into the user's code
        _leave(_report())
    _work(sock, number, entry, local)


def _own_socket(handle: int | bytes) -> socket.socket:
    """Make a socket of what was handed over."""
    if isinstance(handle, bytes):
        sock: socket.socket = cast("Any", socket).fromshare(handle)
        return sock
    _keep_from_programs(handle)
    return socket.socket(fileno=handle)


def _shield() -> None:
    """Let signals that are meant for the trainer do nothing here.

    By a function: what `SIG_IGN` ignores is ignored by executed programs too, and a worker could
    not stop its own children by SIGTERM.
    """
    for number in SHIELDED:
        signal.signal(number, _ignore)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)  # noqa: FBT003 - its own way
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _unshield() -> None:
    """Give a process that a worker forks the usual signals, as if there were no shield."""
    for number in SHIELDED:
        if signal.getsignal(number) is _ignore:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _ignore(number: int, frame: object) -> None:
    """Do nothing about a signal."""


def _drop_handlers() -> None:
    """Forget the trainer's signal handlers: they are not for workers."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in SHIELDED:
            signal.signal(number, signal.SIG_DFL)


def _empty_stdin() -> None:
    """Make standard input empty: what a terminal says is for the trainer.

    Streams that the trainer has closed are opened too, or a socket would take their places.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(fd, 0)
    for stream in (1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.dup2(fd, stream)
    if fd > 2:
        os.close(fd)


def _clear_main() -> None:
    """Leave no names in ``__main__``: classes of the user's script are put there (`payload`)."""
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]


def _set_name(name: str) -> None:
    """Set the name that the system's process list shows."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def _work(sock: socket.socket, number: int, entry: str, local: object = None) -> NoReturn:
    """Run a worker's entry, and end the process."""
    try:
        close_in_forks(sock)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_unshield)
        _set_name(f"cseq-w{number}")
        module, _, function = entry.partition(":")
        run = getattr(importlib.import_module(module), function)
        code = _code_of(run(sock) if local is None else run(sock, local))
    except SystemExit as stop:
        code = _code_of(stop.code)
    except ConnectionError:
        code = 0 if _hung_up(sock) else _report()  # the trainer is gone: nothing to report
    except BaseException:  # noqa: BLE001 - the last one to see it
        code = _report()
    _leave(code)


def _code_of(value: object) -> int:
    """Return the exit code that a value stands for, as `sys.exit` has it."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def _report() -> int:
    """Print the current exception; return the exit code for it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr
        sys.__excepthook__(*cast("Any", sys.exc_info()))
    return 1


def _leave(code: int) -> NoReturn:
    """End the process, whatever else runs in it."""
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the last one to see it
        _report()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Forker:
    """The fork server itself: one thread, which forks, reaps, and says so.

    It ends when the trainer closes its socket, or dies; workers see to themselves.
    """

    def __init__(self, sock: socket.socket, entry: str) -> None:
        close_in_forks(sock)
        self._sock = sock
        self._entry = entry
        self._serials: dict[int, int] = {}  # of living children, by process number
        self._woken, self._wake = socket.socketpair()

    def serve(self, preload: Sequence[str]) -> NoReturn:
        """Serve until the trainer is gone."""
        _set_name("cseq-server")
        gc.disable()
        for name in ("numpy", self._entry.partition(":")[0], *preload):
            _preload(name)
        gc.freeze()  # or every worker's garbage collector would copy these pages
        gc.enable()
        self._listen()
        with contextlib.suppress(ConnectionError):
            while self._step():
                pass
        os._exit(0)

    def _listen(self) -> None:
        """Have the end of a child wake the loop."""
        self._woken.settimeout(0)
        self._wake.settimeout(0)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._sock, select.POLLIN)

    def _step(self) -> bool:
        """Wait for something and do it; False when the trainer is gone."""
        ready = [fd for fd, _ in self._poll.poll()]
        if self._woken.fileno() in ready:
            self._woken.recv(4096)  # before it reaps: who ends now will wake it again
            self._reap()
        if self._sock.fileno() not in ready:
            return True
        record = _receive(self._sock)
        if record is not None:
            self._obey(record)
        return record is not None

    def _obey(self, record: _Record) -> None:
        if record.what == _FORK:
            self._fork(record)
        elif record.what == _SIGNAL:
            for pid, serial in self._serials.items():
                if serial == record.serial:
                    os.kill(pid, record.value)  # not reaped yet: the number is still its own

    def _fork(self, record: _Record) -> None:
        """Start a worker, which owns the socket that came with the request."""
        [fd] = record.fds
        try:
            pid = _fork()
        except OSError as error:
            os.close(fd)
            self._say(_FAIL, record.serial, error.errno or 1)
            return
        if pid == 0:
            self._become_worker(fd, record.value)
        os.close(fd)
        self._serials[pid] = record.serial
        pidfd = _PidFd.open(pid)
        self._say(_BORN, record.serial, pid, [pidfd.fileno()] if pidfd else [])

    def _become_worker(self, fd: int, number: int) -> NoReturn:
        """Run a worker in the copy of the server."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._woken.close()
            self._wake.close()
            sock = socket.socket(fileno=fd)
        except BaseException:  # noqa: BLE001 - it must not go back to serving
            _leave(_report())
        _work(sock, number, self._entry)

    def _reap(self) -> None:
        """Reap every child that has ended, and say how."""
        while self._serials:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            serial = self._serials.pop(pid, None)
            if serial is not None:
                self._say(_EXIT, serial, os.waitstatus_to_exitcode(status))

    def _say(self, what: bytes, serial: int, value: int, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._sock, [_RECORD.pack(what, serial, value)], fds)


def _preload(name: str) -> None:
    """Import a module that workers will want; one that fails, they will see fail themselves."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - anything may go wrong in a module
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr
            sys.stderr.write(f"cseq: the fork server could not import {name}: {error!r}\n")
