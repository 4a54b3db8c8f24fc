"""What `Buckets`, `Packed` and `Groups` have in common: golden, any unit at once, any ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_recipes import (
    BUCKETS,
    GROUPED,
    PACKED,
    fingerprint,
    golden,
    golden_groups,
    groups,
    labels,
    lengths,
    record,
)
from reference_recipes import buckets as reference_buckets
from reference_recipes import packed as reference_packed

import cseq
from cseq._core import fingerprint as core_fingerprint
from cseq.order.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parents[1]
RECORDS = {
    name: json.loads((HERE / "golden" / f"orders_{name}.json").read_text("ascii"))["orders"]
    for name in ("buckets", "packed", "groups")
}
RESULTS = ("seed", "epoch", "units", "first", "last", "sha256")
WORD = 2**64 - 1
seeds = st.integers(0, WORD)


def arguments_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what the order of a golden record is made with."""
    return {key: value for key, value in given.items() if key not in RESULTS}


def made(name: str, given: dict[str, Any]) -> cseq.Order:
    """Make the order of a golden record."""
    arguments = arguments_of(given)
    if name == "groups":
        return cseq.Groups(labels(*arguments.pop("labels")), repeat_small=True, **arguments)
    kind = cseq.Buckets if name == "buckets" else cseq.Packed
    return kind(lengths(*arguments.pop("lengths")), too_long="drop", **arguments)


# ── what it is ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "given"), [(name, each) for name, all_ in RECORDS.items() for each in all_]
)
def test_golden(name: str, given: dict[str, Any]) -> None:
    """An order is the same for ever: its first and last unit, and the hash of all of them."""
    where = given["seed"], given["epoch"]
    units = made(name, given).batches(seed=where[0], epoch=where[1])
    assert record(arguments_of(given), *where, units) == given


def test_golden_files_are_the_references() -> None:
    """What is in the golden files comes from the reference."""
    for number in (0, 1, 2, 3):
        for each in golden(BUCKETS[number], reference_buckets):
            assert json.loads(json.dumps(each)) in RECORDS["buckets"]
    for number in (0, 1, 2):
        for each in golden(PACKED[number], reference_packed):
            assert json.loads(json.dumps(each)) in RECORDS["packed"]
        for each in golden_groups(GROUPED[number]):
            assert json.loads(json.dumps(each)) in RECORDS["groups"]


some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=120)
some_labels = st.lists(st.integers(-3, 5), min_size=1, max_size=120)


@given(lengths=some_lengths, budget=st.integers(20, 80), seed=seeds, epoch=seeds, data=st.data())
def test_buckets_are_those_of_the_reference(
    lengths: list[int], budget: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """It is what the definition says, for any arguments."""
    options = {
        "ratio": data.draw(st.sampled_from([1, 1.05, 1.1, 2.5])),
        "boundaries": data.draw(st.sampled_from([None, [7], [5, 15, 20], [2, 90]])),
        "most": data.draw(st.none() | st.integers(1, 9)),
        "together": data.draw(st.integers(1, 9)),
        "longest_first": data.draw(st.booleans()),
    }
    if min(lengths) > budget or (options["boundaries"] == [2, 90] and max(lengths) > 2):
        return
    order = cseq.Buckets(lengths, budget, too_long="drop", **options)
    expected = reference_buckets(lengths, budget, **options)
    assert order.batches(seed=seed, epoch=epoch) == expected.epoch(seed, epoch)


@given(some_lengths, st.integers(20, 200), st.integers(1, 20), seeds, seeds)
def test_rows_are_those_of_the_reference(
    lengths: list[int], budget: int, quantum: int, seed: int, epoch: int
) -> None:
    """It is what the definition says, for any arguments."""
    if min(lengths) > budget:
        return
    order = cseq.Packed(lengths, budget, quantum=quantum, too_long="drop")
    expected = reference_packed(lengths, budget, quantum=quantum)
    assert order.batches(seed=seed, epoch=epoch) == expected.epoch(seed, epoch)


@given(some_labels, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), seeds, seeds)
def test_groups_are_those_of_the_reference(
    labels: list[int], chosen: int, each: int, size: int, seed: int, epoch: int
) -> None:
    """It is what the definition says, for any arguments."""
    chosen = min(chosen, len(set(labels)))
    order = cseq.Groups(labels, chosen, each, epoch_size=size, repeat_small=True)
    expected = groups(labels, chosen, each, size, seed, epoch)
    assert order.batches(seed=seed, epoch=epoch) == list(expected)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_fingerprint(values: list[int]) -> None:
    """It is that of the definition, whatever type and layout the values have."""
    expected = fingerprint(values)
    array = np.array(values, np.int64)
    assert core_fingerprint(array) == expected
    assert core_fingerprint(np.repeat(array, 3)[::3]) == expected
    assert core_fingerprint(array.astype(">i8")) == expected
    assert core_fingerprint(np.array([], np.int32)) == fingerprint([])


