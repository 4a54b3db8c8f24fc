"""`Mixture`: shares, whole passes, new weights in the middle, and bad sources."""

import json
import math
from functools import cache
from itertools import chain
from typing import ClassVar

import golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import Rows, units
from reference_mixture import mixture

import cseq
from cseq.order.sampler import Sampler


def shuffled(sizes):
    """Make sources."""
    return {name: cseq.Shuffled(n) for name, n in sizes.items()}


def source_of(order):
    """Convert an order to the reference's form."""
    return order.samples, cache(lambda seed, epoch: units(order, seed, epoch))


@pytest.mark.filterwarnings("ignore:the sources")
@settings(max_examples=40)
@given(st.data())
def test_reference(data):
    """It equals the reference for any epochs, even for rows, nested mixtures and small blocks."""
    count = data.draw(st.integers(1, 5))
    weight = st.one_of(st.integers(0, 5), st.floats(0, 9))
    weights = st.lists(weight, min_size=count, max_size=count).filter(any)
    places = sorted(data.draw(st.sets(st.integers(1, 200), max_size=3)))
    phases = [(unit, data.draw(weights)) for unit in [0, *places]]
    kinds = data.draw(st.sampled_from(["samples", "rows"]))
    sources = {}
    for s in range(count):
        n = data.draw(st.integers(4, 40))
        sources[f"s{s}"] = cseq.Shuffled(n) if kinds == "samples" else Rows(n)
    if data.draw(st.booleans()):
        inside = {"x": sources.pop("s0"), "y": Rows(5) if kinds == "rows" else cseq.Shuffled(5)}
        sources = {"s0": cseq.Mixture(inside, {"x": 1, "y": 2}, block=3), **sources}
    block, size, seed = data.draw(
        st.tuples(st.integers(1, 60), st.integers(1, 99), st.integers(0, 9))
    )
    order = cseq.Mixture(sources, golden.named(sources, phases), block=block, epoch_size=size)
    plan = {name: source_of(source) for name, source in sources.items()}
    expected, _ = mixture(plan, phases, block, seed, 3 * size)
    assert list(chain.from_iterable(units(order, seed, epoch) for epoch in range(3))) == expected
    reader, place = order.reader(seed), data.draw(st.integers(0, 3 * size - 1))
    assert reader.samples(place // size, place % size, 1)[0].tolist() == expected[place]


def owners(order, seed=1, start=0, count=0):
    """Return the sources of the first epoch's units: of all, or of `count` from `start` on."""
    firsts = np.cumsum([source.samples or 0 for source in order.sources.values()])
    samples = order.reader(seed).samples(0, start, count or order.units)[0]
    return np.searchsorted(firsts, samples, "right")


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ([0.9999, 0.0001], 1024), ([10**30, 1, 10**26], 1024),
        ([1 / (k + 1) for k in range(300)], 64), ([1 / (k + 1) for k in range(1500)], 1024),
        ([0.9, 0.1], 8), ([3, 0, 2**70], 7),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the sources")
def test_shares(weights, block):
    """At a block's end, sources are off by less than a unit; rare ones by less than 1.68."""
    sources = {f"s{k}": cseq.Shuffled(50) for k in range(len(weights))}
    shares = dict(zip(sources, weights, strict=True))
    order = cseq.Mixture(sources, shares, block=block, epoch_size=100 * block)
    came = owners(order).reshape(100, block)
    share = np.array([float(weight / sum(weights)) for weight in weights])
    counts = np.array([np.bincount(row, minlength=len(weights)) for row in came]).cumsum(0)
    error = np.abs(counts - np.arange(1, 101)[:, None] * block * share)
    assert error[:, share * block >= 1].max() < 1
    assert error.max() < 1.68
    # The block is read without the earlier ones.
    there = 10**9 * block - 3
    more = cseq.Mixture(sources, shares, block=block, epoch_size=2**47)
    assert (owners(more, start=there, count=9) == owners(more, start=there - 4, count=13)[4:]).all()


# Sources of long and short documents, and of full and half-empty rows.
LONG = {"web": np.full(3000, 60), "books": np.full(900, 450), "code": np.arange(1, 800)}
ROWS = {name: cseq.Packed(lengths, 1000) for name, lengths in LONG.items()}


@pytest.mark.parametrize(
    "weights", [[1, 1, 1], [0.001, 1, 0.2], [1, 0.002, 0.001], [50, 10**6, 10**4]]
)
def test_shares_of_tokens(weights):
    """Weights of tokens hold for tokens, tiny or huge, for any lengths."""
    given = dict(zip(LONG, weights, strict=True))
    order = cseq.Mixture(ROWS, given, weights_of="tokens", epoch_size=200_000)
    samples = order.reader(5).samples(1, 0, order.units)[0]
    ends = np.cumsum([len(lengths) for lengths in LONG.values()])
    tokens = np.concatenate([*LONG.values()])[samples]
    found = np.bincount(ends.searchsorted(samples, "right"), tokens, 3) / tokens.sum()
    shares = np.array(weights) / sum(weights)
    assert (np.abs(found - shares) <= 0.01 * shares + 2 * 1000 / tokens.sum()).all()
    said = order.describe()
    assert "in blocks of 1024 by tokens: " in said
    assert f"{shares[0]:.3g} of web" in said


def test_a_state_says_which_tokens_were_meant():
    """It loads with weights of either kind; new weights during the run are of tokens, too."""
    weights = {"web": 1, "books": 1, "code": 2}
    order = cseq.Mixture(ROWS, weights, weights_of="tokens", epoch_size=3000)
    plain = cseq.Mixture(ROWS, weights, epoch_size=3000)
    assert "meant" not in plain.facts()
    facts = json.loads(json.dumps(order.facts()))
    assert facts["meant"] == {"weights": [[0, [1, 1, 2]]]}
    rates, means = facts["weights"][0][1], [order.tokens or 0 for order in ROWS.values()]
    assert np.multiply(rates, means) / means[0] == pytest.approx(rates[0] * np.array([1, 1, 2]))
    assert order.resumed(facts, 1, 0, 500) is order
    for other, state in ((plain, facts), (order, json.loads(json.dumps(plain.facts())))):
        after = other.resumed(state, 1, 0, 500)
        assert after.facts()["since"] == 500
        assert after.batches(seed=1, start=500)
    changed = order.reweighed({"web": 4, "books": 0, "code": 1}, 1, 0, 500)
    state = json.loads(json.dumps(changed.facts()))
    assert state["meant"] == {"weights": [[0, [1, 1, 2]]], "reweighed": [4, 0, 1]}
    again = order.resumed(state, 1, 0, 700)
    assert again.facts() == changed.facts()
    assert again.batches(seed=1, start=700) == changed.batches(seed=1, start=700)


def test_weights_beyond_floats_are_no_shares_of_tokens():
    """The error asks for smaller ones."""
    with pytest.raises(ValueError, match="too large for token shares; pass smaller"):
        cseq.Mixture(ROWS, dict.fromkeys(LONG, 1.7e308), weights_of="tokens")


def test_a_unit_is_anywhere_in_its_block():
    """A source that comes once in ten blocks comes equally often at each place of a block."""
    sources = shuffled({"a": 7, "b": 9})
    order = cseq.Mixture(sources, {"a": 1, "b": 159}, block=16, epoch_size=160 * 4000)
    places = np.flatnonzero(owners(order) == 0)
    assert len(places) == 4000
    counts = np.bincount(places % 16, minlength=16)
    assert np.abs(counts - 250).max() < 5 * math.sqrt(4000 / 16 * 15 / 16)


@pytest.mark.parametrize("weights", [[1, 1], [1, 3], [1, 2, 3, 2]])
def test_neighbouring_blocks_have_orders_of_their_own(weights):
    """In blocks of two, the previous block does not predict which source comes first."""
    sources = shuffled({f"s{k}": 9 for k in range(len(weights))})
    shares = dict(zip(sources, weights, strict=True))
    order = cseq.Mixture(sources, shares, block=2, epoch_size=40_000)
    pairs = owners(order).reshape(-1, 2)
    is_first = (pairs[:, 0] < pairs[:, 1])[pairs[:, 0] != pairs[:, 1]]
    n = len(is_first)
    assert n >= 10_000
    assert abs(is_first.sum() - n / 2) < 5 * math.sqrt(n) / 2
    for lag in (1, 2, 3):
        same = int((is_first[lag:] == is_first[:-lag]).sum())
        assert abs(same - (n - lag) / 2) < 5 * math.sqrt(n) / 2


@pytest.mark.filterwarnings("ignore:the sources")
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=5).filter(
        lambda pairs: any(weight for _, weight in pairs)
    ),
    st.integers(1, 40),
    st.sampled_from(["all", "first"]),
)
def test_an_epoch_ends_with_a_block(pairs, block, stop):
    """It ends with the first block after all sources had a pass, or before any begins another."""
    sizes = {f"s{k}": n for k, (n, _) in enumerate(pairs)}
    weights = {f"s{k}": weight for k, (_, weight) in enumerate(pairs)}
    longest = cseq.Mixture(shuffled(sizes), weights, block=block, epoch_size=block * 1000)
    came = owners(longest).reshape(-1, block)
    counts = np.array([np.bincount(row, minlength=len(pairs)) for row in came]).cumsum(0)
    needed = np.array([n if weight else 0 for n, weight in pairs])
    if stop == "all":
        blocks = int((counts >= needed).all(1).argmax()) + 1
    else:
        blocks = int((counts > needed).any(1).argmax())
    if blocks:
        order = cseq.Mixture(shuffled(sizes), weights, block=block, stop=stop)
        assert order.units == blocks * block
    else:
        with pytest.raises(ValueError, match="no epoch can end before a second pass"):
            cseq.Mixture(shuffled(sizes), weights, block=block, stop=stop)


