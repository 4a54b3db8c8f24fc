"""What `MSequence.state_dict` returns, and whether a state belongs to a manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.check import count
from cseq.order.sampler import MOST_SEED

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler

__all__ = ["check", "make"]

VERSION = 1


def _order(sampler: Sampler) -> dict[str, Any]:
    """Return the format's version, and what the order of the epochs depends on but the seed."""
    return {
        "version": VERSION,
        "algorithm": sampler.algorithm,
        "dset_size": sampler.dset_size,
        "shuffle": sampler.shuffle,
    }


def make(sampler: Sampler, world_size: int, epoch: int, consumed: int) -> dict[str, Any]:
    """Describe a position in the epochs of a sampler by a few JSON values."""
    return _order(sampler) | {
        "seed": sampler.seed,
        "batch_size": sampler.batch_size,
        "world_size": world_size,
        "drop_last": sampler.drop_last,
        "epoch": epoch,
        "consumed": consumed,
    }


def check(state: dict[str, Any], sampler: Sampler, *, any_seed: bool) -> tuple[int, int]:
    """Return a state's epoch and samples consumed.

    Raises
    ------
    TypeError
        The state is no dict, or a number in it is none.
    ValueError
        The state is of another order, or of another seed, unless `any_seed`; or a number in it is
        too large or too small.
    """
    if not isinstance(state, dict):
        raise TypeError(f"state={state!r}: give the dict that state_dict() returned")
    ours = _order(sampler)
    if not any_seed:
        ours["seed"] = sampler.seed
    missing = {*ours, "seed", "epoch", "consumed"} - state.keys()
    if missing:
        raise ValueError(f"the state lacks {sorted(missing)}; give what state_dict() returned")
    for name, value in ours.items():
        if state[name] != value:
            raise ValueError(
                f"the state has {name}={state[name]!r}, this manager has {name}={value!r}; "
                "make it with the same, or do not load this state"
            )
    count("seed", state["seed"], 0, MOST_SEED)
    epoch = count("epoch", state["epoch"], 0, MOST_SEED)
    consumed = count("consumed", state["consumed"], least=0)
    if consumed > sampler.dset_size:
        raise ValueError(f"the state has consumed={consumed} of {sampler.dset_size} samples")
    return epoch, consumed
