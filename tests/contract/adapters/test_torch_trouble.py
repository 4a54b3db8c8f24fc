"""Ctrl-C, deaths and time limits in a `cseq.DataLoader`."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from interrupting import first_hits, interrupted  # noqa: E402
from killing import kill  # noqa: E402
from torch_data import (  # noqa: E402
    Augmented,
    Plain,
    Sharded,
    drawn,
    same,
    seed_all,
    without_told,
)
from torch_loaders import FORK, Failing, Told, forked, loader, run  # noqa: E402

import cseq.testing  # noqa: E402
from cseq.adapters.torch import LoaderTimeout, names  # noqa: E402

pytestmark = [
    pytest.mark.needs("quick processes"),
    # torch warns of this on machines with few processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Unsent(Plain):
    def __getitem__(self, index):
        return Refusing() if index == 1 else index


class Refusing:
    def __reduce__(self):
        raise LookupError("two is missing")


INTERRUPTED: dict[str, dict[str, Any]] = {
    "map": {},
    "profiled": {},
    "seeded": {"rng": "batch"},
    "skipping": {"on_error": "skip"},
    "unsent": {"dataset": Unsent(5)},
    "iterable": {"dataset": Failing(5, 2, 3)},
}


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 2) for kind in INTERRUPTED),
        ("map", 0),
        ("profiled", 0),
        ("seeded", 0),
        ("skipping", 0),
        ("iterable", 0),
    ],
)
def test_a_state_after_ctrl_c_is_right(kind, num_workers, monkeypatch):
    """Wherever a signal handler raises in `next`, a resume has what the loop did not get."""
    if kind == "profiled":
        monkeypatch.setattr(names, "profiler_enabled", lambda: True)
    options = {"dataset": Missing(5), **INTERRUPTED[kind]}
    if num_workers:
        options |= FORK
    made = cseq.DataLoader(batch_size=None, **options)
    files = "adapters/torch/iterator.py", "adapters/torch/worker.py"
    expected = everything(iter(made))

    def step(countdown):
        iterator = iter(made)
        got = [take(iterator) for _ in range(countdown % 4)]
        seed_all()
        with interrupted(countdown // 4 + 1, *files) as struck:
            got.append(take(iterator))
        own = drawn()
        seed_all()
        assert own == drawn()
        made.load_state_dict(made.state_dict())
        got += everything(iter(made))
        assert [each for each in got if each != "end"] == expected
        return struck.is_set()

    assert first_hits(step, 7 if num_workers else 1) > 3


class Pressing(Plain):
    """Ctrl-C comes once, in the middle of its sample 4."""

    pressed = False

    def __getitem__(self, index):
        if index == 4 and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return index


def test_ctrl_c_in_a_data_set_without_workers():
    """A resume makes the batch; the iterator has lost it, as torch's does."""
    made = cseq.DataLoader(Pressing(8), batch_size=2)
    iterator = iter(made)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = made.state_dict()
    assert state["_num_yielded"] == 2
    assert [batch.tolist() for batch in iterator] == [[6, 7]]
    made.load_state_dict(state)
    assert [batch.tolist() for batch in made] == [[4, 5], [6, 7]]


class Missing(Plain):
    def __getitem__(self, index):
        if index == 1:
            raise LookupError("two is missing")
        return index


def take(iterator):
    """Take a batch, or the exception raised instead."""
    try:
        return next(iterator, "end")
    except (LookupError, TypeError) as error:
        return "two is missing" if "two is missing" in str(error) else repr(error)


def everything(iterator):
    """Take all that remains."""
    return list(iter(lambda: take(iterator), "end"))


class Stuck(Plain):
    def __init__(self, path):
        super().__init__(3)
        self.path = path

    def __getitem__(self, index):
        while not self.path.exists():
            a_place_to_be_found()
        return index


def a_place_to_be_found():
    """Appear by name in the stack."""
    time.sleep(0.05)


# At this time, a worker that imports torch is not yet in the data set.
@forked
def test_a_timeout_shows_where_the_worker_is(tmp_path):
    path = tmp_path / "gate"
    iterator = iter(loader(Stuck(path), batch_size=None, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds") as late:
        next(iterator)
    assert isinstance(late.value, TimeoutError)
    assert isinstance(late.value, LoaderTimeout)
    assert "a_place_to_be_found" in str(late.value)
    path.touch()
    assert next(iterator) == 0
    assert list(iterator) == [1, 2]


class Deadly(Plain):
    def __getitem__(self, index):
        if index == 1:
            kill(os.getpid())
        return index


def test_a_batch_that_kills_again_and_again_is_an_error():
    iterator = iter(loader(Deadly(4), batch_size=None))
    assert next(iterator) == 0
    told = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
    with pytest.raises(cseq.WorkerDied, match=told) as caught:
        next(iterator)
    died = caught.value
    assert str(died).count(": worker 1 ") == 1
    assert died.indices == [1]
    assert list(iterator) == []


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_death_names_the_key(batch_size):
    """With a generator for each batch, the number of the batch is no key."""
    iterator = iter(loader(Deadly(4), batch_size=batch_size, rng="batch", num_workers=1))
    next(iterator)
    named = r"\(1\)" if batch_size is None else r"\(\[1\]\)"
    with pytest.raises(cseq.WorkerDied, match=f"batch 1 {named} of worker 0, epoch 0") as caught:
        next(iterator)
    assert caught.value.indices == [1]


def test_who_makes_the_batches_behind_a_resume():
    """Worker k mod N makes batch k, of the resumed epoch and of the next one."""
    options = {"batch_size": None, "persistent_workers": True}
    made = loader(Told(8), num_workers=3, **options)
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    assert taken + list(iterator) == [0, 1, 2, 0, 1, 2, 0, 1]
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    again = loader(Told(8), num_workers=3, **options)
    again.load_state_dict(made.state_dict())
    assert list(again) == [1, 2, 0, 1]
    assert list(again) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_death_behind_a_resume_names_the_worker():
    made = loader(Told(8), num_workers=3, batch_size=None)
    iterator = iter(made)
    taken = [next(iterator) for _ in range(4)]
    assert taken == [0, 1, 2, 0]
    again = loader(Told(8, deadly=5), num_workers=3, batch_size=None)
    again.load_state_dict(made.state_dict())
    iterator = iter(again)
    assert next(iterator) == 1
    pid = iterator._workers[2].pid
    with pytest.raises(cseq.WorkerDied, match="worker 2") as caught:
        next(iterator)
    assert (caught.value.worker, caught.value.batch) == (2, 1)
    assert pid


def test_death_in_an_iterable_data_set():
    made = loader(Sharded(60, 60), batch_size=2)
    seed_all()
    expected = list(made)
    seed_all()
    iterator = iter(made)
    taken = [next(iterator) for _ in range(3)]
    kill(iterator._workers[0].pid)
    taken += iterator
    assert same(taken, expected)


# ── generators seeded for each batch ───────────────────────────────────────────────────────


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_same_for_any_number_of_workers(persistent):
    options = {"batch_size": 3, "shuffle": True, "rng": "batch"}
    expected, after = run(cseq.DataLoader, Augmented(13), 2, options)
    expected = [without_told(epoch) for epoch in expected]
    assert not same(*expected)
    for num_workers in (1, 2, 5):
        forked = FORK | {"num_workers": num_workers, "persistent_workers": persistent}
        batches, drawn_after = run(cseq.DataLoader, Augmented(13), 2, options | forked)
        assert same([without_told(epoch) for epoch in batches], expected)
        assert drawn_after == after
