"""Starting worker processes: fork server, spawn and fork with one interface.

A worker process gets one end of a pair of connected sockets, and runs ``entry(sock)``. The trainer
keeps the other end. At end of file, the process at the other end is dead or dying.

::

    trainer ── Launcher.launch(worker) ──> Child(sock, pid) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy, cseq, the user's modules) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

For all three:

- A worker never runs the user's script. Its ``sys.path`` and ``sys.argv`` are the trainer's, its
  standard input is empty, and it may start processes.
- Workers and the server ignore signals that are meant for the trainer (`SHIELDED`: Ctrl-C, a job
  scheduler's notice) from their first instruction on. Processes that they fork do not.
- Only the worker and the trainer hold an end of their socket. A process that user code forks off
  either of them closes its copies (`close_in_forks`), and executed programs inherit none.
- Exit codes are as in `subprocess`: minus the signal's number for a killed process.
- A worker ends when ``entry`` returns. Its process pools end and its ``atexit`` functions run, but
  it waits for no threads. On Linux, killing a worker kills the processes that it started.
"""

from __future__ import annotations

from cseq.processes.launcher.base import (
    SHIELDED,
    check_reading,
    describe_exit,
    reading,
    start_methods,
)
from cseq.processes.launcher.forks import close_in_forks
from cseq.processes.launcher.processes import Child, ForkLauncher, Launcher, SpawnLauncher
from cseq.threads import refuse_patches

__all__ = [
    "SHIELDED",
    "Child",
    "Launcher",
    "close_in_forks",
    "describe_exit",
    "make_launcher",
    "reading",
    "start_methods",
]


def make_launcher(method: str | None = None, *, entry: str, threads: int | None = None) -> Launcher:
    """Make a launcher; it starts nothing before its first `launch` (or `prepare`).

    Parameters
    ----------
    method : str or None
        'forkserver', 'spawn' or 'fork', or None for the first of `start_methods()`.
    entry : str
        ``module:function`` that workers run.
    threads : int or None
        How many threads the libraries of workers compute with, or None for their default.

    Raises
    ------
    ValueError
        This system does not have the method.
    RuntimeError
        The caller is a module that a worker process or the fork server is importing; or gevent or
        eventlet has patched modules that processes need.
    """
    check_reading()
    refuse_patches("threading", "thread", "socket", "select", "subprocess")
    methods = start_methods()
    method = method or methods[0]
    if method not in methods:
        names = ", ".join(map(repr, methods))
        raise ValueError(f"start_method={method!r} does not exist here; choose one of {names}")
    if method == "forkserver":
        from cseq.processes.launcher.forkserver import ForkServerLauncher

        return ForkServerLauncher(entry, threads)
    return (SpawnLauncher if method == "spawn" else ForkLauncher)(entry, threads)
