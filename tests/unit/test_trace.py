"""What a trace records of tickets of two stages."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cseq
from cseq._core import Ring, ring_bytes
from cseq._feed import FeedIterator
from cseq._memory import Block
from cseq._work import Runner
from cseq.encoding.transport import Objects
from cseq.measure.lanes import Lanes
from cseq.order.place import Place
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential
from cseq.pools.base import BatchPool
from cseq.stage import CONVERTER, INDEXER

if TYPE_CHECKING:
    from pathlib import Path


class TwoStages(BatchPool):
    """An indexer and a converter, on the feed's own thread."""

    def __init__(self) -> None:
        memory = Block(ring_bytes(3, 2, 2), zero=True)
        ring, self.edge = Ring(memory, 3, 2, 2), Objects(3)
        self.runners = [
            Runner(ring, stage, stage + 1, last=stage == CONVERTER)
            for stage in (INDEXER, CONVERTER)
        ]
        sampler = Sampler(10, Sequential(), batch_size=2, seed=0, drop_last=False)
        job: Any = SimpleNamespace(sampler=sampler, ordered=True, on_error="raise", options=None)
        lanes = Lanes(1, "thread")
        super().__init__(job, ring, self.edge, num_converters=1, lanes=lanes)
        for owner in (1, 2):
            lanes.note("start", owner, os.getpid(), owner)

    def _check(self, _: Any) -> None:
        for runner in self.runners:
            time.sleep(0.001)
            if runner.claim():
                is_first = runner is self.runners[0]
                batch = runner.indices() if is_first else self.edge.fetch(runner)
                self.edge.publish(runner, self.edge.write(runner, batch))


def test_two_stages(tmp_path: Path) -> None:
    """A converter has slices of its own."""
    pool, path = TwoStages(), tmp_path / "run.json"
    generation = pool.run.interrupt()
    with cseq.trace(path):
        pool.begin(Place(0), 0, 0, generation)
        assert len(list(FeedIterator(pool.feed, generation))) == 5
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    for batch in range(5):
        index, convert = slices[f"index 0/{batch}"], slices[f"convert 0/{batch}"]
        assert index["ts"] + index["dur"] <= convert["ts"] + 0.001
