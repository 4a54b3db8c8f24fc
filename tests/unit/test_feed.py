"""The trainer's side of a ring: tickets in, batches out, whatever comes between."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupting import interrupted

from cseq._core import Ring, now_ns, ring_bytes
from cseq._feed import FeedIterator
from cseq._memory import Block
from cseq._work import Runner
from cseq.encoding.transport import Objects
from cseq.order.place import Place
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential
from cseq.pools.base import BatchPool, wake_at
from cseq.stage import INDEXER

if TYPE_CHECKING:
    from collections.abc import Callable


class Broken(Exception):
    """What an indexer raises here."""


class Working(BatchPool):
    """The pool of a `Stage`."""

    def __init__(self, stage: Stage, job: Any, convert: Callable[[Any], Any]) -> None:
        super().__init__(job, stage.ring, stage.edge, convert=convert)
        self.stage = stage

    def _check(self, awaited: Any) -> None:
        self.stage.check()


class Stage:
    """A pool with runners that work whenever the feed is about to sleep, in the feed's thread."""

    def __init__(
        self,
        samples: int = 10,
        batch_size: int = 2,
        buffer: int = 3,
        runners: int = 2,
        ordered: bool = True,
        skip_errors: bool = False,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        memory = Block(ring_bytes(buffer, batch_size, runners), zero=True)
        self.ring = Ring(memory, buffer, batch_size, runners)
        self.edge = Objects(buffer)
        self.runners = [Runner(self.ring, INDEXER, k + 1, last=True) for k in range(runners)]
        self.raising: set[int] = set()
        self.act: Callable[[], None] = self.work
        self.checks = 0
        self.to_interrupt = False
        sampler = Sampler(samples, Sequential(), batch_size=batch_size, seed=0, drop_last=False)
        on_error = "skip" if skip_errors else "raise"
        job: Any = SimpleNamespace(
            sampler=sampler, room=batch_size, ordered=ordered, on_error=on_error, options=None
        )
        self.pool = Working(self, job, convert or self.convert)
        self.feed = self.pool.feed

    def check(self) -> None:
        """Be called before every sleep."""
        self.checks += 1
        self.act()

    def claim(self, runner: int = 0) -> Runner:
        """Claim a ticket."""
        runner = self.runners[runner]
        assert runner.claim() is True
        return runner

    def finish(self, runner: Runner) -> None:
        """Publish the batch of a ticket, its indices, or an exception."""
        batch = runner.indices()
        if self.raising & set(batch.tolist()):
            self.edge.fail(runner, Broken(batch.tolist()))
        else:
            self.edge.publish(runner, self.edge.write(runner, batch))

    def work(self) -> None:
        """Do one ticket, if there is one."""
        if self.ring.depths()[0]:
            self.finish(self.claim())

    def next(self) -> Any:
        """Take the next batch."""
        return next(FeedIterator(self.feed, self.generation))

    def begin(self, epoch: int, consumed: int = 0) -> None:
        """Begin an epoch."""
        self.generation = self.feed.run.interrupt()
        self.pool.begin(Place(epoch, consumed), epoch, consumed, self.generation)

    def interrupt(self) -> None:
        """End the epoch."""
        self.feed.run.interrupt()
        self.pool.notify_all()

    def interrupt_next(self) -> None:
        """Let Ctrl-C come while the next batch is decoded."""
        self.to_interrupt = True
        with pytest.raises(KeyboardInterrupt):
            self.next()
        assert not self.to_interrupt

    def convert(self, batch: Any) -> Any:
        """Be the last part of decoding a batch."""
        if self.to_interrupt:
            self.to_interrupt = False
            raise KeyboardInterrupt
        return batch

    def drain(self) -> list[list[int]]:
        """Take all batches that are left."""
        batches = []
        while True:
            try:
                batches.append(self.next().tolist())
            except StopIteration:
                return batches


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("buffer", "workers", "tickets"), [(10, 4, 5), (10, 8, 2), (1, 1, 1), (2, 8, 1), (100, 1, 50)]
)
def test_wake_at(buffer: int, workers: int, tickets: int) -> None:
    """Workers are woken for several tickets at once, while enough batches are ready."""
    assert wake_at(buffer, workers) == tickets


def test_an_epoch() -> None:
    """All batches come out once, in order, then StopIteration, again and again."""
    stage = Stage()
    stage.begin(0)
    assert stage.drain() == PAIRS
    for _ in range(2):
        with pytest.raises(StopIteration):
            stage.next()
    stage.begin(1)
    assert stage.drain() == PAIRS


def test_never_more_than_the_buffer() -> None:
    """No more tickets are posted than there are cells; each batch taken makes room for one."""
    stage = Stage(samples=20, buffer=3)
    stage.begin(0)
    assert stage.ring.depths() == (3, 0, 0)
    for taken in range(1, 11):
        stage.next()
        assert sum(stage.ring.depths()) == min(3, 10 - taken)
        assert stage.pool.feed.position == 2 * taken


