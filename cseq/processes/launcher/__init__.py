"""Starts worker processes by fork server, spawn or fork, behind one interface.

A worker process receives one end of a pair of connected sockets and runs ``entry(sock)``. The
trainer keeps the other end. End of file means that the process at the other end is dead or dying.

::

    trainer ── Launcher.launch(worker) ──> Child(sock, pid) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy, cseq, the user's modules) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

For all three methods:

- A worker never runs the user's script. Its ``sys.path`` and ``sys.argv`` match the trainer's, its
  standard input is empty, and it may start processes.
- From their first instruction, workers and the server ignore signals meant for the trainer
  (`SHIELDED`, such as Ctrl-C or a job scheduler's notice). Processes forked by a worker do not.
- Only the worker and the trainer keep their ends of the socket. A process that user code forks from
  either side closes its inherited copy (`close_in_forks`). Executed programs inherit no socket.
- Exit codes follow `subprocess`: a killed process has a negative signal number.
- A worker exits when ``entry`` returns. Its process pools shut down and its ``atexit`` functions
  run, but threads are not awaited. On Linux, killing a worker also kills the processes it started.
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
    """Create a launcher. It starts nothing until `launch` or `prepare` is called.

    Parameters
    ----------
    method : str or None
        'forkserver', 'spawn' or 'fork', or None for the first of `start_methods()`.
    entry : str
        The ``module:function`` that workers run.
    threads : int or None
        The number of compute threads for the workers' libraries, or None for their default.

    Raises
    ------
    ValueError
        The method is not available on this system.
    RuntimeError
        Called during an import in a worker process or the fork server, or gevent or eventlet has
        patched modules that the processes need.
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
