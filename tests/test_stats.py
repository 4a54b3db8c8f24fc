"""What a manager says it has done."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import cseq
from cseq._memory import HAS_GIL
from cseq.stats import Stats

PROC = pytest.param("proc", marks=pytest.mark.needs("worker processes"))

both = pytest.mark.parametrize("kind", [PROC, "thread"])


class Large:
    """Batches that are leased, not copied."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return np.repeat(indices, 4096)


@both
def test_batches_and_samples_are_counted(kind: str) -> None:
    """Over all epochs since the start, also after the end."""
    m = cseq.MSequence(Large, 50, batch_size=8, thread_type=kind, out_type="null")
    with m.start():
        for _ in range(2):
            for _ in m:
                pass
        now = m.stats()
    assert (now.batches, now.samples) == (14, 100)
    assert m.stats().batches == 14
    assert (now.nbytes >= 100 * 4096 * 8) == (kind == "proc")
    assert now.depths == (0, 0, 0)
    assert now.loop_waited >= 0
    assert "14 batches, 100 samples" in str(now)
    with m.start():
        assert m.stats().batches == 0


@pytest.mark.needs("worker processes")
def test_copies_are_counted() -> None:
    """Batches that are copied because too many are held."""
    m = cseq.MPSequence(Large, 50, batch_size=8, out_type="null", memory_limit=10**6)
    with m.start():
        kept = list(m)
        assert m.stats().copies > 0
    assert sum(map(len, kept)) == 50 * 4096


class Sleeps:
    """Takes some seconds for every batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        time.sleep(self.seconds)
        return indices


class Straggling:
    """Takes 100 times as long for one batch in twenty."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        time.sleep(0.2 if indices[0] % 20 == 0 else 0.002)
        return indices


class Computes:
    """Computes in Python, with the GIL."""

    def __getitem__(self, indices: np.ndarray) -> int:
        return sum(k * k for k in range(100_000))


class SlowToMake(Sleeps):
    """Takes long to be made."""

    def __init__(self) -> None:
        super().__init__(0.0)
        time.sleep(1.5)


def run(kind: str, worker: Any, num_workers: int, batches: int, loop: float = 0.0) -> Stats:
    """Run an epoch of batches of one index."""
    m = cseq.MSequence(
        worker, batches, num_workers=num_workers, batch_size=1, thread_type=kind, out_type="null",
        shuffle=False,
    )  # fmt: skip
    with m.start() as taken:
        for _ in taken:
            if loop:
                time.sleep(loop)
        return m.stats()


@both
def test_too_few_workers(kind: str) -> None:
    """The loop waits all the time, no worker ever does."""
    stats = run(kind, partial(Sleeps, 0.02), 2, 40)
    assert stats.bottleneck == "workers", stats
    assert stats.loop_waiting > 0.5 > 2 * stats.workers_waiting


@both
def test_a_slow_loop(kind: str) -> None:
    """The workers wait, also if there are many of them."""
    for num_workers in (1, 6):
        stats = run(kind, partial(Sleeps, 0.001), num_workers, 30, loop=0.02)
        assert stats.bottleneck == "loop", stats
        assert stats.workers_waiting > 0.3


@both
def test_stragglers(kind: str) -> None:
    """One slow batch in twenty, eight workers: the loop waits, and so do most workers."""
    stats = run(kind, Straggling, 8, 100)
    assert stats.bottleneck == "stragglers", stats


@pytest.mark.needs("worker processes")
def test_threads_bound_by_the_gil() -> None:
    """Threads that compute in Python are busy, and use one core; processes use several."""
    wanted = "gil" if HAS_GIL and (os.cpu_count() or 1) > 1 else "workers"
    for _ in range(20):  # until the machine has most of a core for this process
        stats = run("thread", Computes, 4, 60)
        if stats.bottleneck == wanted:
            break
    assert stats.bottleneck == wanted, stats
    assert run("proc", Computes, 2, 60).bottleneck == "workers"
    assert run("thread", partial(Sleeps, 0.01), 2, 40).bottleneck == "workers"


@pytest.mark.needs("worker processes")
def test_the_start_is_no_waiting() -> None:
    """What passes until the first batch is counted apart, and so are pauses between epochs."""
    m = cseq.MPSequence(SlowToMake, 30, num_workers=2, batch_size=1, out_type="null", shuffle=False)
    with m.start():
        for _ in range(2):
            for _ in m:
                time.sleep(0.01)
            time.sleep(0.5)
        stats = m.stats()
    assert stats.start_waited > 1.4
    assert stats.loop_waited < stats.elapsed / 2
    assert stats.elapsed < 60 * 0.01 + 1.0
    assert stats.bottleneck == "loop", stats
    assert f"first batch after {stats.start_waited:.3f} s" in str(stats)


def test_little_was_seen() -> None:
    """Test mode and the first few batches say nothing of a bottleneck."""
    m = cseq.MTSequence(np.arange(40), 40, batch_size=1, num_workers=1, out_type="null")
    with m.start_test() as batches:
        list(batches)
        assert m.stats().bottleneck == "unknown"
    with m.start() as batches:
        assert m.stats().bottleneck == "unknown"
        assert m.stats().loop_waiting == m.stats().workers_waiting == 0
        next(iter(batches))
        assert m.stats().bottleneck == "unknown"


def made(**counted: Any) -> str:
    """Return the bottleneck of 100 batches in 10 seconds, by 4 workers."""
    return Stats(**{"batches": 100, "elapsed": 10.0, "num_workers": 4} | counted).bottleneck


def test_the_bottleneck() -> None:
    """Fractions are compared: of the time, and of the workers' time."""
    assert made(loop_waited=9, workers_waited=2) == "workers"
    assert made(loop_waited=2, workers_waited=6) == "workers"  # 6 of 40 is less than 2 of 10
    assert made(loop_waited=2, workers_waited=12) == "loop"
    assert made(loop_waited=0.5, workers_waited=0) == "loop"
    assert made(loop_waited=9, workers_waited=30) == "stragglers"
    assert made(loop_waited=9, workers_waited=2, computed=9.5) == "gil"
    assert made(loop_waited=0, workers_waited=2, computed=9.5) == "gil"
    assert made(loop_waited=0, workers_waited=20, computed=9.5) == "loop"
    assert made(loop_waited=9, workers_waited=2, computed=0.5) == "workers"
    assert made(loop_waited=9, workers_waited=2, computed=19) == "workers"
    assert made(loop_waited=9, num_workers=1, computed=9.5) == "workers"
    assert made(loop_waited=9, batches=10**6) == "none"
    full = {"loop_waited": 9, "workers_waited": 30, "num_converters": 2}
    assert made(**full, converters_waited=1) == "converters"
    assert made(**full, converters_waited=15) == "stragglers"
    assert (
        made(loop_waited=9, workers_waited=2, num_converters=2, converters_waited=15) == "workers"
    )