def test_unordered() -> None:
    """Unordered, the batch that is finished first comes first."""
    stage = Stage(ordered=False)
    stage.begin(0)
    slow = stage.claim(1)

    def late() -> None:
        if stage.ring.depths()[0]:
            stage.work()
        elif slow.cell >= 0:
            stage.finish(slow)

    stage.act = late
    assert stage.drain() == [*PAIRS[1:], PAIRS[0]]


def test_a_new_epoch_gives_up_the_old_one() -> None:
    """Tickets posted, in work and finished are given up; their cells are used again."""
    stage = Stage(samples=40, buffer=3)
    stage.begin(0)
    working = stage.claim(1)
    stage.work()
    stage.begin(1)
    assert stage.feed.abandoned_count == 1
    stage.finish(working)  # for nobody
    assert stage.drain() == [[2 * k, 2 * k + 1] for k in range(20)]
    assert stage.feed.abandoned_count == 0


def test_all_cells_in_work_for_an_old_epoch() -> None:
    """If every cell is in work for an old epoch, the new one begins when the first is free."""
    stage = Stage(buffer=2)
    stage.begin(0)
    old = [stage.claim(0), stage.claim(1)]
    stage.begin(1)
    assert stage.ring.depths() == (0, 0, 0)

    def act() -> None:
        if old:
            stage.finish(old.pop())
        else:
            stage.work()

    stage.act = act
    assert stage.drain() == PAIRS


def test_numbers_on_a_ticket() -> None:
    """A ticket carries the epoch, the batch's number and its place, also after a resume."""
    stage = Stage()
    stage.begin(7, consumed=4)
    runner = stage.claim()
    assert (runner.epoch, runner.batch, runner.start) == (7, 2, 4)
    assert runner.indices().tolist() == [4, 5]
    stage.finish(runner)
    assert stage.drain() == PAIRS[2:]
    assert stage.pool.feed.position == 10


def test_an_exception() -> None:
    """What an indexer raised is raised at its batch; the next call goes on behind it."""
    stage = Stage()
    stage.raising = {5}
    stage.begin(0)
    assert [stage.next().tolist() for _ in range(2)] == PAIRS[:2]
    with pytest.raises(Broken) as caught:
        stage.next()
    assert caught.value.args == ([4, 5],)
    assert getattr(caught.value, "__notes__", ["epoch 0, batch 2, indices [4, 5]"])[0].endswith(
        "epoch 0, batch 2, indices [4, 5]"
    )
    assert stage.pool.feed.position == 4
    assert stage.drain() == PAIRS[3:]
    assert (stage.pool.feed.position, stage.pool.skipped) == (10, [])


