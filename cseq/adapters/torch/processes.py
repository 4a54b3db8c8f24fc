"""The worker processes of an iterator, as `multiprocessing.Process` shows its own."""

from __future__ import annotations

import math
import time
import weakref
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cseq.processes.launcher import Child
    from cseq.stream import Streams

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """A worker process; it can be asked about its end when the iterator is gone.

    That end is what the thread that watches the workers has found. To look for it here, on the
    user's thread, would not do: Ctrl-C in the middle of it would lose what was found, and could
    leave the fork server's socket marked as being read, for ever.

    Attributes
    ----------
    name : str
    daemon : bool
        False: it may have children.
    """

    daemon = False

    def __init__(self, streams: Streams, number: int) -> None:
        self.name = f"cseq-w{number}"
        self._number = number
        self._streams = weakref.ref(streams)
        self._processes = streams.processes()
        self._killed: Child | None = None  # another process takes its place, which is not this one

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name!r} pid={self.pid}>"

    def _child(self) -> Child | None:
        """Return the process, once it is started; another one than before, if that has died."""
        streams = self._streams()
        if self._number not in self._processes and streams is not None:
            streams.processes(wait=True)
        return self._killed or self._processes.get(self._number)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        child = self._child()
        return None if child is None else child.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal's number; None: it lives."""
        child = self._child()
        return None if child is None else child.code

    def is_alive(self) -> bool:
        """Whether it lives."""
        child = self._child()
        return child is not None and not child.ended.wait(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        child = self._child()
        while child is not None and self.is_alive() and (left := deadline - time.monotonic()) > 0:
            child.ended.wait(min(left, TIMEOUT_MAX))

    def kill(self) -> None:
        """Kill it. Another one takes its place."""
        child = self._killed = self._child()
        if child is not None:
            child.kill()

    terminate = kill  # workers ignore SIGTERM
