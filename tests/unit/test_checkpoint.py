"""States: their content, and the samplers that they fit."""

import pytest

from cseq.order import checkpoint
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential, Shuffled


def sampler(**options):
    """Make a sampler of 100 samples."""
    given = {"batch_size": 8, "seed": 5, "drop_last": False} | options
    order = given.pop("order", Shuffled(algorithm="fisher-yates-v1"))
    return Sampler(given.pop("dset_size", 100), order, **given)


PLACE = {
    "seed": 5, "batch_size": 8, "world_size": 2, "drop_last": False, "epoch": 3, "consumed": 48
}  # fmt: skip
FIRST = PLACE | {"version": 1, "algorithm": "fisher-yates-v1", "dset_size": 100, "shuffle": True}
SECOND = PLACE | {"version": 2, "order": {"name": "fisher-yates-v1", "samples": 100}}


def test_a_state_of_version_1():
    """It knew samples one by one: shuffled, by the algorithm's name, or not."""
    one = sampler()
    assert checkpoint.load(FIRST, one, any_seed=False) == (one, 3, 48)
    computed = sampler(order=Shuffled())
    assert checkpoint.load(FIRST | {"algorithm": "feistel-v1"}, computed, any_seed=False)[1] == 3
    natural = sampler(order=Sequential())
    assert checkpoint.load(FIRST | {"shuffle": False}, natural, any_seed=False)[1] == 3
    for changed in ({"algorithm": "feistel-v1"}, {"shuffle": False}, {"dset_size": 99}):
        with pytest.raises(ValueError, match=r"the saved order has .*, but the current order has"):
            checkpoint.load(FIRST | changed, one, any_seed=False)
    for name in ("algorithm", "dset_size", "shuffle", "seed"):
        with pytest.raises(ValueError, match=f"lacks.*{name}"):
            checkpoint.load({k: FIRST[k] for k in FIRST.keys() - {name}}, one, any_seed=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", 4), ("order", '{"name": "other"}'), ("order", "["), ("consumed", 102),
     ("seed", 6), ("consumed", 101), ("epoch", -1), ("epoch", 1 << 64)],
)  # fmt: skip
def test_a_bad_state(name, value):
    """An invalid value, or a missing one, is an error that names it."""
    state = checkpoint.make(sampler(), 1, 0, 0)
    with pytest.raises(ValueError, match=name):
        checkpoint.load(state | {name: value}, sampler(), any_seed=False)
    del state[name]
    with pytest.raises(ValueError, match=f"lacks.*{name}" if name != "version" else "version=None"):
        checkpoint.load(state, sampler(), any_seed=True)


def test_a_state_of_version_2():
    """It had a dict of the order, and no indices."""
    one = sampler(dset_size=list(range(100, 200)))
    assert checkpoint.load(SECOND, one, any_seed=False) == (one, 3, 48)
    with pytest.raises(ValueError, match="order"):
        checkpoint.load(SECOND | {"order": {"name": "other"}}, one, any_seed=False)
    with pytest.raises(TypeError, match="order=3"):
        checkpoint.load(SECOND | {"order": 3}, one, any_seed=False)


def test_a_state_of_other_indices():
    """The message has both fingerprints; strict=False continues at the same position."""
    one, other = (sampler(dset_size=range(first, first + 100)) for first in (0, 100))
    state = checkpoint.make(one, 1, 2, 40)
    with pytest.raises(ValueError, match=f"{one.fingerprint}.*{other.fingerprint}.*strict=False"):
        checkpoint.load(state, other, any_seed=False)
    assert checkpoint.load(state, other, any_seed=False, strict=False) == (other, 2, 40)
    fewer = sampler(dset_size=30)
    with pytest.raises(ValueError, match="consumed=40, but an epoch has only 30 units"):
        checkpoint.load(state, fewer, any_seed=False, strict=False)
