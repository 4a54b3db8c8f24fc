"""What multiprocessing and process pools have to know of a worker process.

That it is a new process: queues and proxies begin anew in it, and are flushed at its end. A
`multiprocessing.Process` sees to this itself; its means have no public names.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity

__all__ = ["adopt", "close_pools"]

PROCESS: Any = multiprocessing.process


def adopt(number: int, trainer: Identity, sentinel: int) -> None:
    """Tell multiprocessing, and process pools, that this is a new process.

    They may have threads and finalizers of the one that it was forked from.
    """
    process: Any = multiprocessing.Process(name=f"cseq-w{number}")
    process._identity = (number + 1,)  # in the trainer they are counted; each worker has begun anew
    PROCESS._current_process = process
    PROCESS._parent_process = PROCESS._ParentProcess(*trainer, sentinel)
    PROCESS._children = set()
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.unregister(util._exit_function)
        atexit.register(util._exit_function)
    pools: Any = sys.modules.get("concurrent.futures.process")
    if pools is not None:
        pools._threads_wakeups.clear()


def close_pools() -> None:
    """Let process pools end; else multiprocessing would wait for their processes for ever."""
    pools: Any = sys.modules.get("concurrent.futures.process")
    if pools is not None:
        with contextlib.suppress(OSError):  # one was dropped just now, and is ending
            pools._python_exit()
