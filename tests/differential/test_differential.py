"""The differential test itself: what it finds, and what it ignores."""

import os
import random
import sys

import pytest

pytest.importorskip("torch")
if sys.platform != "linux":
    pytest.skip("a loader is observed in a forked process, and forks", allow_module_level=True)

import observe
from case import DEFAULTS, Case, generate, settle_for_threads
from mutants import MUTANTS
from run_differential import DEFAULT, IN_THREADS, OWN, cases, compare
from torch.utils.data import DataLoader


class Hanging(DataLoader):
    def __iter__(self):
        while True:
            pass


class Crashing(DataLoader):
    def __iter__(self):
        os.abort()


# -- what is found


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name):
    assert compare(Case(MUTANTS[name]), OWN, f"mutants:{name}") is not None


SEEDED = [cases(1, number, methods=False) for number in range(4)]


# The last case has addresses in the text of an error.
@pytest.mark.parametrize("case", [*SEEDED, Case(dataset="stream", sampler="own")], ids=range(5))
def test_torch_is_as_torch(case):
    assert compare(case, OWN, OWN) is None


@pytest.mark.parametrize("number", range(40))
def test_ours_is_as_torch(number):
    assert compare(cases(2, number, methods=False), OWN, DEFAULT) is None


@pytest.mark.parametrize("number", range(12))
def test_threads_are_as_torch(number):
    case = settle_for_threads(cases(3, number, methods=False))
    assert compare(case, OWN, IN_THREADS) is None


@pytest.mark.parametrize("name", ["Hanging", "Crashing"])
def test_hang_and_crash_are_differences(name, monkeypatch):
    monkeypatch.setattr(observe, "SECONDS", 2)
    [events] = observe.observe(Case(), f"test_differential:{name}")
    assert events[0][0] == "hang or crash"
    assert name == "Crashing" or "__iter__" in events[0][2]


@pytest.mark.parametrize(
    "case",
    [
        {"steps": ["resume 1"]},
        {"num_workers": 1, "context": True, "steps": ["resume 1"]},
        {"num_workers": 2, "sampler": "own", "stateful": True, "steps": ["resume 3"]},
    ],
)
@pytest.mark.parametrize("path", ["mutants:Resuming", DEFAULT])
def test_a_state_that_is_right_is_no_difference(case, path):
    assert compare(Case(case), OWN, path) is None


# -- what is the same


def test_error_text_of_torch_is_that_of_a_note():
    torchs = ValueError(
        "Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call "
        'last):\n  File "x.py", line 3, in f\nValueError: no such sample\nmore'
    )
    same = ValueError("no such sample\nmore")
    same.__notes__ = ["Caught ValueError in DataLoader worker process 1."]
    assert observe.failure(torchs) == observe.failure(same)
    assert observe.failure(torchs) != observe.failure(ValueError("no such sample"))
    same.__notes__ = ["Caught ValueError in DataLoader worker process 0."]
    assert observe.failure(torchs) != observe.failure(same)


def test_unequal_sizes_have_two_texts():
    texts = ["stack expects each tensor to be equal size, but got [2]", "Trying to resize storage"]
    texts[1] += " that is not resizable"
    stacked, resized = (observe.failure(RuntimeError(text)) for text in texts)
    assert stacked == resized != observe.failure(RuntimeError("stack expects something else"))


def test_name_of_the_iterator_is_free():
    one, other, none = (
        observe.failure(NotImplementedError("{} cannot be pickled", name))
        for name in ("_AIter", "BIterator", "B")
    )
    assert one == other != none


def test_batches_out_of_order_are_sorted():
    events = [["iter"], ["batch 0", "a"], ["batch 1", "b"], ["after"]]
    other = [["iter"], ["batch 0", "b"], ["batch 1", "a"], ["after"]]
    assert observe.difference(Case(num_workers=2, in_order=False), events, other) is None
    assert observe.difference(Case(num_workers=2), events, other) is not None
    more = Case(num_workers=1, in_order=False, steps=["num_workers 2", "epoch"])
    assert observe.difference(more, events, other) is None
    other[1][1] = "c"
    assert observe.difference(Case(num_workers=2, in_order=False), events, other) is not None


def test_batch_that_torch_loses_may_be_given():
    case = Case(num_workers=1, sampler="own", error={"where": "sampler", "at": 5, "type": "empty"})
    lost = [["batch 0", "a"], ["batch 1: error", "E"], ["batch 2", "c"]]
    given = [["batch 0", "a"], ["batch 1", "b"], ["batch 2: error", "E"], ["batch 3", "c"]]
    assert observe.difference(case, lost, given) is None
    assert observe.difference(case, given, lost) is not None
    assert observe.difference(case, lost, [given[3], *given[:3]]) is not None
    assert observe.difference(case, lost, [*given[:2], given[3]]) is not None


# -- cases


def test_every_option_is_made():
    made = [generate(random.Random(number)) for number in range(2000)]
    named = {name for case in made for name in case}
    # See `settle_for_threads`.
    assert named == set(DEFAULTS) - {"kinds"}