def test_sources_that_hardly_come_are_named():
    """A warning and `describe` name sources with less than one unit per epoch, with the remedy."""
    names = [*(f"s{k}" for k in range(9)), "rest"]
    sources = shuffled(dict.fromkeys(names, 5))
    weights = {**dict.fromkeys(names, 1e-9), "rest": 1}
    with pytest.warns(UserWarning, match=r"s0, s1, s2, s3, s4, 4 more get less than") as caught:
        order = cseq.Mixture(sources, weights, epoch_size=1000)
    assert [warning.filename for warning in caught] == [__file__]
    assert "in an epoch of 1000; pass larger weights for them, a w" in str(caught[0].message)
    assert repr(order).endswith("; less than one unit of s0, s1, s2, s3, s4, 4 more>")
    later = [(0, weights), (900, {**dict.fromkeys(names, 1), "rest": 0})]
    for fine in (later, dict.fromkeys(names, 1 / 49), {**dict.fromkeys(names, 0), "rest": 1}):
        described = cseq.Mixture(sources, fine, epoch_size=49).describe()
        assert "less than" not in described


SIZES = {"web": 400, "code": 120, "math": 30}
OLD, NEW = {"web": 0.7, "code": 0.25, "math": 0.05}, {"web": 0.3, "code": 0.3, "math": 0.4}


