"""Epochs as frameworks ask for them: each protocol as it was recorded, played to a manager.

No framework is needed here. What was recorded: `iter` that is thrown away, `set_epoch` before or
after the `iter` that it is meant for, no look at StopIteration, no call at the end.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from indexers import Indices1
from interrupting import interrupted
from kinds import INLINE, QUICK, QUICKEST, THREAD, Kind, by_name

import cseq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np


N, BATCH = 22, 4
STEPS = 6  # batches of an epoch
EPOCHS = 3

# Epochs are counted in the trainer: how its processes are started is nothing to that.
every_kind = pytest.mark.parametrize("kind", QUICK, ids=by_name)

Seen = list[tuple[int, list[int]]]  # (the framework's epoch, indices of a batch)


def make(kind: Kind, **options: Any) -> Any:
    """Make a manager of 22 samples in 6 batches."""
    return kind.make(Indices1, N, batch_size=BATCH, **options)


def epoch_batches(epoch: int) -> list[list[int]]:
    """Cut the order of an epoch into batches."""
    order = cseq.permutation(N, 42, epoch).tolist()
    return [order[k : k + BATCH] for k in range(0, N, BATCH)]


def uninterrupted(first: int = 0, epochs: int = EPOCHS) -> Seen:
    """Give what a run over some epochs has to see."""
    return [(e, b) for e in range(first, epochs) for b in epoch_batches(e)]


def take(batches: Iterator[Any], count: int) -> list[list[int]]:
    """Take some batches, and do not look for the end."""
    return [batch.tolist() for batch in islice(batches, count)]


class Lightning:
    """`fit` of Lightning 2.6; a checkpoint holds the loader's state in mid-epoch alone."""

    def __init__(self, manager: Any, val: Any = None) -> None:
        self.manager = manager
        self.val = val
        self.seen: Seen = []
        self.checked: list[list[list[int]]] = []  # batches of each validation

    def fit(self, *, epochs: int = EPOCHS, stop: int | None = None, resume: Any = None) -> Any:
        """Train, from a checkpoint on if there is one; stop after some steps, with a checkpoint."""
        manager, steps = self.manager, 0
        first, done, state = resume or (0, 0, None)
        self.validate(first, limit=2)
        iter(manager)  # a probe
        len(manager)
        if state is not None:
            manager.load_state_dict(state)
        for epoch in range(first, epochs):
            if epoch > first:
                manager.sampler.set_epoch(epoch)
            batches = iter(manager)
            len(manager)
            if epoch == first:
                manager.sampler.set_epoch(epoch)  # after the iter() that it is meant for
            for step in range(done, len(manager)):
                self.seen.append((epoch, next(batches).tolist()))
                steps += 1
                if steps == stop:
                    if step + 1 < len(manager):
                        return epoch, step + 1, self.saved()
                    return epoch + 1, 0, None
            done = 0
            self.validate(epoch)
        return None

    def saved(self) -> Any:
        """Give the loader's state as a checkpoint holds it."""
        return json.loads(json.dumps(self.manager.state_dict()))

    def validate(self, epoch: int, limit: int | None = None) -> None:
        """Validate; the sanity check takes two batches and leaves."""
        if self.val is None:
            return
        iter(self.val)  # a probe
        self.val.sampler.set_epoch(epoch)
        self.checked.append(take(iter(self.val), limit or len(self.val)))


