"""Properties of every order: in all pools, over all ranks, from any position."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from indexers import Units
from kinds import QUICK, by_name

import cseq
from cseq.testing import check_order

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = np.array([(7 * k * k + 3) % 19 + 1 for k in range(60)])
DOCUMENTS = np.array([0, 3, 1, 20, 0, 7, 9, 2, 5, 0, 1, 12])
LABELS = np.array(list("abcde"))[np.arange(60) % 13 % 5]


class Backwards(cseq.Order):
    """A user's order: rows of two samples and of one, from the last to the first."""

    name = "backwards-v1"
    samples, units, room = 60, 40, 2

    def read(self, seed, epoch, start, count):
        """Return the rows of an epoch; each epoch begins one row later than the previous one."""
        sizes = np.arange(start, start + count) % 2 + 1
        first = np.arange(start, start + count) * 3 // 2
        rows = [range(a, a + size) for a, size in zip(first, sizes, strict=True)]
        samples = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
        return (59 - samples + seed + epoch) % 60, sizes


# Each order has 60 samples.
ORDERS: dict[str, Callable[[], cseq.Order]] = {
    "sequential": lambda: cseq.Sequential(60),
    "shuffled": lambda: cseq.Shuffled(60),
    "shuffled by a table": lambda: cseq.Shuffled(60, algorithm="fisher-yates-v1"),
    "buckets": lambda: cseq.Buckets(LENGTHS, 40, together=2),
    "longest first": lambda: cseq.Buckets(LENGTHS, 40, together=4, longest_first=True),
    "too long": lambda: cseq.Buckets(LENGTHS, 15, ratio=1.5, too_long="drop"),
    "of labels": lambda: cseq.Buckets.of(LABELS, {"a": 2, "b": 5, "c": 3, "d": 9, "e": 1}),
    "packed": lambda: cseq.Packed(LENGTHS, 30),
    "packed roughly": lambda: cseq.Packed(LENGTHS, 30, quantum=4),
    "packed pieces": lambda: cseq.Packed(DOCUMENTS, 9, too_long="split"),
    "concatenated": lambda: cseq.Concatenated(DOCUMENTS, 7),
    "groups": lambda: cseq.Groups(LABELS, 2, 3, epoch_size=13),
    "weighted": lambda: cseq.Weighted(LENGTHS, 50),
    "mixture": lambda: cseq.Mixture(
        {"a": cseq.Resized(cseq.Shuffled(40), 15), "b": cseq.Weighted([1] * 20)},
        {"a": 1, "b": 2}, block=8, stop="first",
    ),
    "replaced": lambda: cseq.Weighted(LENGTHS, 40, replacement=True),
    "mixture of batches": lambda: cseq.Mixture(
        {"a": cseq.Buckets(LENGTHS[:45], 40),
         "b": cseq.Groups(LABELS[45:], 2, 2, repeat_small=True)},
        [(0, {"a": 1, "b": 1}), (30, {"a": 5, "b": 1})], block=8, epoch_size=20,
    ),
    "resized": lambda: cseq.Resized(cseq.Shuffled(60), 25),
    "mixture of rows": lambda: cseq.Mixture(
        {"a": cseq.Packed(LENGTHS[:45], 30), "b": cseq.Packed(LENGTHS[45:], 40)},
        {"a": 5, "b": 1}, block=6,
    ),
    "resized rows": lambda: cseq.Resized(cseq.Packed(LENGTHS, 30), 50),
    "blocks": lambda: cseq.Blocks(7, 4, samples=60),
    "resized batches": lambda: cseq.Resized(cseq.Buckets(LENGTHS, 40, together=2), 13),
    "balanced": lambda: cseq.Balanced(cseq.Packed(DOCUMENTS, 4, too_long="split"), 12),
    "balanced mixture": lambda: cseq.Balanced(
        cseq.Mixture(
            {"a": cseq.Concatenated(DOCUMENTS[4:], 4),
             "b": cseq.Packed(DOCUMENTS[:4], 4, too_long="split")},
            {"a": 1, "b": 1}, block=8,
        ), 6, over="window",
    ),
    "unequal blocks": lambda: cseq.Blocks([7, 0, 20, 1, 13, 4, 15], 3),
    "blocks of lanes": lambda: cseq.Blocks(3, 8, 4, samples=60),
    "own": Backwards,
}  # fmt: skip
# In these orders, ranks choose their part of a global batch by lane or by work.
DEALT = {"blocks of lanes", "balanced", "balanced mixture"}
every_order = pytest.mark.parametrize("name", ORDERS)


def make(name, kind=QUICK[0], **options):
    """Make a manager with an order: batches of 3 units, or units that are batches."""
    order = ORDERS[name]()
    size = {} if order.is_batch else {"batch_size": 3}
    usual = {"seed": 5, "order": order, "dset_size": 60, **size}
    return kind.make(Units, **{**usual, **options})