def mixed(weights, block=32, **more):
    """Make a mixture, optionally with more sources."""
    sources = shuffled({**SIZES, **more})
    return cseq.Mixture({k: sources[k] for k in weights}, weights, block=block, epoch_size=90)


def test_weights_change_at_every_unit_of_two_blocks():
    """From any change on, the order equals the reference, which goes on with the passes begun."""
    old, new = mixed(OLD), mixed({**NEW, "books": 1}, books=50)
    plan = {name: source_of(source) for name, source in new.sources.items()}
    first = {name: plan[name] for name in SIZES}
    for consumed in range(65):
        again = new.resumed(json.loads(json.dumps(old.facts())), 1, 1, consumed)
        _, taken = mixture(first, [(0, [*OLD.values()])], 32, 1, 90 + consumed)
        phases = [(0, [*NEW.values(), 1])]
        expected, _ = mixture(plan, phases, 32, 1, 270, since=90 + consumed, taken=taken)
        drawn = again.reader(1).samples(1, consumed, 90 - consumed)[0].tolist()
        drawn += [sample for (sample,) in units(again, 1, 2)]
        assert [[sample] for sample in drawn] == expected
        third = new.resumed(json.loads(json.dumps(again.facts())), 1, 2, 5)
        assert third.facts() == again.facts()
        assert units(third, 1, 2) == units(again, 1, 2)


