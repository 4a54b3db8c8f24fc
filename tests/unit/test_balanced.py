"""`Balanced`: golden records, the same rows in the same steps, and equal work for all ranks."""

import itertools
import json

import golden
import numpy as np
import pytest
from reference_draws import balanced

import cseq
from cseq.order._readers import DocumentEnds, deal
from cseq.order.sampler import Sampler

ROW = 8192


def lengths_of(count):
    """Return lengths like web pages', some of them longer than a row."""
    drawn = np.random.default_rng(5).lognormal(np.log(700) - 0.72, 1.2, count)
    return drawn.clip(2, 60_000).astype(np.int64)


LENGTHS = lengths_of(300_000)
SMALL = (lengths_of(300) // 64).tolist()
KINDS = {
    "packed": lambda lengths, row: cseq.Packed(lengths, row, too_long="split"),
    "concatenated": cseq.Concatenated,
    "mixture": lambda lengths, row: cseq.Mixture(
        {
            "a": cseq.Packed(lengths[::3], row, too_long="split"),
            "b": cseq.Resized(cseq.Concatenated(lengths[1::3], row), 30),
            "c": cseq.Concatenated(lengths[2::3], row),
        },
        {"a": 1, "b": 1, "c": 2},
        block=64,
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def work_of(lengths, row, pieces):
    """Return the work of a row from an indexer's data."""
    documents, begins = DocumentEnds(lengths).find(pieces)
    left, work = row, 0
    for length in (np.asarray(lengths)[documents] - (pieces - begins)).tolist():
        work += min(length, left) ** 2
        left -= min(length, left)
    return work


def works_of(order, epoch=0):
    """Return the work of each row from its content."""
    samples, sizes = order.reader(7).samples(epoch, 0, order.units)
    works = order.measured(7)[1](epoch, np.arange(order.units))
    rows = np.split(samples, np.cumsum(sizes)[:-1])
    return {row.tobytes(): work for row, work in zip(rows, works.tolist(), strict=True)}


def of_ranks(order, ranks, size):
    """Return the rows of each global batch, by rank."""
    each = []
    for rank in range(ranks):
        options = {"rank": rank, "world_size": ranks, "drop_last": True}
        sampler = Sampler(order.samples, order, batch_size=size, seed=7, **options)
        source = sampler.source(0, 0)
        batches = (source.samples(k) for k in range(len(source)))
        each.append(
            [
                [row.tobytes() for row in np.split(samples, np.cumsum(sizes)[:-1])]
                for samples, sizes in batches
            ]
        )
    return [list(batches) for batches in zip(*each, strict=True)]


@pytest.mark.parametrize("record", golden.records("orders_balanced"), ids=str)
def test_the_page_defines_the_golden_file(record):
    """All rows are the inner order's, in the order that docs/inside/orders.md defines."""
    options = {key: record[key] for key in ("step", "over", "together", "seed", "epoch")}
    seed, epoch = options["seed"], options["epoch"]
    inner = golden.rows(record["kind"], golden.lengths(*record["lengths"]), record["row"])
    works = inner.measured(seed)[1](epoch, np.arange(inner.units)).tolist()
    rows = inner.batches(seed=seed, epoch=epoch)
    numbers = balanced(works, **options)
    assert sorted(numbers) == list(range(len(rows)))
    assert golden.order("balanced-v1", record) == golden.of_units([rows[k] for k in numbers])


@every_kind
def test_the_work_of_rows(kind):
    """It is the sum of the squares of its pieces' lengths, in whole quanta."""
    assert sorted(works_of(cseq.Packed([3, 5, 4, 9, 10, 3], 12)).values()) == [50, 90, 100]
    assert sorted(works_of(cseq.Packed([3, 5, 4, 9], 12, quantum=4)).values()) == [16, 80, 144]
    if kind == "mixture":
        order = cseq.Mixture({"a": KINDS["packed"](SMALL, 100)}, {"a": 1}, block=8)
        order = cseq.Mixture({"b": cseq.Resized(order, 17)}, {"b": 1}, block=8)
    else:
        order = KINDS[kind](SMALL, 100)
    for row, work in works_of(order, epoch=3).items():
        assert work == work_of(SMALL, 100, np.frombuffer(row, np.int64))


@every_kind
@pytest.mark.parametrize(("over", "steps"), [("step", 1), ("window", 16), ("epoch", 10**9)])
def test_rows_stay_in_their_window(kind, over, steps):
    """Each row comes once, in its step, window or epoch; the rest stays."""
    inner = KINDS[kind](LENGTHS[:7000], 1024)
    rows = inner.batches(seed=7, epoch=2)
    order = cseq.Balanced(inner, 12, over=over)
    window = min(12 * steps, len(rows) // 12 * 12)
    found = order.batches(seed=7, epoch=2)
    assert found != rows
    for at in range(0, len(rows), window):
        assert sorted(found[at : at + window]) == sorted(rows[at : at + window])
    assert order.left_out == inner.left_out
    if over == "step":
        tail = len(rows) - len(rows) % 12
        assert found[tail:] == rows[tail:]


def test_a_step_that_is_no_multiple_of_the_global_batch(caplog):
    """A batch that covers two steps is dealt as it comes, and the log says so once."""
    order = cseq.Balanced(KINDS["packed"](SMALL, 100), 13)
    found = [of_ranks(order, ranks, 4 // ranks) for ranks in (1, 2, 2)]
    alone, *others = ([sorted(itertools.chain(*rows)) for rows in each] for each in found)
    assert others == [alone] * 2
    [told] = caplog.messages
    assert told.startswith("step=13 is not a multiple of the global batch of 4 rows")


# The slowest rank's work over the mean, for steps of 64 ranks and 4 microbatches.
MOST = {
    ("packed", "step"): (1.1, 1.6),
    ("concatenated", "step"): (1.35, 1.7),
    **{(kind, "window"): (1.05, 1.05) for kind in ("packed", "concatenated")},
    **{(kind, "epoch"): (1.01, 1.01) for kind in ("packed", "concatenated")},
}


def slowest(order, ranks, size):
    """Return how long ranks work if they wait once a step, and at each microbatch."""
    works, step = works_of(order.order), order.step  # type: ignore[attr-defined]
    batches = of_ranks(order, ranks, size)
    found = [*itertools.chain(*itertools.chain(*batches))]
    assert len(set(found)) == len(found)
    count = step // (ranks * size)
    work = np.array([[sum(map(works.__getitem__, rows)) for rows in batch] for batch in batches])
    work = work[: len(work) // count * count].reshape(-1, count, ranks)
    once = work.sum(1).max(1) / work.sum(1).mean(1)
    each = work.max(2).sum(1) / work.mean(2).sum(1)
    return float(once.mean()), float(each.mean())


@pytest.mark.parametrize(("kind", "over"), MOST)
def test_ranks_have_equal_work(kind, over):
    """64 ranks wait once a step or at each of 4 microbatches; so do 8 and 2."""
    count = 300_000 if over == "epoch" else 60_000
    order = cseq.Balanced(KINDS[kind](LENGTHS[:count], ROW), 256, over=over)
    once, each = slowest(order, 64, 1)
    assert 1 < once <= MOST[kind, over][0]
    assert 1 < each <= MOST[kind, over][1]
    if over == "epoch":
        return
    # At four rows at once, there are no microbatches.
    assert slowest(order, 64, 4)[1] <= MOST[kind, over][0]
    for ranks in (8, 2):
        once, each = slowest(order, ranks, 1)
        assert once <= 1.01
        assert each <= 1.1


def test_without_balance_ranks_wait():
    """The test measures unbalanced rows, for comparison with the bounds."""
    inner = KINDS["packed"](LENGTHS[:60_000], ROW)
    plain = cseq.Balanced(inner, 64, together=64)
    plain.reader = inner.reader
    assert slowest(plain, 64, 1)[1] > 3


def test_rows_are_dealt_to_whom_has_least():
    """The next row goes to the rank with the least work that has room in its batch."""
    works = np.array([9.0, 8, 7, 3, 2, 1])
    owners, turns = deal(works, np.zeros(6, np.int64), 2, 1, 3)
    assert owners.tolist() == [0, 1, 1, 0, 0, 1]
    assert turns.tolist() == [0, 0, 1, 1, 2, 2]
    owners, turns = deal(works, np.array([0, 1, 0, 1, 2, 2]), 2, 3, 1)
    assert owners.tolist() == [0, 1, 1, 0, 0, 1]
    assert turns.tolist() == [0] * 6
    for arguments, said in (
        ((works, np.zeros(6, np.int64), 4, 1, 1), "expected 4 x 1 x 1 rows of float64, got 6"),
        ((works.astype(np.float32), np.zeros(6, np.int64), 2, 3, 1), "of float64"),
        ((works, np.zeros(6, np.int64), 2, 3, 1), "batch 0 has more than 2 x 1"),
    ):
        with pytest.raises(ValueError, match=said):
            deal(*arguments)
    with pytest.raises(IndexError, match="batch 3 is not below 3"):
        deal(works, np.full(6, 3), 2, 3, 1)


def mixed(weights, names="ab"):
    """Return a balanced mixture of rows of different lengths."""
    parts = {name: cseq.Concatenated(SMALL[k::3], 20) for k, name in enumerate(names)}
    return cseq.Balanced(cseq.Mixture(parts, weights, block=8, epoch_size=60), 12)


def test_other_weights_begin_with_a_step():
    """A state after whole steps loads into a mixture with other weights, or one more source."""
    before, after = mixed({"a": 1, "b": 1}), mixed({"a": 1, "b": 3, "c": 1}, "abc")
    facts = json.loads(json.dumps(before.facts()))
    assert before.resumed(facts, 7, 2, 5) is before
    going = after.resumed(facts, 7, 2, 24)
    inner = after.order.resumed(facts["order"], 7, 2, 24)
    # Each step has the rows of the mixture alone.
    for at in range(24, 60, 12):
        rows = [order.batches(seed=7, epoch=2, start=at, stop=at + 12) for order in (going, inner)]
        assert sorted(rows[0]) == sorted(rows[1])
    for where in (25, 30):
        with pytest.raises(ValueError, match=f"change after row {where} .* window of 12 rows"):
            after.resumed(facts, 7, 2, where)
    with pytest.raises(ValueError, match="step=12, but the current order has step=24"):
        cseq.Balanced(before.order, 24).resumed(facts, 7, 2, 24)
    # The state is the same mixture's, in the middle of a step.
    later = json.loads(json.dumps(going.facts()))
    again = after.resumed(later, 7, 2, 31)
    for epoch, start in ((2, 31), (3, 0), (4, 0)):
        rest = [order.batches(seed=7, epoch=epoch, start=start) for order in (again, going)]
        assert rest[0] == rest[1]


def test_weights_change_between_steps():
    """`reweigh` takes effect at the next step; elsewhere, the error says where it may be called."""
    order = mixed({"a": 1, "b": 1})
    options = {"batch_size": 6, "seed": 7, "out_type": "null"}
    manager = cseq.MTSequence(lambda: np.arange(order.samples or 0), order=order, **options)
    with manager.start_test() as batches:
        taken = iter(batches)
        next(taken)
        with pytest.raises(ValueError, match="the order cannot change after row 6 of an epoch"):
            manager.reweigh({"a": 0, "b": 1})
        next(taken)
        manager.reweigh({"a": 0, "b": 1})
        rest = np.concatenate(list(taken))
    changed = order.reweighed({"a": 0, "b": 1}, 7, 0, 12).batches(seed=7, start=12)
    assert rest.tolist() == list(itertools.chain(*changed))
    assert min(rest) >= (order.order.sources["a"].samples or 0)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="has no weights"):
        cseq.Balanced(KINDS["packed"](SMALL, 100), 4).reweighed({}, 7, 0, 0)
