"""`cseq.tune` tries sizes, and returns a table with the best."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from kinds import QUICKEST

import cseq
from cseq.observe.tune import Trial, Tuned, best_of

OPTIONS: dict[str, Any] = {"batch_size": 4, "out_type": "null"}


def make(num_workers: int, buffer: int = 10) -> Any:
    """Make a loader."""
    return cseq.MTSequence(np.arange(400), num_workers=num_workers, buffer=buffer, **OPTIONS)


@pytest.mark.parametrize(
    "manager",
    [
        partial(cseq.MTSequence, np.arange(400), **OPTIONS),
        partial(cseq.MPSequence, np.arange(400), start_method=QUICKEST.start_method, **OPTIONS),
    ],
    ids=["threads", "processes"],
)
def test_a_row_for_each_number(manager: Any) -> None:
    """In the order they are given; nothing is left."""
    before = threading.active_count()
    tuned = cseq.tune(manager, seconds=0.4, workers=[2, 7, 1])
    assert [(row.num_workers, row.buffer) for row in tuned.table] == [(2, 10), (7, 14), (1, 10)]
    for row in tuned.table:
        assert row.samples_per_s == pytest.approx(4 * row.batches_per_s)
        assert row.batches_per_s > 0
        assert 0 <= row.waits <= 1
    assert tuned.best in tuned.table
    assert tuned.best.arguments == {
        "num_workers": tuned.best.num_workers, "buffer": tuned.best.buffer
    }  # fmt: skip
    assert threading.active_count() == before


def test_it_begins_with_one_worker_and_ends_in_time() -> None:
    """Where the loop is slow enough for that, it stays the only trial."""
    taken: list[Any] = []
    tuned = cseq.tune(make, step=taken.append, seconds=0.3)
    assert tuned.table[0].num_workers == 1
    assert len(tuned.table) <= 6
    assert all(len(batch) == 4 for batch in taken)
    assert len(taken) > 8


def test_a_loader_without_a_buffer() -> None:
    """A DataLoader has no such argument; its batches have the samples of its batch_size."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(400))

    def loader(num_workers: int) -> Any:
        method = QUICKEST.start_method
        return cseq.DataLoader(data, 8, num_workers=num_workers, multiprocessing_context=method)

    tuned = cseq.tune(loader, step=0.001, seconds=0.2, workers=[2])
    (row,) = tuned.table
    assert row.buffer is None
    assert row.arguments == {"num_workers": 2}
    assert row.samples_per_s == pytest.approx(8 * row.batches_per_s)


def test_the_best_is_the_smallest_that_is_good_enough() -> None:
    """A twentieth less than the best rate is."""

    def trial(workers: int, buffer: int | None, rate: float) -> Trial:
        return Trial(workers, buffer, rate, rate, 0.0, "loop")

    table = [
        trial(1, 10, 50),
        trial(8, 16, 100),
        trial(4, 20, 96),
        trial(4, 10, 95),
        trial(2, 9, 94),
    ]
    assert best_of(table) == table[3]
    assert best_of([trial(2, None, 1.0)]).arguments == {"num_workers": 2}
    text = str(Tuned(tuple(table), table[3]))
    assert text.splitlines()[4] == "      4      10         95         95     0%  loop"
    assert text.endswith("→ num_workers=4, buffer=10")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3,), "make=3 cannot be called"),
        ((lambda: None,), "takes no argument num_workers"),
        ((lambda num_workers: [num_workers],), r"make\(\) returned an object of list"),
        ((make, {"seconds": "9"}), "seconds='9' is not a number"),
        ((make, {"seconds": None}), "seconds=None is no number"),
        ((make, {"step": "1ms"}), "step='1ms' is not a number"),
        ((make, {"workers": [1.5]}), "workers=1.5 is not an integer"),
    ],
)
def test_wrong_types(arguments: Any, said: str) -> None:
    """The message names the argument, its value, and what to give."""
    function, options = arguments if len(arguments) == 2 else (*arguments, {})
    with pytest.raises(TypeError, match=said):
        cseq.tune(function, **options)


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": 0}, {"seconds": math.inf}, {"step": -1}, {"workers": []}, {"workers": [0]}],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    """The same."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cseq.tune(make, **wrong)


def test_an_error_of_the_loader_ends_what_was_started() -> None:
    """It is raised, and no thread is left."""

    class Fails:
        def __getitem__(self, indices: Any) -> Any:
            raise OSError("no disk")

    before = threading.active_count()
    with pytest.raises(OSError, match="no disk"):
        cseq.tune(partial(cseq.MTSequence, Fails, 8, out_type="null"), seconds=0.2)
    assert threading.active_count() == before
