"""Counts worker deaths."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from cseq.errors import WorkerDied
from cseq.processes.launcher import describe_exit
from cseq.system import oom_kills

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Deaths", "Held"]

# Maximum number of deaths per ticket, and of consecutive deaths at startup per worker.
TRIES = 3


class Held(NamedTuple):
    """A ticket that a dead worker was working on.

    `location` names the epoch, batch and indices. If `is_batch` is set, the loop can skip it.
    """

    epoch: int
    batch: int
    indices: list[int]
    location: str
    is_batch: bool = True


class Deaths:
    """Counts worker deaths in an epoch.

    Parameters
    ----------
    budget : int
        The maximum number of replacements per epoch.
    unit, advice : str
        What messages call a ticket (such as 'batch'), and what they say if it kills workers.
    lost : str
        Text to append to the log message about a dead worker.
    fails : bool
        Whether the run continues after a batch that kills workers has failed with a `WorkerDied`.
    """

    def __init__(
        self,
        budget: int,
        num_workers: int,
        unit: str,
        advice: str,
        lost: str = "",
        *,
        fails: bool = False,
    ) -> None:
        self.lost, self._fails, self._budget = lost, fails, budget
        self._starts = TRIES * num_workers
        self._unit, self._advice = unit, advice
        self._deaths = self._unready = 0
        self._by_location: Counter[str] = Counter()
        self._oom_kills = oom_kills()
        self.has_failed = False
        self.restarts = self.retries = 0

    def begin_epoch(self) -> None:
        """Reset the counts at the start of an epoch."""
        self._deaths = 0
        self._by_location.clear()

    def count_death(
        self,
        worker: int,
        exitcode: int | None,
        held: Sequence[Held],
        *,
        pid: int | None = None,
        was_ready: bool,
        is_overdue: bool = False,
    ) -> WorkerDied | None:
        """Count a worker's death. Return an error if there have been too many.

        If this sets `has_failed`, the run goes on without the batch. `is_overdue` means a timeout.
        """
        self._deaths += 1
        self._unready = 0 if was_ready else self._unready + 1
        epoch, batch, indices, location, is_batch = held[0] if held else (None, None, [], "", False)
        self._by_location[location] += 1
        is_lethal = bool(held) and self._by_location[location] >= TRIES
        is_over = self._deaths > self._budget
        can_do_without = self._fails and is_batch
        self.has_failed = is_lethal and can_do_without and not is_over
        if is_lethal and not (can_do_without and is_over):
            reason = f"This {self._unit} has killed {TRIES} workers; {self._advice}"
        elif self._unready >= self._starts:
            reason = (
                f"{self._unready} workers in a row died before they were ready; check what they "
                "do at the start"
            )
        elif is_over:
            reason = (
                f"{self._deaths} workers died in this epoch; max_restarts={self._budget} allows no "
                "more replacements"
            )
        else:
            self.restarts += 1
            self.retries += len(held)
            return None
        self.restarts += self.has_failed
        how = f"{describe_exit(exitcode)}{self._oom(exitcode)}"
        if is_overdue:
            how = "exceeded its timeout and was killed"
        return WorkerDied(
            f"worker {worker} {how}{f' while making {location}' if held else ''}. {reason}",
            epoch=epoch,
            batch=batch,
            indices=indices,
            exitcode=exitcode,
            worker=worker,
            pid=pid,
        )

    def _oom(self, exitcode: int | None) -> str:
        """Describe the out-of-memory kills since the last call, if the worker was killed."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        if exitcode != -9 or before is None or self._oom_kills is None:
            return ""
        killed = self._oom_kills - before
        remedy = "; use fewer workers or smaller batches" if killed > 0 else ""
        return f" (out-of-memory kills in its cgroup: {killed}{remedy})"
