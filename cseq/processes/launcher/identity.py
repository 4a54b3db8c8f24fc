"""What multiprocessing and concurrent.futures have to know of a worker process.

That it is a process of its own, without the parent's children, finalizers and threads: queues and
proxies begin anew in it. And when it ends: queues are flushed, and pools end their processes. A
`multiprocessing.Process` sees to all of this itself; its means have no public names.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cseq.processes.launcher.base import Identity

__all__ = ["adopt", "close_pools"]

PROCESS: Any = multiprocessing.process


class Trainer(PROCESS._ParentProcess):  # type: ignore[misc]
    """The trainer's process, for `multiprocessing.parent_process`: no worker outlives it."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(name, pid, None)
        del self._sentinel

    @cached_property
    def _sentinel(self) -> Any:
        """What its end is waited for with: nothing comes here."""
        self._ends = multiprocessing.Pipe(duplex=False)
        return self._ends[0]


def adopt(number: int, trainer: Identity, *, is_copy: bool) -> None:
    """Tell multiprocessing, and process pools, that this is a new process.

    `is_copy`: they were loaded before the fork, and may have threads and finalizers of the parent.
    """
    process: Any = multiprocessing.Process(name=f"cseq-w{number}")
    process._identity = (number + 1,)  # in the trainer they are counted; each worker has begun anew
    PROCESS._current_process = process
    PROCESS._parent_process = Trainer(*trainer)
    if not is_copy:
        return
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
    """Let process pools finish what they were given, and end.

    Else `multiprocessing`, at the end of this process, would wait for their processes for ever.
    """
    pools: Any = sys.modules.get("concurrent.futures.process")
    if pools is None:
        return
    pools._global_shutdown = True
    for thread, wakeup in list(pools._threads_wakeups.items()):
        with contextlib.suppress(OSError):  # the pool was dropped just now, and is ending
            wakeup.wakeup()
        thread.join()
