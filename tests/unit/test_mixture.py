"""`Mixture`: golden, exact shares, whole passes, other weights in the middle, bad sources."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranked import Rows, check, units

import cseq
from cseq.order.sampler import Sampler

HERE = Path(__file__).parents[1]
FILE = json.loads((HERE / "golden" / "orders_mixture.json").read_text(encoding="ascii"))


def shuffled(sizes: dict[str, int]) -> dict[str, cseq.Order]:
    """Make sources."""
    return {name: cseq.Shuffled(n) for name, n in sizes.items()}


def named(sizes: dict[str, int], weights: list[list[Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return weights by name."""
    return [(unit, dict(zip(sizes, each, strict=True))) for unit, each in weights]


@pytest.mark.parametrize("record", FILE["orders"])
@pytest.mark.parametrize("epoch_size", [3000, 250])
def test_golden(record: dict[str, Any], epoch_size: int) -> None:
    """An order is the same for ever, however it is cut into epochs."""
    sizes, weights = record["sources"], named(record["sources"], record["weights"])
    order = cseq.Mixture(shuffled(sizes), weights, block=record["block"], epoch_size=epoch_size)
    reader = order.reader(record["seed"])
    parts = [reader.samples(k, 0, epoch_size)[0] for k in range(3000 // epoch_size)]
    samples = np.concatenate(parts)
    digest = hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest()
    assert (samples[:10].tolist(), samples[-1]) == (record["first"], record["last"])
    assert digest == record["sha256"]


def test_passes_of_rows() -> None:
    """Rows stay whole, each comes once in a pass; also of a mixture in a mixture."""
    inside = cseq.Mixture({"x": Rows(21), "y": Rows(9)}, {"x": 1, "y": 2}, block=3)
    order = cseq.Mixture({"in": inside, "b": Rows(40)}, {"in": 2, "b": 1}, block=7, epoch_size=60)
    got = [tuple(unit) for epoch in range(4) for unit in units(order, 3, epoch)]
    for first, n in ((0, 21), (21, 9), (30, 40)):
        rows = {tuple(first + s for s in unit) for unit in units(Rows(n), 1, 0)}
        own = [unit for unit in got if first <= unit[0] < first + n]
        assert len(own) > len(rows)
        for start in range(0, len(own) - len(rows), len(rows)):
            assert set(own[start : start + len(rows)]) == rows


# ── other weights in the middle ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("is_batch", [False, True])
def test_ranks_and_resumes(rows: bool, is_batch: bool) -> None:
    """Any ranks have one stream, which goes on at any place: samples, rows and batches."""
    sources: dict[str, cseq.Order]
    if rows or is_batch:
        sources = {name: Rows(n, is_batch=is_batch) for name, n in (("a", 40), ("b", 11))}
    else:
        sources = {"a": cseq.Shuffled(40), "b": cseq.Shuffled(11), "c": cseq.Sequential(5)}
    weights = [(0, dict.fromkeys(sources, 1)), (70, {**dict.fromkeys(sources, 1), "a": 4})]
    check(cseq.Mixture(sources, weights, block=16, epoch_size=37))


SIZES = {"web": 400, "code": 120, "math": 30}
OLD, NEW = {"web": 0.7, "code": 0.25, "math": 0.05}, {"web": 0.3, "code": 0.3, "math": 0.4}


def mixed(weights: dict[str, Any], block: int = 32, **more: int) -> cseq.Mixture:
    """Make a mixture with sources more."""
    sources = shuffled({**SIZES, **more})
    return cseq.Mixture({k: sources[k] for k in weights}, weights, block=block, epoch_size=90)


def test_weights_change_at_every_unit_of_two_blocks() -> None:
    """Wherever they change, no sample of a pass is lost or repeated, and shares are the new ones.

    They are exact in each block from there; states go through JSON.
    """
    old, new = mixed(OLD), mixed({**NEW, "books": 1}, books=50)
    epochs = [units(old, 1, epoch) for epoch in range(3)]
    for consumed in range(65):
        again = new.resumed(json.loads(json.dumps(old.facts())), 1, 1, consumed)
        had = epochs[0] + epochs[1][:consumed]
        drawn = again.reader(1).samples(1, consumed, 90 - consumed)[0].tolist()
        drawn += [sample for (sample,) in units(again, 1, 2)]
        for start in range(0, len(drawn) - 31, 32):
            owners = np.searchsorted([400, 520, 550], drawn[start : start + 32], "right")
            assert np.bincount(owners).tolist() == [5, 5, 6, 16]  # of 4.8, 4.8, 6.4 and 16
        for first, n in ((0, 400), (400, 120), (520, 30)):
            own = [s for s in [*chain(*had), *drawn] if first <= s < first + n]
            for start in range(0, len(own), n):
                assert len({*own[start : start + n]}) == len(own[start : start + n])
        third = new.resumed(json.loads(json.dumps(again.facts())), 1, 2, 5)
        assert third.facts() == again.facts()
        assert units(third, 1, 2) == units(again, 1, 2)


def test_a_mixture_inside_goes_on() -> None:
    """Weights of a mixture that is a source change, too."""

    def nested(weights: dict[str, Any]) -> cseq.Mixture:
        return cseq.Mixture(
            {"in": mixed(weights), "out": cseq.Shuffled(500)}, {"in": 2, "out": 1}, block=9
        )

    old, new = nested(OLD), nested(NEW)
    again = new.resumed(old.facts(), 1, 0, 101)
    drawn = units(old, 1, 0)[:101] + units(again, 1, 0)[101:300]
    web = [unit[0] for unit in drawn if unit[0] < 400]
    assert len(set(web)) == len(web)
    inner = again.facts()["sources"][0][1]
    assert sum(inner["taken"].values()) == inner["since"]


def test_an_epoch_with_other_weights_is_padded() -> None:
    """The beginning of the epoch is repeated at its end, though other weights held there."""
    again = mixed(NEW).resumed(mixed(OLD).facts(), 1, 1, 5)
    for rank in range(4):
        part = Sampler(
            550, again, batch_size=8, seed=1, drop_last=False, rank=rank, world_size=4
        ).source(1, 5)
        sizes = [len(part.samples(k)[0]) for k in range(len(part))]
        assert sizes == [8, 8, 6]
        assert part.samples(2)[0].max() < 550


def test_states_that_do_not_belong() -> None:
    """What cannot go on is refused: both values are named, and the remedy."""
    order = mixed(OLD)
    with pytest.raises(ValueError, match=r"source 'math': .*samples=30.*samples=31.*another name"):
        mixed(OLD, math=31).resumed(order.facts(), 1, 0, 5)
    with pytest.raises(ValueError, match="name='feistel-v1', but here it has name='mix"):
        order.resumed(cseq.Shuffled(5).facts(), 1, 0, 0)
    small = cseq.Mixture(shuffled(SIZES), OLD, block=32, epoch_size=10)
    with pytest.raises(ValueError, match=r"unit 50 of an epoch.*have 10 units; give epoch_size=90"):
        small.resumed(order.facts(), 1, 0, 50)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("block", 2**31, "block=2147483648 is above 65535"),
        ("block", 0, "block=0"),
        ("since", 2**64, "since=18446744073709551616"),
        ("units", 2**60, "units=1152921504606846976"),
        ("taken", {"text": -1}, r"taken\['text'\]=-1"),
        ("taken", 5, "damaged"),
        ("sources", 5, "damaged"),
        ("sources", [["text", 5]], "damaged"),
        ("weights", [[1, [1, 1]]], "damaged"),
        ("weights", [[0, [1, 1, 1]]], "damaged"),
        ("weights", [[0, [1, "x"]]], "damaged"),
        ("weights", [[0, [0, 0]]], "all weights are 0"),
        ("weights", [], "damaged"),
    ],
)
def test_states_that_are_damaged(key: str, value: Any, says: str) -> None:
    """Numbers that no mixture can have are refused before anything is made of them."""
    order = cseq.Mixture(shuffled({"text": 50, "code": 40}), {"text": 3, "code": 1}, epoch_size=90)
    with pytest.raises(ValueError, match=says):
        order.resumed(order.facts() | {key: value}, 1, 0, 5)


