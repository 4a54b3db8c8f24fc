"""`Mixture`: golden, exact shares, whole passes, other weights in the middle, bad sources."""

from __future__ import annotations

import hashlib
import json
import math
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import Rows, check, units
from reference_draws import mixture, plain

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


def source_of(order: cseq.Order) -> Any:
    """Return an order as the reference takes one."""
    return order.samples, lambda seed, epoch: units(order, seed, epoch)


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


@settings(max_examples=60)
@given(st.data())
def test_reference(data: Any) -> None:
    """It is that of the reference, also for rows and mixtures of mixtures."""
    count = data.draw(st.integers(1, 5))
    weight = st.one_of(st.integers(0, 5), st.floats(0, 9))
    weights = st.lists(weight, min_size=count, max_size=count).filter(any)
    places = sorted(data.draw(st.sets(st.integers(1, 200), max_size=3)))
    phases = [(unit, data.draw(weights)) for unit in [0, *places]]
    kinds = data.draw(st.sampled_from(["samples", "rows"]))
    sources: dict[str, cseq.Order] = {}
    for s in range(count):
        n = data.draw(st.integers(4, 40))
        sources[f"s{s}"] = cseq.Shuffled(n) if kinds == "samples" else Rows(n)
    if data.draw(st.booleans()):
        inside = {"x": sources.pop("s0"), "y": Rows(5) if kinds == "rows" else cseq.Shuffled(5)}
        sources = {"s0": cseq.Mixture(inside, {"x": 1, "y": 2}, block=3), **sources}
    block, size, seed = data.draw(
        st.tuples(st.integers(5, 60), st.integers(1, 99), st.integers(0, 9))
    )
    order = cseq.Mixture(
        sources,
        [(u, dict(zip(sources, w, strict=True))) for u, w in phases],
        block=block,
        epoch_size=size,
    )
    plan = {name: source_of(source) for name, source in sources.items()}
    expected, _ = mixture(plan, phases, block, seed, 3 * size)
    assert list(chain.from_iterable(units(order, seed, epoch) for epoch in range(3))) == expected
    reader, place = order.reader(seed), data.draw(st.integers(0, 3 * size - 1))
    assert reader.samples(place // size, place % size, 1)[0].tolist() == expected[place]


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

    From there on, the order is that of the reference; states go through JSON.
    """
    old, new = mixed(OLD), mixed({**NEW, "books": 1}, books=50)
    epochs = [units(old, 1, epoch) for epoch in range(3)]
    plan = {name: plain(n) for name, n in {**SIZES, "books": 50}.items()}
    for consumed in range(65):
        again = new.resumed(json.loads(json.dumps(old.facts())), 1, 1, consumed)
        phases = [(0, [*NEW.values(), 1])]
        had = epochs[0] + epochs[1][:consumed]
        _, taken = mixture(
            {name: plan[name] for name in SIZES}, [(0, [*OLD.values()])], 32, 1, len(had)
        )
        expected, _ = mixture(plan, phases, 32, 1, 270, since=len(had), taken=taken)
        assert again.reader(1).samples(1, consumed, 90 - consumed)[0].tolist() == list(
            chain.from_iterable(expected[: 90 - consumed])
        )
        assert units(again, 1, 2) == expected[90 - consumed :]
        web = [unit[0] for unit in had + expected if unit[0] < 400]
        assert len(web) == len(set(web)) < 400
        third = new.resumed(json.loads(json.dumps(again.facts())), 1, 2, 5)
        assert third.facts() == again.facts()
        assert units(third, 1, 2) == units(again, 1, 2)


def test_reading_begins_before_the_weights_changed() -> None:
    """What comes after that is the same, also for blocks that no power of two is a multiple of."""
    again = mixed(NEW, block=10).resumed(mixed(OLD, block=10).facts(), 1, 1, 25)
    whole = again.reader(1).samples(1, 0, 90)[0].tolist()
    for begin in range(25, 90):
        assert again.reader(1).samples(1, begin, 90 - begin)[0].tolist() == whole[begin:]


def test_weights_change_with_every_unit() -> None:
    """A new mixture for each unit: still each sample of a pass once."""
    order, drawn, shares = mixed(OLD), [], (OLD, NEW)
    for place in range(180):
        order = mixed(shares[place % 2]).resumed(order.facts(), 1, *divmod(place, 90))
        drawn.append(int(order.reader(1).samples(*divmod(place, 90), 1)[0][0]))
    assert sum(order.facts()["taken"].values()) == 179
    bounds = np.cumsum([0, *SIZES.values()])
    for k, n in enumerate(SIZES.values()):
        own = [sample for sample in drawn if bounds[k] <= sample < bounds[k + 1]]
        for start in range(0, len(own), n):
            assert len(set(own[start : start + n])) == len(own[start : start + n])


def test_a_source_that_was_away_goes_on() -> None:
    """A state remembers what was taken of a source that is there no more."""
    first = mixed(OLD)
    second = mixed({"web": 1}).resumed(first.facts(), 1, 1, 0)
    third = mixed(OLD).resumed(second.facts(), 1, 2, 0)
    taken = third.facts()["taken"]
    assert taken["code"] == second.facts()["taken"]["code"] > 0
    assert taken["web"] == second.facts()["taken"]["web"] + 90


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


def test_a_signal_handler_may_read() -> None:
    """One that runs while a source shuffles, and reads another epoch, changes nothing."""
    table = cseq.Shuffled(3_000_000, algorithm="fisher-yates-v1")
    order = cseq.Mixture(
        {"a": table, "b": cseq.Shuffled(9)}, {"a": 9, "b": 1}, epoch_size=2_000_000
    )
    expected, reader = order.reader(1).samples(0, 1_500_000, 50)[0].tolist(), order.reader(1)
    seen = []

    def handle(*_: object) -> None:
        seen.append(reader.samples(1, 700_000, 50))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        assert reader.samples(0, 1_500_000, 50)[0].tolist() == expected
        assert len(seen) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def test_the_state_of_a_mixture_is_loaded_while_it_runs() -> None:
    """Back to an earlier place, with the weights that it had: the workers stay."""
    manager = cseq.MTSequence(
        np.arange(sum(SIZES.values())),
        order=mixed(OLD),
        batch_size=5,
        out_type="null",
        num_workers=1,
        seed=1,
    )
    with manager.start() as batches:
        iterator = iter(batches)
        for _ in range(3):
            next(iterator)
        state = json.loads(json.dumps(manager.state_dict()))
        rest = [batch.tolist() for batch in iterator]
        manager.load_state_dict(state)
        assert [batch.tolist() for batch in batches] == rest
