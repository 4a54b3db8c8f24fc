"""Records runs for the page that ``cseq run --report`` writes."""

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
    """Describe a run."""
    pool, stats = run.pool, run.pool.stats()
    if not isinstance(pool.tickets, Batches):
        return Part("DataLoader" if run.about else "Streams", run.about, stats)
    assert pool.tickets.sampler is not None
    # The copy that `changed` returns has its own reader.
    sampler = pool.tickets.sampler.changed()
    facts = f"samples={sampler.dset_size:,}, batches={sampler.length:,}, "
    facts += f"batch_size={sampler.batch_size:,}, workers={stats.num_workers}, seed={sampler.seed}"
    return Part(pool.crew.of, facts, stats, has_remake=True)


class Recorder:
    """Keeps the longest run of each kind, and writes a page about them at the end.

    In `path`, %p is the process id and %r the rank.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = full(path), os.getpid()
        # Raise OSError now, not at the end, if the folder does not exist.
        os.stat(os.path.join(os.path.dirname(self._path), ""))
        self._kept: dict[tuple[str, str], Part] = {}
        # Runs may end in any thread or in a signal handler.
        self._guard = threading.RLock()
        on_close.append(self.note)

    def note(self, run: Run[Any]) -> None:
        """Keep the figures of a run if it is the longest of its kind."""
        if not run.pool.stats().batches:
            return
        part = of_run(run)
        with self._guard:
            kept = self._kept.setdefault((part.name, part.facts), part)
            if part.stats.elapsed > kept.stats.elapsed:
                self._kept[part.name, part.facts] = part

    def end(self) -> None:
        """Write the page, unless this is a forked process."""
        if os.getpid() != self._pid:
            return
        for run in present():
            self.note(run)
        line = "no report: cseq's workers made no batches"
        if self._kept:
            write(self._path, [*self._kept.values()])
            line = f"wrote the report to {self._path}"
        if sys.stderr is not None:
            print("cseq:", line, file=sys.stderr)  # noqa: T201