def test_a_mixture_inside_goes_on():
    """Weights of an inner mixture change, too."""

    def nested(weights):
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


def test_an_epoch_with_other_weights_is_padded():
    """Its beginning is repeated at its end, although other weights applied there."""
    again = mixed(NEW).resumed(mixed(OLD).facts(), 1, 1, 5)
    for rank in range(4):
        part = Sampler(
            550, again, batch_size=8, seed=1, drop_last=False, rank=rank, world_size=4
        ).source(1, 5)
        sizes = [len(part.samples(k)[0]) for k in range(len(part))]
        assert sizes == [8, 8, 6]
        assert part.samples(2)[0].max() < 550


def test_states_that_do_not_belong():
    """A state that cannot continue is refused, with both values and the remedy."""
    order = mixed(OLD)
    with pytest.raises(ValueError, match=r"source 'math': .*samples=30.*samples=31.*another name"):
        mixed(OLD, math=31).resumed(order.facts(), 1, 0, 5)
    with pytest.warns(UserWarning, match="the sources math get less than one unit"):
        small = cseq.Mixture(shuffled(SIZES), OLD, block=32, epoch_size=10)
    with pytest.raises(ValueError, match=r"unit 50 of an epoch.*only 10 units; pass epoch_size=90"):
        small.resumed(order.facts(), 1, 0, 50)


class NewRows(Rows):
    name = "rows-v2"
    replaced: ClassVar[dict[str, str]] = {"rows-v1": "rows are cut anew"}


def test_states_of_earlier_definitions():
    """They are refused, for the mixture and for each source; the message has the change."""
    order = cseq.Mixture({"a": NewRows(9), "b": Rows(9)}, {"a": 1, "b": 1})
    facts = order.facts()
    old = {**facts, "sources": [["a", {**facts["sources"][0][1], "name": "rows-v1"}], ["b", {}]]}
    with pytest.raises(ValueError, match=r"^source 'a': .*'rows-v2': rows are cut anew; finish"):
        order.resumed(old, 1, 0, 5)
    old["name"] = "mixture-v1"
    with pytest.raises(ValueError, match=r"'mixture-v2': a small weight no longer") as error:
        order.resumed(old, 1, 0, 5)
    assert str(error.value).endswith("; the saved source 'a' has name='rows-v1': rows are cut anew")
    assert "finish the run with the version of cseq that saved the state" in str(error.value)
    with pytest.raises(ValueError, match="the state of a Mixture is damaged: 'sources'"):
        order.resumed({"name": "mixture-v1"}, 1, 0, 5)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("block", 2**31, "block=2147483648 is above 65535"), ("block", 0, "block=0"),
        ("since", 2**64, "since=18446744073709551616"),
        ("units", 2**60, "units=1152921504606846976"),
        ("taken", {"text": -1}, r"taken\['text'\]=-1"), ("taken", 5, "damaged"),
        ("sources", 5, "damaged"), ("sources", [["text", 5]], "damaged"),
        ("weights", [[1, [1, 1]]], "damaged"), ("weights", [[0, [1, 1, 1]]], "damaged"),
        ("weights", [[0, [1, "x"]]], "damaged"), ("weights", [], "damaged"),
        ("weights", [[0, [0, 0]]], "all weights are 0"),
    ],
)  # fmt: skip
def test_states_that_are_damaged(key, value, says):
    """Numbers that no mixture can have are refused before anything is made from them."""
    order = cseq.Mixture(shuffled({"text": 50, "code": 40}), {"text": 3, "code": 1}, epoch_size=90)
    with pytest.raises(ValueError, match=says):
        order.resumed(order.facts() | {key: value}, 1, 0, 5)


def test_an_exception_of_a_source_leaves_it_as_it_was():
    """Later units are the same as without it."""

    class Failing(Rows):
        fails = False

        def read(self, seed, epoch, start, count):
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