def units_in(batches):
    """Return the units of batches, in order."""
    return [unit.tolist() for units, _ in batches for unit in units]


def in_order(name, epoch=0):
    """Return the units of an epoch, as the order lists them."""
    return ORDERS[name]().batches(seed=5, epoch=epoch)


def epoch_of(manager, kind=QUICK[0]):
    """Start a manager, and take the rest of its epoch."""
    with kind.begin(manager) as batches:
        return list(batches)


@every_order
def test_an_order_keeps_its_promises(name):
    """Random access matches sequential access, sizes and samples are in bounds, facts are JSON."""
    order = ORDERS[name]()
    check_order(order)
    assert order.samples == 60
    assert f"{type(order).__name__}: " in repr(order)
    if order.is_seeded:
        epochs = {str(order.batches(seed=seed, epoch=epoch)) for seed in (5, 7) for epoch in (0, 3)}
        assert len(epochs) == 4


@every_order
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda order: pickle.loads(pickle.dumps(order))])
def test_an_order_is_copied_and_pickled(name, copied):
    """The copy is the same order, with its own readers."""
    order = ORDERS[name]()
    reader = order.reader(5)
    again = copied(order)
    assert again.facts() == order.facts()
    assert again.batches(seed=5, epoch=1) == order.batches(seed=5, epoch=1)
    assert (reader.samples(1, 0, 1)[0] == again.reader(5).samples(1, 0, 1)[0]).all()


@every_order
@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_all_pools_give_the_order(name, kind):
    """In two epochs, every pool has the order's units, and the same generators."""
    manager = make(name, kind)
    with kind.begin(manager) as batches:
        epochs = [list(batches) for _ in range(2)]
        assert [len(manager)] * 2 == [len(each) for each in epochs]
    assert [units_in(each) for each in epochs] == [in_order(name), in_order(name, 1)]
    drawn = [number for each in epochs for _, number in each]
    alone = make(name)
    with alone.start_test() as batches:
        assert drawn == [number for _ in range(2) for _, number in batches]


@every_order
def test_chosen_samples_are_numbered_by_the_order(name):
    """If `dset_size` is an array, the order numbers its entries; another number is refused."""
    chosen = np.arange(60) * 10 + 3
    batches = epoch_of(make(name, dset_size=chosen))
    assert units_in(batches) == [chosen[unit].tolist() for unit in in_order(name)]
    with pytest.raises(ValueError, match=r"60.*61|61.*60"):
        make(name, dset_size=61)


def united(name, world, state=None, **options):
    """Return the units of all ranks; each global batch has one rank's units after another's."""
    ranks = []
    for rank in range(world):
        manager = make(name, shard=(rank, world), **options)
        if state is not None:
            manager.load_state_dict(state)
        ranks.append(epoch_of(manager))
    together = itertools.zip_longest(*ranks, fillvalue=([], 0))
    return ranks, units_in(itertools.chain.from_iterable(together))


def are_equal_batches(found, wanted, size):
    """Return whether global batches have the same units, each in any order."""
    return len(found) == len(wanted) and all(
        sorted(found[k : k + size]) == sorted(wanted[k : k + size])
        for k in range(0, len(wanted), size)
    )