# ── at its limits ─────────────────────────────────────────────────────────────────────────────


def test_an_exception_of_a_source_leaves_it_as_it_was() -> None:
    """What comes after it is what would have come without it."""

    class Failing(Rows):
        fails = False

        def read(self, seed: int, epoch: int, start: int, count: int) -> tuple[Any, Any]:
            if self.fails:
                raise OSError("gone")
            return super().read(seed, epoch, start, count)

    failing = Failing(30)
    order = cseq.Mixture({"a": Rows(30), "b": failing}, {"a": 1, "b": 1}, block=8)
    expected, reader = order.reader(1).samples(0, 0, 24), order.reader(1)
    reader.samples(0, 0, 5)
    failing.fails = True
    with pytest.raises(OSError, match="gone"):
        reader.samples(0, 5, 10)
    failing.fails = False
    again = reader.samples(0, 5, 19)
    there = int(expected[1][:5].sum())
    assert again[0].tolist() == expected[0][there:].tolist()


# ── bad input ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1}, r"weights has no 'b'; give its share, or 0"),
        ({"a": 1, "b": 1, "c": 1}, r"weights has 'c', which is not a source; there are \['a', "),
        ({"a": -1, "b": 1}, r"weights\['a'\]=-1; give a finite number of at least 0"),
        ({"a": 1, "b": math.nan}, r"weights\['b'\]=nan; give"),
        ({"a": 1, "b": math.inf}, r"weights\['b'\]=inf; give"),
        ({"a": "1", "b": 1}, r"weights\['a'\]='1' is not a number"),
        ({"a": 0, "b": 0}, r"all weights are 0"),
        (5, r"weights=5: give a dict"),
        ([], r"weights=\[\]: give a dict"),
        ([(5, {"a": 1, "b": 1})], r"weights has the unit 5 at place 0; give 0 first"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 1})], r"weights has the unit 0 at place 1"),
        ([{"a": 1, "b": 1}], r"weights has \{'a': 1, 'b': 1\}; give \(unit, dict"),
    ],
)
def test_bad_weights(weights: Any, says: str) -> None:
    """The message names the weight and the remedy."""
    with pytest.raises((TypeError, ValueError), match=says):
        cseq.Mixture(shuffled({"a": 5, "b": 5}), weights)


