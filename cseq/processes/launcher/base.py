"""What a launcher is, and what all of them share."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextvars import Context

    from cseq.threads import Latch

START = 120.0  # seconds that a fork server may take to start: torch from a cold network disk
FOREVER = 1e6  # seconds
LAST = 1.0  # seconds past a deadline in which killed processes must end

KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows they are the same
KILLED = 0xC5E9 if os.name == "nt" else -KILL  # exit code of a process that `KILL` has ended
# Exit codes of Windows (NTSTATUS) that processes end with when they crash.
CRASHES = {
    0xC0000005: "access violation",
    0xC000001D: "illegal instruction",
    0xC00000FD: "stack overflow",
    0xC0000135: "a DLL was not found",
    0xC000013A: "Ctrl-C",
    0xC0000142: "a DLL could not be initialised",
    0xC0000374: "heap corruption",
    0xC0000409: "abort",
    0xE06D7363: "exception of C++",
}

# Sent to all processes of a terminal or of a job; what to do about them is the trainer's decision.
SHIELDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)

Start: TypeAlias = dict[str, Any]  # what a new interpreter gets first
Identity: TypeAlias = tuple[str, int]  # of the trainer: its name for multiprocessing, its number


class Child(Protocol):
    """A worker process, as the trainer sees it.

    `gone` and `status` find out how it ends: they read what a fork server reports, or reap the
    process. An exception of a signal handler in their middle would lose what they have found, so
    they are for the threads that watch workers. Any thread may look at `ended` and `code`, which
    these set, and send signals.
    """

    pid: int
    sock: socket.socket
    handle: int | None  # of the process, on Windows
    ended: Latch  # set once the process is known to have ended
    code: int | None  # its exit code, set before that; None: not known

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended: it will not touch memory again."""

    def kill(self) -> None:
        """Kill the process, unless it is gone."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is gone; never to a later one with the same id."""

    def status(self, timeout: float) -> int | None:
        """Wait for the process to end, and return its exit code.

        None if it has not ended within `timeout` seconds (`gone` is False), or has ended and its
        status is unknown (`gone` is True): its fork server died before it, or other code in this
        process reaped it.
        """


