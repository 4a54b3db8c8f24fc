"""The one loop: what it does with a ticket, with none, and at the end."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import ringing

from cseq._core import Ring, ring_bytes
from cseq._memory import Block
from cseq._work import Runner
from cseq.stage import CONVERTER, INDEXER, MOST_SPIN_NS, SPIN_NS, run, spin_ns, spins


def make_ring(cells: int = 4, runners: int = 2) -> Ring:
    """Make a ring of one-sample tickets."""
    return Ring(Block(ring_bytes(cells, 1, runners), zero=True), cells, 1, runners)


def post(ring: Ring, *batches: int) -> None:
    """Post tickets."""
    for batch in batches:
        ring.post(ringing.vacant(ring), batch, 0, batch, 0)


def test_runs_until_closed() -> None:
    """Every ticket is worked on, oldest first; a closed ring ends the loop."""
    ring = make_ring()
    runner = Runner(ring, INDEXER, 1, last=True)
    done: list[int] = []

    def work(runner: Runner) -> None:
        done.append(runner.batch)
        runner.publish()
        if len(done) == 3:
            ring.close()

    post(ring, 5, 6, 7)
    run(runner, work)
    assert done == [5, 6, 7]


def test_idle_when_nothing_comes() -> None:
    """`idle` is called when no ticket has come for a while, again and again."""
    ring = make_ring()
    calls: list[int] = []

    def idle() -> None:
        calls.append(1)
        if len(calls) == 2:
            ring.close()

    run(Runner(ring, INDEXER, 1, last=True), lambda runner: None, idle=idle)
    assert len(calls) == 2


def test_a_defect_ends_the_runner() -> None:
    """What `work` raises comes out of the loop."""
    ring = make_ring()
    post(ring, 1)

    def work(runner: Runner) -> None:
        raise LookupError("defect")

    with pytest.raises(LookupError, match="defect"):
        run(Runner(ring, INDEXER, 1, last=True), work)


def test_two_stages() -> None:
    """What the first stage publishes is the second one's to claim, and then the trainer's."""
    ring = make_ring()
    journal: list[Any] = []

    def index(runner: Runner) -> None:
        runner.publish(0, (runner.batch * 10,))

    def convert(runner: Runner) -> None:
        runner.publish(0, (runner.record[0] + 1,))

    threads = [
        threading.Thread(target=run, args=(Runner(ring, INDEXER, 1, last=False), index)),
        threading.Thread(target=run, args=(Runner(ring, CONVERTER, 2, last=True), convert)),
    ]
    for thread in threads:
        thread.start()
    post(ring, 1, 2, 3, 4)
    while len(journal) < 4:
        seen = ring.notices()
        taken = ringing.take(ring)
        if taken is None:
            ring.wait(seen)
        else:
            journal.append(taken[4][0])
    ring.close()
    for thread in threads:
        thread.join()
    assert journal == [11, 21, 31, 41]


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_nobody_looks_on_a_single_core(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Who looks at the ring before it sleeps needs a core that the others do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert spin_ns() == (SPIN_NS if cores > 1 else 0)
    assert spins(1) == {1: (0, 0)}.get(cores, (SPIN_NS, MOST_SPIN_NS))
    assert spins(2) == {1: (0, 0), 2: (SPIN_NS, SPIN_NS)}.get(cores, (SPIN_NS, MOST_SPIN_NS))
