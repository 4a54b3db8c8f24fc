"""Starts worker processes with a fork server, spawn or fork.

A worker calls ``entry(sock)`` with one end of a socket pair. End of file means that the process at
the other end is dead or about to exit.

::

    trainer ── Launcher.launch(worker) ──> Child(sock, pid) ~~ socket ~~ entry(sock)

    forkserver   trainer ── spawn ──> server (numpy, cseq, the user's modules) ── fork ──> worker
    spawn        trainer ── spawn ──> worker
    fork         trainer ── fork  ──> worker

With all three methods:

- A worker never runs the user's script. It has the trainer's ``sys.path`` and ``sys.argv``, and an
  empty standard input.
- Workers and the server ignore signals for the trainer (`SHIELDED`), such as Ctrl-C. Processes that
  a worker forks do not.
- Processes that user code forks close their copies of the socket (`close_in_forks`).
- Exit codes are the same as in `subprocess`.
- A worker exits when ``entry`` returns. It calls ``atexit`` functions, but does not wait for
  threads. On Linux, if a worker is killed, its descendants are killed as well.
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
    """Create a launcher, without starting a process.

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
        If a worker or the fork server is importing a module, or if gevent or eventlet has patched
        modules.
    """
    check_reading()
    refuse_patches("threading", "thread", "socket", "select", "subprocess")
    methods = start_methods()
    method = method or methods[0]
    if method not in methods:
        names = ", ".join(map(repr, methods))
        raise ValueError(f"start_method={method!r} is not available here; pass one of {names}")
    if method == "forkserver":
        from cseq.processes.launcher.forkserver import ForkServerLauncher

        return ForkServerLauncher(entry, threads)
    return (SpawnLauncher if method == "spawn" else ForkLauncher)(entry, threads)
