"""Starting worker processes: fork server, spawn and fork with one interface.

A worker process gets one end of a pair of connected sockets, and runs ``entry(sock)``. The trainer
keeps the other end. End of file means, in the trainer, that the worker is dead or dying, and in the
worker, that the trainer is.

::

    trainer ── Launcher.launch(number) ──> Child(number, pid, sock) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy, cseq, the user's modules) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

For all three:

- A worker never runs the user's script. Its ``sys.path`` and ``sys.argv`` are the trainer's, its
  standard input is empty, and it may start processes of its own.
- Workers and server ignore signals that are meant for the trainer (`SHIELDED`: Ctrl-C, a job
  scheduler's notice), beginning with their first instruction. Processes that they fork do not.
- No process but worker and trainer holds an end of their socket: a process that user code forks
  off either of them closes its copies (`close_in_forks`), executed programs inherit none.
- Exit codes are as in `subprocess`: minus the signal's number for a killed process.
- A worker ends when ``entry`` returns: its process pools end, its ``atexit`` functions run; it
  waits for no threads. One that is killed takes with it what it has started (Linux).
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
        'forkserver', 'spawn' or 'fork'; None: the first of `start_methods()`.
    entry : str
        ``module:function`` that workers run.
    threads : int or None
        How many threads the libraries of workers compute with; None: their default.

    Raises
    ------
    ValueError
        This system does not have the method.
    RuntimeError
        Called by a module that a worker process or the fork server is importing; or gevent, or
        eventlet, has patched what processes need.
    """
    check_reading()
    refuse_patches("threading", "thread", "socket", "select", "subprocess")
    there = start_methods()
    method = method or there[0]
    if method not in there:
        names = ", ".join(map(repr, there))
        raise ValueError(f"start_method={method!r} does not exist here; choose one of {names}")
    if method == "forkserver":
        from cseq.processes.launcher.forkserver import ForkServerLauncher

        return ForkServerLauncher(entry, threads)
    return (SpawnLauncher if method == "spawn" else ForkLauncher)(entry, threads)