class Loop:
    """A loop that keeps and loads our state, with what it asks of a loader at an epoch's begin."""

    sets_epoch = is_asked_twice = sees_the_end = False

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.seen: Seen = []

    def fit(self, *, epochs: int = EPOCHS, stop: int | None = None, resume: Any = None) -> Any:
        """Train, from a checkpoint if there is one; stop after some steps, with a checkpoint."""
        manager, steps = self.manager, 0
        first, done, state = resume or (0, 0, None)
        if state is not None:
            manager.load_state_dict(state)
        for epoch in range(first, epochs):
            if self.sets_epoch:
                manager.set_epoch(epoch)
            batches = iter(manager)
            if self.is_asked_twice and epoch > first:
                batches = iter(manager)
            for step in range(done, len(manager)):
                self.seen.append((epoch, next(batches).tolist()))
                steps += 1
                if steps == stop:
                    state = json.loads(json.dumps(manager.state_dict()))
                    return (epoch, step + 1, state) if step + 1 < STEPS else (epoch + 1, 0, state)
            done = 0
            if self.sees_the_end:
                with pytest.raises(StopIteration):
                    next(batches)
        return None


class Trainer(Loop):
    """`train` of HF Trainer 5, with a callback that keeps and loads our state."""

    sets_epoch = True


class Keras(Loop):
    """`fit` of Keras with an adapter: an iterator twice an epoch, from the second epoch on."""

    sets_epoch = is_asked_twice = True


class KerasAlone(Loop):
    """With the adapter that has no `on_epoch_begin`."""

    is_asked_twice = True


class Ignite(Loop):
    """Leaves an iterator at its last batch, as accelerate, Ignite and Composer do."""


class Fastai(Loop):
    """Sees each iterator's end, as fastai and skorch do."""

    sees_the_end = True


FRAMEWORKS: list[Callable[[Any], Any]] = [Lightning, Trainer, Keras, KerasAlone, Ignite, Fastai]
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


@every_kind
@every_framework
def test_epochs_are_ours(kind: Kind, framework: Callable[[Any], Any]) -> None:
    """The framework's epoch e gets the batches of our epoch e, each once."""
    with kind.begin(make(kind)) as manager:
        run = framework(manager)
        assert run.fit() is None
        assert manager.epoch == EPOCHS - 1
        assert (manager.state_dict()["epoch"], manager.state_dict()["consumed"]) == (EPOCHS, 0)
    assert run.seen == uninterrupted()


STOPS = [1, STEPS - 1, STEPS, STEPS + 2]
# All of it in this process; with workers, all pairs of a kind, a framework and a stop.
RESUMES = [(INLINE, framework, stop) for framework in FRAMEWORKS for stop in STOPS]
RESUMES += [
    (kind, framework, STOPS[(k + f) % len(STOPS)])
    for k, kind in enumerate([THREAD, QUICKEST])
    for f, framework in enumerate(FRAMEWORKS)
]


@pytest.mark.parametrize(
    ("kind", "framework", "stop"),
    [pytest.param(*one, id=f"{one[0].name}-{one[1].__name__}-{one[2]}") for one in RESUMES],
)
def test_resume(kind: Kind, framework: Callable[[Any], Any], stop: int) -> None:
    """A run broken off in mid-epoch or at an epoch's end goes on with what it had still to see."""
    with kind.begin(make(kind)) as manager:
        broken = framework(manager)
        checkpoint = broken.fit(stop=stop)
    with kind.begin(make(kind)) as manager:
        resumed = framework(manager)
        resumed.fit(resume=checkpoint)
    assert broken.seen + resumed.seen == uninterrupted()


@every_kind
def test_resume_in_the_same_process(kind: Kind) -> None:
    """`fit` again with the loader that broke off: the state loaded counts, not where it stood."""
    with kind.begin(make(kind)) as manager:
        broken = Lightning(manager)
        checkpoint = broken.fit(stop=STEPS + 2)
        take(iter(manager), 3)  # what ran on after the checkpoint
        again = Lightning(manager)
        again.fit(resume=checkpoint)
    assert broken.seen + again.seen == uninterrupted()


@every_kind
def test_validation_sees_everything(kind: Kind) -> None:
    """The sanity check's two batches are not missing in the validation of the same epoch."""
    with kind.begin(make(kind)) as manager, kind.begin(make(kind)) as val:
        run = Lightning(manager, val)
        run.fit(epochs=2)
    assert [len(batches) for batches in run.checked] == [2, STEPS, STEPS]
    assert run.checked[1:] == [epoch_batches(0), epoch_batches(1)]


