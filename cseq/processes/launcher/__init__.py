"""Starts worker processes with a fork server, spawn or fork, behind one interface.

A worker process gets one end of a pair of connected sockets, and calls ``entry(sock)``. The trainer
keeps the other end. End of file means that the process at the other end is dead or about to exit.

::

    trainer ── Launcher.launch(worker) ──> Child(sock, pid) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy, cseq, the user's modules) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

With all three methods:

- A worker never runs the user's script. It has the same ``sys.path`` and ``sys.argv`` as the
  trainer and an empty standard input, and it may start processes.
- From the start, workers and the server ignore signals that are meant for the trainer (`SHIELDED`),
  such as Ctrl-C or a signal from a job scheduler. Processes that a worker forks do not ignore them.
- Only the worker and the trainer keep their ends of the socket. If user code forks a process from
  one of them, it closes the inherited copy (`close_in_forks`). Executed programs do not inherit it.
- Exit codes are the same as in `subprocess`. A negative number is the signal that killed a process.
- A worker exits when ``entry`` returns. Its process pools are shut down and its ``atexit``
  functions are called, but it does not wait for threads. On Linux, if a worker is killed, the
  processes that it has started are killed as well.
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
    """Create a launcher. No process is started before `launch` or `prepare` is called.

    Parameters
    ----------
    method : str or None
        'forkserver', 'spawn' or 'fork', or None for the first of `start_methods()`.
    entry : str
        The function that workers call, as ``module:function``.
    threads : int or None
        The number of compute threads for libraries in workers, or None for their default.

    Raises
    ------
    ValueError
        If the method is not available on this system.
    RuntimeError
        If a worker process or the fork server is importing a module, or if gevent or eventlet has
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
