"""What a trace records, at its lowest: marks in shared memory, tickets of two stages."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cseq
from cseq import _core
from cseq._core import Ring, ring_bytes
from cseq._feed import FeedIterator
from cseq._memory import Block
from cseq._work import Runner
from cseq.encoding.transport import Objects
from cseq.lanes import Lanes
from cseq.order.place import Place
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential
from cseq.pools.base import BatchPool
from cseq.stage import CONVERTER, INDEXER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def marks() -> Iterator[_core.Marks]:
    """Record the marks of this process in memory of the test's."""
    marks = _core.Marks(Block(_core.MARKS_BYTES, zero=True))
    marks.attach()
    marks.on = True
    yield marks
    _core.forget()


def test_marks(marks: _core.Marks) -> None:
    """The newest, in the order of their ends, by number; not while they are not wanted."""
    with cseq.span("outer"), cseq.span("inner"):
        cseq.count("n", 2)
    marks.on = False
    with cseq.span("late"):
        cseq.count("n", 2)
    read = marks.read()
    assert read["name"].tolist() == [b"n", b"inner", b"outer"]
    assert read["number"].tolist() == [1, 2, 3]
    assert read["kind"].tolist() == [_core.COUNT, _core.SPAN, _core.SPAN]
    assert not read["thread"].any()
    _, inner, outer = read
    assert outer["begin"] <= inner["begin"] <= inner["value"] <= outer["value"]
    assert marks.read(2)["number"].tolist() == [3]
    assert marks.read(9).tolist() == []


def test_a_span_that_a_trace_ends_in(marks: _core.Marks) -> None:
    """It is not recorded; nor is one that has begun before."""
    marks.on = False
    with cseq.span("before"):
        marks.on = True
    with cseq.span("after"):
        marks.on = False
    assert marks.begun == 0


def test_a_span_that_was_not_entered(marks: _core.Marks) -> None:
    """Its end records nothing."""
    cseq.span("never").__exit__(None, None, None)
    assert marks.begun == 0


def test_the_memory_is_long_enough() -> None:
    """Marks lie inside of their memory."""
    with pytest.raises(IndexError):
        _core.Marks(Block(_core.MARKS_BYTES - 1, zero=True))


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
        lanes.note_thread(1)
        other = threading.Thread(target=lanes.note_thread, args=(2,))
        other.start()
        other.join()

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