def test_fingerprint_of_other_types_and_of_pieces() -> None:
    """Equal integers have one fingerprint, equal floats another one; long arrays go in pieces."""
    values = np.arange(200_000) % 251
    expected = fingerprint(values.tolist())
    assert all(core_fingerprint(values.astype(kind)) == expected for kind in ("u1", "i4", "u8"))
    floats = values.astype(np.float32)
    bits = values.astype(np.float64).view(np.int64)
    assert core_fingerprint(floats) == fingerprint(bits.tolist()) != expected
    values[-1] += 1
    assert core_fingerprint(values) != expected


# ── any unit, at any time ─────────────────────────────────────────────────────────────────────

ORDERS: dict[str, Callable[[], cseq.Order]] = {
    "buckets": lambda: cseq.Buckets(lengths(300, 3, 40), 120, together=3),
    "longest first": lambda: cseq.Buckets(lengths(300, 3, 40), 120, together=4, longest_first=True),
    "of labels": lambda: cseq.Buckets.of(labels(300, 5), {0: 3, 1: 7, 2: 20, 3: 1, 4: 4}),
    "packed": lambda: cseq.Packed(lengths(300, 3, 40), 50),
    "groups": lambda: cseq.Groups(labels(300, 8), 3, 4, epoch_size=31),
}


@pytest.mark.parametrize("name", ORDERS)
@given(seed=seeds, reads=st.lists(st.tuples(st.integers(0, 2), st.integers(0), st.integers(0))))
def test_units_can_be_read_in_any_order(
    name: str, seed: int, reads: list[tuple[int, int, int]]
) -> None:
    """Units are the same whatever was read before, of this epoch or of another one."""
    order = ORDERS[name]()
    epochs = [order.batches(seed=seed, epoch=epoch) for epoch in range(3)]
    reader = order.reader(seed)
    for epoch, start, count in reads:
        begin = start % order.units
        size = count % (order.units - begin + 1)
        samples, sizes = reader.samples(epoch, begin, size)
        expected = epochs[epoch][begin : begin + size]
        assert sizes.tolist() == [len(unit) for unit in expected]
        assert samples.tolist() == [sample for unit in expected for sample in unit]


