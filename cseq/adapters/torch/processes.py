"""The worker processes of an iterator, as `multiprocessing.Process` shows its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cseq.processes.launcher import Child

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """A worker process; its end is what the thread that watches the workers has found."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self.kill = self.terminate = child.kill  # workers ignore SIGTERM

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal's number; None: it lives."""
        return self._child.code

    def is_alive(self) -> bool:
        """Whether it lives."""
        return not self._child.ended.wait(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        self._child.ended.wait(-1.0 if timeout is None else timeout)