@every_kind
def test_epoch_length_of_its_own(kind: Kind) -> None:
    """Ignite's `epoch_length=4` of 6: one iterator goes on, and a new one follows its end."""
    got = []
    with kind.begin(make(kind)) as manager:
        batches = iter(manager)
        while len(got) < 3 * STEPS:
            try:
                got.append(next(batches).tolist())
            except StopIteration:
                batches = iter(manager)
    assert got == [b for _, b in uninterrupted()]


# -- the rules behind them


@every_kind
def test_an_iterator_that_is_thrown_away(kind: Kind) -> None:
    """It costs no epoch, and `state_dict` is what it was; so it is before a first batch."""
    with kind.begin(make(kind)) as manager:
        before = manager.state_dict()
        for _ in range(3):
            batches = iter(manager)
            assert (manager.epoch, manager.state_dict()) == (0, before)
        assert take(batches, STEPS) == epoch_batches(0)
        iter(manager)
        assert (manager.epoch, manager.state_dict()["consumed"]) == (1, 0)
        assert manager.state_dict()["epoch"] == 1
        assert take(iter(manager), 2) == epoch_batches(1)[:2]
        assert manager.state_dict()["consumed"] == 2 * BATCH
    iter(kind.begin(manager))
    manager.finish()
    with kind.begin(manager):  # neither does one that ended with its pool
        assert manager.epoch == 2
        assert take(iter(manager), 1) == epoch_batches(2)[:1]


@pytest.mark.parametrize("kind", [THREAD, QUICKEST], ids=by_name)
def test_a_second_iterator_goes_on_with_the_work(kind: Kind) -> None:
    """What the workers have made for an iterator that was thrown away is not made again."""
    with kind.begin(make(kind, buffer=2)) as manager:
        batches = iter(manager)
        ring = manager._run.pool.feed
        tickets = ring.ticket
        for _ in range(5):
            old, batches = batches, iter(manager)
            with pytest.raises(InterruptedError):
                next(old)
        manager.set_epoch(0)
        assert ring.ticket == tickets  # none was posted again
        assert take(batches, STEPS) == epoch_batches(0)


@every_kind
def test_set_epoch_after_iter(kind: Kind) -> None:
    """An iterator that has given nothing takes another epoch over, also back and forth."""
    with kind.begin(make(kind)) as manager:
        batches = iter(manager)
        for epoch in (7, 0, 3):
            manager.set_epoch(epoch)
            assert manager.epoch == epoch
        assert take(batches, STEPS) == epoch_batches(3)
        assert manager.state_dict()["epoch"] == 4
        batches = iter(manager)
        assert take(batches, 1) == epoch_batches(4)[:1]
        manager.set_epoch(9)  # too late for this one
        assert take(batches, 1) == epoch_batches(4)[1:2]
        assert take(iter(manager), 1) == epoch_batches(9)[:1]


@every_kind
def test_set_epoch_of_a_loaded_epoch_keeps_the_place(kind: Kind) -> None:
    """Before and after the `iter`; another epoch begins at its beginning."""
    manager = make(kind)
    state = manager.state_dict() | {"epoch": 5, "consumed": 2 * BATCH}
    with kind.begin(manager):
        manager.load_state_dict(state)
        manager.set_epoch(5)
        batches = iter(manager)
        manager.set_epoch(5)
        assert manager.state_dict() == state
        assert take(batches, STEPS) == epoch_batches(5)[2:]
        manager.load_state_dict(state)
        manager.set_epoch(6)
        assert take(iter(manager), 1) == epoch_batches(6)[:1]
        manager.load_state_dict(state | {"consumed": 0})  # the epoch from its start
        assert take(iter(manager), 1) == epoch_batches(5)[:1]