@pytest.mark.parametrize("name", ORDERS)
def test_epochs_and_seeds_differ(name: str) -> None:
    """Each epoch and each seed has an order of its own, with as many units."""
    order = ORDERS[name]()
    epochs = [str(order.batches(seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(epochs)) == 4


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_ranks_unite_to_one_stream(name: str, world: int) -> None:
    """All ranks together have each unit once, in the order of the epoch, wherever they go on."""
    order = ORDERS[name]()
    samples = order.samples
    expected = order.batches(seed=5, epoch=3)
    size = 1 if order.is_batch else 2
    for consumed in range(order.units + 1):
        ranks = [
            Sampler(
                samples,
                order,
                batch_size=size,
                seed=5,
                drop_last=False,
                rank=rank,
                world_size=world,
                pad=False,
            ).source(3, consumed)
            for rank in range(world)
        ]
        united = []
        for batch in range(len(ranks[0])):
            for source in ranks:
                if batch < len(source):
                    indices, sizes = source.samples(batch)
                    ends = np.cumsum(sizes)[:-1]
                    united += [part.tolist() for part in np.split(indices, ends)]
        assert united == expected[consumed:]


def test_facts_of_numpy_numbers_are_json() -> None:
    """They are those of Python's numbers."""
    one, two, three = np.int32(1), np.int64(2), np.uint8(3)
    pairs = [
        (cseq.Buckets([3, 4], 9, most=2), cseq.Buckets([3, 4], np.int16(9), most=two)),
        (cseq.Packed([3, 4], 9, quantum=3), cseq.Packed([3, 4], np.int16(9), quantum=three)),
        (
            cseq.Groups([0, 1], 2, 1, repeat_small=True),
            cseq.Groups([0, 1], two, one, repeat_small=np.bool_(True)),
        ),
    ]
    for ours, theirs in pairs:
        assert json.dumps(ours.facts()) == json.dumps(theirs.facts())


def test_a_resume_refuses_another_order() -> None:
    """The facts of another order are refused, and both values named."""
    order = cseq.Buckets([3, 4, 5], 12)
    facts = json.loads(json.dumps(order.facts()))
    assert order.resumed(facts, 5, 1, 2) is order
    others = [
        ("lengths", cseq.Buckets([3, 5, 4], 12)),
        ("budget", cseq.Buckets([3, 4, 5], 11)),
        ("bounds", cseq.Buckets([3, 4, 5], 12, ratio=2)),
        ("together", cseq.Buckets([3, 4, 5], 12, together=3)),
        ("longest_first", cseq.Buckets([3, 4, 5], 12, longest_first=True)),
        ("name", cseq.Packed([3, 4, 5], 12)),
        ("lengths", cseq.Buckets.of([0, 0, 1], 2, together=8)),
    ]
    for key, other in others:
        theirs = other.facts()
        with pytest.raises(ValueError, match=rf"\b{key}={theirs.get(key)!r}") as error:
            order.resumed(theirs, 5, 1, 2)
        assert f"{key}={facts.get(key)!r}" in str(error.value)


# ── large ones ────────────────────────────────────────────────────────────────────────────────


def test_large_classes_need_no_table() -> None:
    """Classes of 65536 samples and more are computed; each sample comes once all the same."""
    order = cseq.Buckets(np.repeat([5, 9], [70_000, 65_535]), 1000, together=8)
    reader = order.reader(1)
    samples, sizes = reader.samples(4, 0, order.units)
    assert (np.sort(samples) == np.arange(order.samples)).all()
    assert sizes.sum() == order.samples
    middle = reader.samples(4, order.units // 2, 5)[0]
    start = sizes[: order.units // 2].sum()
    assert (middle == samples[start : start + len(middle)]).all()


@pytest.mark.needs("POSIX")
def test_a_signal_handler_runs_while_tables_are_made() -> None:
    """A long read is interrupted, here by a read of another epoch, and can be taken up again."""
    order = cseq.Buckets(np.repeat(np.arange(1, 101), 60_000), 2000, ratio=1)
    reader = order.reader(3)
    expected = [order.reader(3).samples(epoch, 0, 40)[0] for epoch in (0, 1)]

    def ring(_number: int, _frame: Any) -> None:
        assert (reader.samples(1, 0, 40)[0] == expected[1]).all()
        raise InterruptedError

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            reader.samples(0, 0, order.units)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    samples, sizes = reader.samples(0, 0, order.units)
    assert (samples[: sizes[:40].sum()] == expected[0]).all()
    assert (np.bincount(samples) == 1).all()


# ── randomness ────────────────────────────────────────────────────────────────────────────────

EPOCHS = 5000


def z_of(chosen: np.ndarray[Any, Any], freedom: int, share: float = 1.0) -> float:
    """Return how far a table of counts is from even ones, in standard deviations.

    `share`: of the sum of squares that the degrees of freedom stand for.
    """
    expected = chosen.sum() / chosen.size
    chi = ((chosen - expected) ** 2).sum() / expected * share
    return float((chi - freedom) / (2 * freedom) ** 0.5)


def units_of(order: cseq.Order, epochs: int = EPOCHS) -> np.ndarray[Any, Any]:
    """Read epochs whose units have equal sizes: shape (epochs, units, samples of a unit)."""
    reader = order.reader(2024)
    drawn = [reader.samples(epoch, 0, order.units)[0] for epoch in range(epochs)]
    return np.stack(drawn).reshape(epochs, order.units, -1)


def tabled(rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], n: int) -> Any:
    """Count pairs."""
    return np.bincount((rows * n + columns).ravel(), minlength=n * n).reshape(n, n)


def test_rows_and_mates_are_random() -> None:
    """60 samples in rows of a long and a short one: any in any row, and beside any other one."""
    drawn = units_of(cseq.Packed([7] * 30 + [3] * 30, 10))
    place = np.broadcast_to(np.arange(30), drawn.shape[:2])
    long, short = drawn[:, :, 0], drawn[:, :, 1] - 30
    # Each table is a sum of permutation matrices of 30 rows: 29² degrees of freedom.
    for pair in ((long, place), (short, place), (long, short), (long[:-1], long[1:])):
        assert abs(z_of(tabled(*pair, 30), 29**2, 29 / 30)) < 4


def test_batches_and_mates_are_random() -> None:
    """60 samples in batches of 6: any in any batch, and any two meet as often as any others."""
    drawn = units_of(cseq.Buckets([5] * 60, 30, together=1))
    places = np.bincount(
        (drawn * 10 + np.arange(10)[None, :, None]).ravel(), minlength=600
    ).reshape(60, 10)
    assert abs(z_of(places, 59 * 9, 59 / 60)) < 4
    met = np.zeros((60, 60))
    for a in range(6):
        for b in range(6):
            np.add.at(met, (drawn[:, :, a].ravel(), drawn[:, :, b].ravel()), a != b)
    pairs = met[np.triu_indices(60, 1)]
    # Each sample has five mates: of 1770 pairs, 60 * 57 / 2 are free, and each meets with 5 / 59.
    assert abs(z_of(pairs, 1710, 1710 / 1770 / (1 - 5 / 59))) < 4


def test_groups_of_units_are_random() -> None:
    """Units that come together come anywhere, and so does the short group among them."""
    order = cseq.Buckets(range(1, 63), 62, ratio=1, most=1, together=3)  # sample k is unit k
    drawn = units_of(order)[:, :, 0]
    assert (np.diff(drawn[:, :60].reshape(EPOCHS, 20, 3)) == 1).all()
    at = drawn[:, 60] // 3
    assert (drawn[:, 60:] == np.stack([at * 3, at * 3 + 1], 1)).all()
    assert abs(z_of(np.bincount(at, minlength=21), 20)) < 4
    first = drawn[:, 0:60:3]
    group = (first - np.where(first >= at[:, None] * 3, 2, 0)) // 3
    place = np.broadcast_to(np.arange(20), group.shape)
    for pair in ((group, place), (group[:-1], group[1:])):
        assert abs(z_of(tabled(*pair, 20), 19**2, 19 / 20)) < 4


def test_classes_and_members_of_groups_are_random() -> None:
    """Each class comes at each place of a round, with each sample; one does not tell the other."""
    order = cseq.Groups(np.repeat(np.arange(30), 30), 30, 1, epoch_size=30)
    drawn = units_of(order)[:, :, :].reshape(EPOCHS, 30, 30)  # an epoch is a pass of each class
    place = np.broadcast_to(np.arange(30), drawn.shape)
    classes, members = drawn // 30, drawn % 30
    assert abs(z_of(tabled(classes, place, 30), 29**2, 29 / 30)) < 4
    for number in range(30):
        those = members[classes == number].reshape(EPOCHS, 30)
        at = np.broadcast_to(np.arange(30), those.shape)
        assert abs(z_of(tabled(those, at, 30), 29**2, 29 / 30)) < 4
        assert not (those[:30] == classes[0, :30]).all(1).any()
