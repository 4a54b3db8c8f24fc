"""States: what they say, and which sampler they belong to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cseq.order import checkpoint
from cseq.order.sampler import Sampler


def sampler(**options: Any) -> Sampler:
    """Make a sampler of 100 samples."""
    given = {"batch_size": 8, "shuffle": True, "seed": 5, "drop_last": False} | options
    return Sampler(given.pop("dset_size", 100), **given)


def test_a_state_comes_back() -> None:
    """A state is JSON; a sampler of the same order takes it, whatever its batches."""
    state = checkpoint.make(sampler(), 2, 3, 48)
    assert json.loads(json.dumps(state)) == state
    assert state["world_size"] == 2
    assert checkpoint.check(state, sampler(batch_size=5), any_seed=False) == (3, 48)
    assert checkpoint.check(state, sampler(seed=6), any_seed=True) == (3, 48)


@pytest.mark.parametrize("other", [{"dset_size": 99}, {"shuffle": False}, {"seed": 6}])
def test_a_state_of_another_order(other: dict[str, Any]) -> None:
    """Another order is an error that names what differs."""
    [name] = other
    with pytest.raises(ValueError, match=f"the state has {name}="):
        checkpoint.check(checkpoint.make(sampler(**other), 1, 0, 0), sampler(), any_seed=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("algorithm", "other"),
        ("consumed", 101),
        ("epoch", -1),
        ("epoch", 1 << 64),
    ],
)
def test_a_bad_state(name: str, value: Any) -> None:
    """A value that no state can have is an error that names it, and so is a missing one."""
    state = checkpoint.make(sampler(), 1, 0, 0)
    with pytest.raises(ValueError, match=name):
        checkpoint.check(state | {name: value}, sampler(), any_seed=False)
    del state[name]
    with pytest.raises(ValueError, match=f"lacks.*{name}"):
        checkpoint.check(state, sampler(), any_seed=True)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_no_manager_has(seed: int) -> None:
    """It is refused before anything is loaded, also where a seed was drawn."""
    state = checkpoint.make(sampler(), 1, 0, 0) | {"seed": seed}
    with pytest.raises(ValueError, match="seed="):
        checkpoint.check(state, sampler(), any_seed=True)