class Launcher:
    """One way to start workers; the base of all of them.

    Its methods are for threads in which no signal handler runs, but `cancel` for any.

    Parameters
    ----------
    entry, threads
        See `make_launcher`.

    Attributes
    ----------
    method : str
        Its name.
    imports : list
        Modules that were imported for all workers: when that began and ended (ns of `now_ns`).
    takes_objects : bool
        Whether workers inherit objects, and context variables.
    """

    method = ""
    takes_objects = False

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry = entry
        self.imports: list[tuple[str, int, int]] = []
        self._threads = threads
        self._owner = os.getpid()
        self._children: set[Child] = set()

    def prepare(self, *, alone: bool = False) -> None:
        """Begin to start what `launch` needs (a fork server), without waiting for it.

        `alone`: not one that other launchers use.
        """

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Import modules once for all workers that are launched from now on.

        Only a fork server does so; other workers import by themselves. A module that cannot be
        imported, that must not be imported before a fork, or that takes longer than `seconds`, is
        left to the workers, with a line in the log.
        """

    @property
    def importing(self) -> str:
        """The module that is being imported for all workers now; "" if none is."""
        return ""

    def cancel(self) -> None:
        """Interrupt `preload`; no worker is launched any more."""

    def launch(self, number: int, *, local: object = None, context: Context | None = None) -> Child:
        """Start a worker process, which calls ``entry(sock)``.

        Parameters
        ----------
        number : int
            The worker's number, for its name in the system's process list.
        local : object
            Where `takes_objects` is True: inherited by the worker, ``entry(sock, local)``.
        context : Context, optional
            Where `takes_objects` is True: the context variables that the worker has.

        Raises
        ------
        OSError
            When the process cannot be started, not in time (TimeoutError), or not any more, after
            `cancel` (InterruptedError).
        """
        if local is not None and not self.takes_objects:
            raise TypeError(f"start method {self.method!r} cannot give a worker an object as it is")
        self._check_owner()
        return self._launch(number, local, context)

    def _launch(self, number: int, local: object, context: Context | None) -> Child:
        raise NotImplementedError

    def _check_owner(self) -> None:
        """Refuse to work in a process that the user forked."""
        if os.getpid() != self._owner:
            raise OSError(
                f"this launcher belongs to process {self._owner}, and this one, {os.getpid()}, was "
                "forked from it; make and start a manager here"
            )

    def _add(self, child: Child) -> None:
        """Add a child, which `close` will end, and drop those that are known to have ended."""
        self._children -= {other for other in set(self._children) if other.ended.wait(0)}
        self._children.add(child)

    def close(self, deadline: float) -> bool:
        """End all processes that were started here: workers that are left are killed.

        In a process that the user forked, nothing is done. If a process lives on, a second call
        tries again.

        Parameters
        ----------
        deadline : float
            In seconds of `time.monotonic`. A server that has not ended by then is killed.

        Returns
        -------
        bool
            Whether everything is gone and reaped.
        """
        if os.getpid() != self._owner:
            return True
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


def start_methods(
    platform: str = sys.platform, features: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names of the start methods that a system has, the best first.

    `features` are names among 'fork' and 'send_fds'; by default what this Python has. On macOS, a
    process that has used Apple's libraries (numpy's BLAS does) may not be able to fork: 'spawn'.
    """
    if features is None:
        has = {"fork": hasattr(os, "fork"), "send_fds": hasattr(socket, "send_fds")}
        features = [name for name, there in has.items() if there]
    if platform == "win32" or "fork" not in features:
        return ("spawn",)
    methods: tuple[str, ...]
    methods = ("forkserver", "spawn", "fork") if "send_fds" in features else ("spawn", "fork")
    if platform == "darwin":
        methods = ("spawn", *(name for name in methods if name != "spawn"))
    return methods


def describe_exit(code: int | None) -> str:
    """Say how a process ended, for a message: 'was killed by SIGKILL', 'exited with code 3'."""
    if code is None:
        return "ended (its exit code is not known)"
    if code == KILLED and code > 0:
        return "was killed"
    if code >= 0xF0000000:  # a negative number, which Windows shows without a sign
        return f"exited with code {code - (1 << 32)}"
    if code >= 0xC0000000:
        return f"crashed: {CRASHES.get(code, 'exception')} (0x{code:X})"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def exit_code_of(value: object) -> int:
    """Return the exit code that a value stands for, as `sys.exit` has it."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def end_copy(error: BaseException | None) -> NoReturn:
    """End a process that user code has forked off a worker, and that has come back into the engine.

    It is no worker: its ring, its slots and its socket are those of the process that it was forked
    from. `error` is what the user's code has raised there; None: it has returned.
    """
    code = 1
    with contextlib.suppress(Exception):  # there may be no stderr
        if isinstance(error, SystemExit):
            code = exit_code_of(error.code)
        else:
            what = "has returned from it (end it by os._exit)" if error is None else "raises"
            sys.stderr.write(f"cseq: process {os.getpid()}, forked by an indexer, {what}\n")
            if error is not None:
                sys.__excepthook__(type(error), error, error.__traceback__)
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush the standard streams: forked processes would write their buffers again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken or closed
            stream.flush()


_reading = False


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """In this context, which imports modules in a worker or a server, launchers are refused."""
    global _reading
    _reading = True
    try:
        yield
    finally:
        _reading = False


def check_reading() -> None:
    """Refuse to start processes within an import in a worker: each would start more."""
    if _reading:
        raise RuntimeError(
            "a module that worker processes import starts worker processes when it is imported; "
            "start them in a function, or below: if __name__ == '__main__':"
        )