@every_kind
def test_set_epoch_of_the_epoch_under_way(kind: Kind) -> None:
    """The loop and its state stay where they are; the next `iter` begins the epoch again."""
    with kind.begin(make(kind)) as manager:
        batches = iter(manager)
        got = take(batches, 2)
        state = manager.state_dict()
        manager.set_epoch(0)
        assert manager.state_dict() == state
        got += take(batches, 1)
        assert manager.state_dict()["consumed"] == 3 * BATCH
        assert got == epoch_batches(0)[:3]
        batches = iter(manager)
        assert take(batches, 1) == epoch_batches(0)[:1]
        manager.set_epoch(0)
        take(batches, STEPS)
        assert take(iter(manager), 1) == epoch_batches(1)[:1]  # 0 was over by then
        manager.set_epoch(1)
        take(iter(manager), STEPS)
        manager.set_epoch(1)  # of an epoch that is over: again
        assert (manager.state_dict()["epoch"], manager.state_dict()["consumed"]) == (1, 0)
        assert take(iter(manager), STEPS) == epoch_batches(1)


@every_kind
def test_the_sampler(kind: Kind) -> None:
    """`sampler` has torch's two methods: `set_epoch`, and this rank's samples as its length."""
    lengths = [len(make(kind, shard=(rank, 4)).sampler) for rank in range(4)]
    assert lengths == [6, 6, 6, 6]  # 16 in a global batch, and 6 in parts of 2
    assert len(make(kind, shard=(1, 4), drop_last=True).sampler) == 4
    with kind.begin(make(kind)) as manager:
        manager.sampler.set_epoch(2)
        assert (len(manager.sampler), manager.epoch) == (N, 2)
        batches = iter(manager)
        manager.sampler.set_epoch(4)
        assert take(batches, 1) == epoch_batches(4)[:1]
        with pytest.raises(TypeError, match="epoch"):
            manager.sampler.set_epoch("4")


class BrokenFirst:
    """Fails on sample 0."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if 0 in indices:
            raise OSError("unreadable")
        return indices


@every_kind
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_exception_begins_an_epoch(kind: Kind, on_error: str) -> None:
    """A first batch that raises, or is skipped, is not tried for ever."""
    manager = kind.make(BrokenFirst, 4, batch_size=4, shuffle=False, on_error=on_error)
    with kind.begin(manager):
        for epoch in range(3):
            if on_error == "raise":
                with pytest.raises(OSError, match="unreadable"):
                    next(iter(manager))
                assert manager.state_dict()["consumed"] == 0
                assert manager.state_dict()["epoch"] == epoch
            else:
                assert list(manager) == []
            assert manager.epoch == epoch


@every_kind
def test_an_epoch_without_batches(kind: Kind) -> None:
    """It is over when the loop has seen its end."""
    with kind.begin(kind.make(Indices1, 3, batch_size=4, drop_last=True)) as manager:
        for epoch in range(3):
            iter(manager)
            assert list(manager) == []
            assert manager.epoch == epoch


@every_kind
def test_interrupted_set_epoch(kind: Kind) -> None:
    """Ctrl-C anywhere in `set_epoch`: the iterator gives the one epoch, or the other, or raises."""
    ends = set()
    for countdown in range(1, 200, 7 if kind.processes else 1):
        with kind.begin(make(kind)) as manager:
            batches = iter(manager)
            with interrupted(
                countdown, "sequence.py", "order/place.py", "pools/base.py", "order/sampler.py"
            ) as struck:
                manager.set_epoch(3)
            epoch = manager.epoch
            assert epoch in {0, 3}
            try:
                assert take(batches, STEPS) == epoch_batches(epoch)
                assert manager.state_dict()["epoch"] == epoch + 1
                ends.add("whole")
            except InterruptedError:
                assert take(manager, STEPS) == epoch_batches(epoch)
                ends.add("interrupted")
        if not struck.is_set():
            break
    assert countdown > 5
    assert "whole" in ends