def test_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Errors that are to be skipped are logged and noted down, at the beginning and end, too."""
    stage = Stage(skip_errors=True)
    stage.raising = {0, 4, 9}
    stage.begin(3)
    assert stage.drain() == [PAIRS[1], PAIRS[3]]
    assert [(epoch, batch) for epoch, batch, *_ in stage.pool.skipped] == [(3, 0), (3, 2), (3, 4)]
    assert "Broken: [4, 5]" in stage.pool.skipped[1].error
    assert [r.levelno for r in caplog.records] == [logging.ERROR] * 3
    assert "epoch 3, batch 2, indices [4, 5]" in caplog.text
    assert stage.pool.feed.position == 10


def test_what_is_not_skipped() -> None:
    """What is not an Exception, as outcomes of test frameworks, is raised in any case."""

    class Outcome(BaseException):
        pass

    stage = Stage(skip_errors=True)
    stage.begin(0)
    runner = stage.claim()
    stage.edge.fail(runner, Outcome())
    with pytest.raises(Outcome):
        stage.next()
    assert stage.drain() == PAIRS[1:]


def test_a_check_that_raises() -> None:
    """What goes wrong elsewhere is raised, every time; what is ready comes out before it."""
    stage = Stage()
    stage.begin(0)
    stage.work()

    def act() -> None:
        raise Broken

    stage.act = act
    assert stage.next().tolist() == PAIRS[0]
    for _ in range(2):
        with pytest.raises(Broken):
            stage.next()
    stage.act = stage.work
    assert stage.drain() == PAIRS[1:]


def test_interrupted() -> None:
    """An interrupted wait raises InterruptedError, until the next epoch begins."""
    stage = Stage()
    stage.begin(0)
    stage.act = stage.interrupt
    for _ in range(2):
        with pytest.raises(InterruptedError):
            while True:
                stage.next()
    stage.act = stage.work
    with pytest.raises(InterruptedError):
        stage.next()
    stage.begin(1)
    assert stage.drain() == PAIRS


def test_an_exception_on_the_way_out_loses_nothing() -> None:
    """A batch whose taking out is interrupted (by Ctrl-C, say) comes out with the next call."""
    stage = Stage()
    stage.begin(0)
    stage.interrupt_next()
    assert stage.drain() == PAIRS
    stage.begin(1)
    stage.interrupt_next()
    stage.begin(2)  # or it is given up with its epoch
    assert stage.drain() == PAIRS


def test_an_exception_on_the_way_out_unordered() -> None:
    """Without an order, too, the batch stays in the ring, and comes out with a later call."""
    stage = Stage(ordered=False)
    stage.begin(0)
    for _ in range(3):
        stage.interrupt_next()
    assert sorted(stage.drain()) == PAIRS


def test_in_work() -> None:
    """Who works on the awaited batch, since when, and which it is; unordered: on any batch."""
    for ordered, owners in ((True, [2]), (False, [2, 1])):
        stage = Stage(ordered=ordered)
        stage.begin(4)
        assert stage.pool.in_work() == []
        before = now_ns()
        runners = [stage.claim(1), stage.claim(0)]
        found = stage.pool.in_work()
        assert [owner for owner, _, _ in found] == owners
        assert found[0][2] == "epoch 4, batch 0, indices [0, 1]"
        assert all(before <= since <= now_ns() for _, since, _ in found)
        for runner in runners:
            stage.finish(runner)
        assert stage.pool.in_work() == []


def test_stats() -> None:
    """Batches, samples and skips are counted over all epochs."""
    stage = Stage(samples=9, skip_errors=True)
    stage.raising = {2}
    for epoch in range(2):
        stage.begin(epoch)
        stage.drain()
    stats = stage.pool.stats()
    assert stats.skips == 2
    assert stats.depths == (0, 0, 0)


@given(
    st.integers(1, 30), st.integers(1, 7), st.integers(1, 6), st.booleans(),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), max_size=5),
)  # fmt: skip
def test_any_epochs(
    samples: int, size: int, buffer: int, ordered: bool, history: list[tuple[int, int]]
) -> None:
    """However often an epoch is left, with tickets in whatever state: each one is complete."""
    stage = Stage(samples, size, buffer, 3, ordered)
    want = [list(range(k, min(k + size, samples))) for k in range(0, samples, size)]
    held: list[Runner] = []

    def act() -> None:
        while stage.ring.depths()[0]:
            stage.work()
        while held:
            stage.finish(held.pop())

    stage.act = act
    for epoch, (take, hold) in enumerate(history):
        stage.begin(epoch)
        idle = [k for k in range(1, hold + 1) if stage.runners[k].cell < 0]
        held.extend(stage.claim(k) for k in idle[: stage.ring.depths()[0]])
        got = [stage.next().tolist() for _ in range(min(take, len(want)))]
        assert (got == want[: len(got)]) if ordered else all(b in want for b in got)
        assert len({b[0] for b in got}) == len(got)
    stage.begin(99)
    got = stage.drain()
    assert (got if ordered else sorted(got)) == want


def test_indices_are_in_the_ring() -> None:
    """A ticket's indices lie in its cell, where a worker that takes over finds them again."""
    stage = Stage()
    stage.begin(0)
    runner = stage.claim(1)
    runner.indices()[:] = -1
    stage.ring.repost(2)
    assert stage.claim(0).indices().tolist() == [0, 1]
    assert stage.ring.indices(runner.cell).dtype == np.int64


def strike(stage: Stage, countdown: int, got: list[Any]) -> bool:
    """Take a batch the long way, and raise in the middle; say whether there was such a place."""
    with interrupted(countdown, "pools/base.py", "order/sampler.py") as struck:
        got.append(stage.next().tolist())
    return struck.is_set()


@pytest.mark.parametrize("ordered", [True, False])
def test_ctrl_c_twice(ordered: bool) -> None:
    """A signal handler that raises at any place, and again in the next call, loses nothing."""
    hits = 0
    for first, second in itertools.product(range(1, 20), repeat=2):
        stage = Stage(samples=9, ordered=ordered)
        stage.begin(0)
        got: list[Any] = [stage.next().tolist() for _ in range(3)]  # the last one is short
        hits += strike(stage, first, got) and strike(stage, second, got)
        assert stage.pool.feed.position == min(2 * len(got), 9)
        assert got + stage.drain() == [*PAIRS[:4], [8]]
    assert hits > 3


@pytest.mark.parametrize("skip", [True, False])
def test_a_conversion_that_fails_is_made_once(skip: bool) -> None:
    """A conversion that raises is called once for its batch."""
    calls = []

    def convert(batch: Any) -> Any:
        calls.append(batch.tolist())
        if calls[-1] == [2, 3]:
            raise Broken("once")
        return batch

    stage = Stage(convert=convert, skip_errors=skip)
    stage.begin(0)
    got: list[Any] = []
    raised = 0
    while True:
        stage.work()
        try:
            got.append(stage.next().tolist())
        except Broken:
            raised += 1
        except StopIteration:
            break
    assert (got, calls) == (PAIRS[:1] + PAIRS[2:], PAIRS)
    assert raised == (not skip)
    assert len(stage.pool.skipped) == skip
