"""What the monitors of frameworks and metrics systems have in common."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from cseq.check import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq.stats import Stats

__all__ = ["Windows", "needs"]

log = logging.getLogger("cseq")


class Windows:
    """Figures of a loader for each window of so many steps.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        None: the one that `begin` is given.
    every : int
        Steps of the loop from one window to the next.
    """

    def __init__(self, manager: Any, every: int) -> None:
        self.every = count("every", every)
        self._own = None if manager is None else stats_of(manager)
        self._before: Stats | None = None
        self._told = False

    def begin(self, manager: Any = None) -> None:
        """Begin a window here; the loop trains with `manager`."""
        self._stats = self._own or stats_of(manager)
        self._before = read(self._stats)

    def at(self, step: int) -> dict[str, float]:
        """Return the figures if a window ends with this step, which is counted from 1, or {}."""
        return self.end() if step % self.every == 0 else {}

    def end(self) -> dict[str, float]:
        """Return the figures since the window's begin, and begin the next one."""
        before, now = self._before, read(self._stats)
        self._before = now
        if now is None:
            if not self._told:
                log.warning("no figures to log: this loader has no worker processes of cseq's")
            self._told = True
            return {}
        if before is not None:
            with contextlib.suppress(ValueError):  # started again: figures since then
                now = now.since(before)
        return now.as_dict()


def stats_of(manager: Any) -> Callable[[], Stats]:
    """Check that something counts; return its `stats`."""
    stats: Callable[[], Stats] | None = getattr(manager, "stats", None)
    if stats is None:
        raise TypeError(
            f"manager={manager!r} has no stats(); give a manager of cseq or a cseq.DataLoader"
        )
    return stats


def read(stats: Callable[[], Stats]) -> Stats | None:
    """Return what was counted; None: nothing, of a DataLoader without workers at this moment."""
    try:
        return stats()
    except RuntimeError:
        return None


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Import a library in this block, or say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this needs {library}: pip install {package}", name=library) from error
