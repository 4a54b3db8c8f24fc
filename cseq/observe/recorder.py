"""The longest runs of a program, for the page of ``cseq run --report``."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from cseq.engine.tickets.batches import Batches
from cseq.report.page import Part, write
from cseq.runs import on_close, present
from cseq.tracing import full

if TYPE_CHECKING:
    from cseq.runs import Run

__all__ = ["Recorder"]


def of_run(run: Run[Any]) -> Part:
    """Look at what runs, whatever it belongs to."""
    pool, stats = run.pool, run.pool.stats()
    if not isinstance(pool.tickets, Batches):
        return Part("DataLoader" if run.about else "Streams", run.about, stats)
    assert pool.tickets.sampler is not None
    sampler = pool.tickets.sampler.changed()  # with a reader of its own
    facts = f"samples={sampler.dset_size:,}, batches={sampler.length:,}, "
    facts += f"batch_size={sampler.batch_size:,}, workers={stats.num_workers}, seed={sampler.seed}"
    return Part(pool.crew.of, facts, stats, has_remake=True)


class Recorder:
    """Keeps of each kind of run of this process the longest one, and writes a page at the end.

    Parameters
    ----------
    path : str
        With %p for the process id, %r for the rank.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = full(path), os.getpid()
        os.stat(os.path.join(os.path.dirname(self._path), ""))  # raises where there is no folder
        self._kept: dict[tuple[str, str], Part] = {}
        self._guard = threading.RLock()  # runs end on any thread, and in signal handlers
        on_close.append(self.note)

    def note(self, run: Run[Any]) -> None:
        """Keep what a run was."""
        if not run.pool.stats().batches:
            return
        part = of_run(run)
        with self._guard:
            kept = self._kept.setdefault((part.name, part.facts), part)
            if part.stats.elapsed > kept.stats.elapsed:
                self._kept[part.name, part.facts] = part

    def end(self) -> None:
        """Write the page; not in a copy of the process."""
        if os.getpid() != self._pid:
            return
        for run in present():
            self.note(run)
        said = "no report: nothing was made by workers of cseq's"
        if self._kept:
            write(self._path, [*self._kept.values()])
            said = f"the report is {self._path}"
        if sys.stderr is not None:
            print("cseq:", said, file=sys.stderr)  # noqa: T201
