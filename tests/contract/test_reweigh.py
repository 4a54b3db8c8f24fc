"""`MSequence.reweigh`: new weights of a mixture in the middle of a run."""

import json
import random

import numpy as np
import pytest
from kinds import QUICK, THREAD, by_name

import cseq

SIZES = {"a": 70, "b": 30, "c": 11}
FIRSTS = {"a": 0, "b": 70, "c": 100}


def mixture(a=2, b=1, c=1):
    """Make a mixture of three sources with these weights."""
    sources = {name: cseq.Shuffled(size) for name, size in SIZES.items()}
    return cseq.Mixture(sources, {"a": a, "b": b, "c": c}, block=16, epoch_size=240)


def manager(kind=THREAD, **options):
    """Make a manager of the mixture."""
    given = {"batch_size": 4, "seed": 5, "order": mixture()}
    return kind.make(np.arange(111), None, **given | options)


def weights_at(step):
    """Return the weights that follow the given number of batches, if any."""
    chosen = random.Random(step)
    if chosen.random() < 0.6:
        return None
    return {"a": chosen.random(), "b": chosen.randint(0, 3), "c": 10 ** -chosen.randint(0, 4)}


def run(made, steps, start=0):
    """Take batches over epochs, and change the weights after some; the count of steps continues."""
    taken = []
    while True:
        for batch in made:
            taken.append(batch.tolist())
            if (weights := weights_at(start + len(taken))) is not None:
                made.reweigh(weights)
            if len(taken) == steps:
                return taken


def whole(steps):
    """Return the batches of test mode."""
    with manager().start_test() as made:
        return run(made, steps)


@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_batches_are_those_of_test_mode(kind):
    """Any batches may be in flight when the weights change, even an epoch's last one."""
    with kind.begin(manager(kind, buffer=9)) as made:
        assert run(made, 400) == whole(400)


def test_a_thousand_changes():
    """Each source continues at its position, with the samples of its own passes."""
    batches = whole(2500)
    assert sum(weights_at(step) is not None for step in range(1, 2501)) > 900
    samples = np.concatenate(batches)
    for name, size in SIZES.items():
        first = FIRSTS[name]
        own = samples[(samples >= first) & (samples < first + size)] - first
        for start in range(0, len(own), size):
            chunk = own[start : start + size]
            assert len(set(chunk.tolist())) == len(chunk)


def test_the_shares_are_those_of_the_weights():
    """Each stretch of equal weights has these shares, to a unit and a block."""
    with manager().start_test() as made:
        taken = []
        for step, batch in enumerate(made):
            taken += batch.tolist()
            if step == 9:
                made.reweigh({"a": 0, "b": 3, "c": 1})
            if step == 29:
                made.reweigh({"a": 1, "b": 0, "c": 0})
    owners = np.digitize(taken, [70, 100])
    assert np.bincount(owners[40:120], minlength=3).tolist() == [0, 60, 20]
    assert set(owners[120:]) == {0}
    assert len(taken) == 240


@pytest.mark.parametrize("stop", [1, 59, 60, 61, 137])
def test_a_state_has_the_weights(stop):
    """A manager whose mixture has the first weights loads it, and continues with the new ones."""
    expected = whole(300)
    with manager().start_test() as made:
        assert run(made, stop) == expected[:stop]
        state = json.loads(json.dumps(made.state_dict()))
    again = manager(num_workers=1)
    again.load_state_dict(state)
    with again.start() as made:
        assert run(made, 300 - stop, stop) == expected[stop:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_change_after_the_same_batch(world_size):
    """Together they have the batches of one rank."""
    steps, size = 130, 12
    with manager(batch_size=size).start_test() as made:
        expected = run(made, steps)
    parts = []
    for rank in range(world_size):
        options = {"batch_size": size // world_size, "shard": (rank, world_size)}
        with manager(**options).start_test() as made:
            parts.append(run(made, steps))
    for ours, *theirs in zip(expected, *parts, strict=True):
        assert ours == [sample for part in theirs for sample in part]


def test_weights_that_were_given_again_win():
    """A mixture made with other weights continues from the state's position with them."""
    with manager().start_test() as made:
        run(made, 7)
        made.reweigh({"a": 0, "b": 0, "c": 1})
        state = made.state_dict()
    again = manager(order=mixture(1, 0, 0))
    again.load_state_dict(state)
    with again.start_test() as made:
        assert all(sample < 70 for batch in made for sample in batch)


def test_before_the_start_and_between_two():
    """The next batch has the new weights."""
    made = manager()
    made.reweigh({"a": 0, "b": 1, "c": 0})
    with made.start() as batches:
        first = next(iter(batches)).tolist()
        assert all(70 <= sample < 100 for sample in first)
    made.reweigh({"a": 0, "b": 0, "c": 1})
    with made.start() as batches:
        assert all(sample >= 100 for sample in next(iter(batches)))


@pytest.mark.parametrize(
    ("options", "weights", "text"),
    [
        ({"order": cseq.Shuffled(111)}, {}, "has no weights; pass a cseq.Mixture"),
        ({"ordered": False}, {"a": 1, "b": 1, "c": 1}, "ordered=False"),
        ({"repeat": 2}, {"a": 1, "b": 1, "c": 1}, "repeat=2"),
        ({}, {"a": 1}, "weights lacks source 'b'"),
        ({}, {"a": 0, "b": 0, "c": 0}, "all weights are 0"),
    ],
)
def test_what_cannot_be(options, weights, text):
    """The message names the problem, and nothing changes."""
    made = manager(**options)
    before = made.state_dict()
    with pytest.raises((TypeError, ValueError), match=text):
        made.reweigh(weights)
    assert made.state_dict() == before