def test_bad_sources() -> None:
    """The message names the source and the remedy."""
    one = {"a": 1}
    with pytest.raises(TypeError, match=r"sources=\{\}: give a dict"):
        cseq.Mixture({}, {})
    with pytest.raises(TypeError, match=r"sources\['a'\]=5 is not a cseq.Order"):
        cseq.Mixture({"a": 5}, one)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="sources has the name 1; give strings"):
        cseq.Mixture({1: cseq.Shuffled(5)}, one)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"sources\['a'\]=.*give it the number of its samples"):
        cseq.Mixture({"a": cseq.Shuffled()}, one)
    for other, kind in ((Rows(9), "rows of samples"), (Rows(9, is_batch=True), "batches")):
        with pytest.raises(
            ValueError, match=rf"sources\['b'\] are {kind}, but sources.* has samples; give"
        ):
            cseq.Mixture({"a": cseq.Shuffled(5), "b": other}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="block=1 is too small for 2 sources"):
        cseq.Mixture(shuffled({"a": 5, "b": 5}), {"a": 1, "b": 1}, block=1)
    with pytest.raises(ValueError, match="source 'a' has 5 units, and 1024 in a block"):
        cseq.Mixture(shuffled({"a": 5}), one, stop="first")
    with pytest.raises(ValueError, match="stop='last' is unknown"):
        cseq.Mixture(shuffled({"a": 5}), one, stop="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch_size=0"):
        cseq.Mixture(shuffled({"a": 5}), one, epoch_size=0)
    with pytest.raises(ValueError, match="block=65536 is above"):
        cseq.Mixture(shuffled({"a": 5}), one, block=65536)
    assert "1 of a" in cseq.Mixture(shuffled({"a": 5}), one).describe()