@every_order
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_ranks_unite_to_one_stream(name, world):
    """Each unit goes to one rank, in order; with `pad`, all ranks have equally many batches."""
    expected = in_order(name)
    # The size of a global batch.
    size = world * (1 if ORDERS[name]().is_batch else 3)

    def are_equal(found, wanted):
        return are_equal_batches(found, wanted, size if name in DEALT else 1)

    _, found = united(name, world, pad=False)
    assert are_equal(found, expected)
    ranks, found = united(name, world)
    assert len({tuple(len(units) for units, _ in each) for each in ranks}) == 1
    more = len(found) - len(expected)
    assert 0 <= more < world
    assert sorted(found) == sorted(expected + expected[:more])
    _, found = united(name, world, drop_last=True)
    assert are_equal(found, expected[: len(expected) // size * size])


@every_order
def test_a_resume_after_every_unit_with_other_ranks(name):
    """A state is JSON; the continuation is the same for any number of ranks."""
    one = {} if ORDERS[name]().is_batch else {"batch_size": 1}
    manager = make(name, **one)
    with manager.start_test() as batches:
        list(batches)
        states = [json.dumps(manager.state_dict()) for _ in batches]
    expected = in_order(name, 1)
    assert len(states) == len(expected)
    for done, state in enumerate(states[:-1], 1):
        world = (2, 3, 1, 5)[done % 4]
        _, found = united(name, world, json.loads(state), pad=False)
        assert are_equal_batches(found, expected[done:], 3 * world if name in DEALT else 1)
    again = make(name)
    # The state at the end of an epoch leads to the next one.
    again.load_state_dict(json.loads(states[-1]))
    assert units_in(epoch_of(again)) == in_order(name, 2)


@pytest.mark.parametrize(
    ("name", "other"), list(itertools.pairwise([*ORDERS, *ORDERS][: len(ORDERS) + 1]))
)
def test_a_state_of_another_order_is_refused(name, other):
    """The error names both values, and the manager keeps its position."""
    state = json.loads(json.dumps(make(other).state_dict()))
    manager = make(name)
    ours, theirs = ORDERS[name]().facts(), ORDERS[other]().facts()
    with pytest.raises(ValueError, match="the saved order has") as error:
        manager.load_state_dict(state)
    key = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
    assert f"{key}={theirs.get(key)!r}" in str(error.value)
    assert f"{key}={ours.get(key)!r}" in str(error.value)
    assert units_in(epoch_of(manager)) == in_order(name)


class Renamed(Backwards):
    """An order whose definition got a new name."""

    name = "backwards-v2"
    replaced: ClassVar[dict[str, str]] = {"backwards-v1": "epochs begin with the last sample now"}


WITHIN: dict[str, Callable[[cseq.Order], cseq.Order]] = {
    "alone": lambda order: order,
    "resized": lambda order: cseq.Resized(order, 25),
    "mixture": lambda order: cseq.Mixture({"a": order}, {"a": 1}, block=8),
    "resized mixture": lambda order: cseq.Resized(
        cseq.Mixture({"a": order}, {"a": 1}, block=8), 30
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_state_of_an_earlier_definition_is_refused(name):
    """The message has both names, the change and the remedy, even for an order inside another."""
    state = make("own", order=WITHIN[name](Backwards())).state_dict()
    manager = make("own", order=WITHIN[name](Renamed()))
    with pytest.raises(ValueError, match="the saved order has") as error:
        manager.load_state_dict(json.loads(json.dumps(state)))
    for part in (
        "name='backwards-v1', but the current order has name='backwards-v2': epochs begin with the",
        "finish the run with the version of cseq that saved the state, or start a new epoch",
    ):
        assert part in str(error.value)
    manager.load_state_dict(make("own", order=WITHIN[name](Renamed())).state_dict())
    with pytest.raises(ValueError, match=r"name=\['backwards-v1'\]"):
        Renamed().resumed({"name": ["backwards-v1"]}, 1, 0, 0)


def test_the_order_says_how_many_samples_there_are():
    """It does where the worker has no length, and none is given."""
    order = cseq.Buckets([3, 5, 4, 9, 10, 3], 12, together=1)
    with cseq.MTSequence(lambda: np.arange(6), order=order, out_type="null", seed=1).start() as got:
        assert [batch.tolist() for batch in got] == order.batches(seed=1)
    with pytest.raises(TypeError, match="dset_size is missing"):
        cseq.MTSequence(lambda: np.arange(6), order=cseq.Shuffled(), seed=1)


OF_ARRAYS: dict[str, tuple[Callable[[Any], cseq.Order], Any]] = {
    "buckets": (lambda lengths: cseq.Buckets(lengths, 40), LENGTHS),
    "of labels": (lambda labels: cseq.Buckets.of(labels, dict.fromkeys("abcde", 2)), LABELS),
    "of numbers": (lambda labels: cseq.Buckets.of(labels, {0: 2, 1: 3}), np.arange(60) % 2),
    "packed": (lambda lengths: cseq.Packed(lengths, 30), LENGTHS),
    "packed pieces": (lambda lengths: cseq.Packed(lengths, 7, too_long="split"), LENGTHS),
    "concatenated": (lambda lengths: cseq.Concatenated(lengths, 7), LENGTHS),
    "groups": (lambda labels: cseq.Groups(labels, 2, 3), LABELS),
    "weighted": (cseq.Weighted, LENGTHS.astype(np.float64)),
    "weighted by integers": (cseq.Weighted, LENGTHS),
    "replaced": (lambda w: cseq.Weighted(w, replacement=True), LENGTHS.astype(np.float64)),
    "balanced": (cseq.Weighted.balanced, LABELS),
}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_memory_maps_are_taken(name, tmp_path):
    """Read-only files serve as arrays, even with steps."""
    make_order, values = OF_ARRAYS[name]
    np.save(tmp_path / "values.npy", np.repeat(values, 2))
    mapped = np.load(tmp_path / "values.npy", mmap_mode="r")
    for given in (mapped[::2], mapped[:60]):
        order, expected = make_order(given), make_order(np.array(given))
        assert order.facts() == expected.facts()
        assert order.batches(seed=3) == expected.batches(seed=3)
