"""What `MSequence.state_dict` returns, and whether a state belongs to a manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.check import count
from cseq.order.base import MOST_SEED
from cseq.order.shuffled import Sequential

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler

__all__ = ["load", "make"]

VERSION = 2


def make(sampler: Sampler, world_size: int, epoch: int, consumed: int) -> dict[str, Any]:
    """Describe a position in the epochs of a sampler by a few JSON values."""
    return {
        "version": VERSION,
        "order": sampler.order.facts(),
        "seed": sampler.seed,
        "batch_size": sampler.batch_size,
        "world_size": world_size,
        "drop_last": sampler.drop_last,
        "epoch": epoch,
        "consumed": consumed,
    }


def _facts(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a state says of its order; version 1 knew samples one by one."""
    version = state.get("version")
    if version not in (1, VERSION):
        raise ValueError(
            f"the state has version={version!r}, this cseq reads 1 to {VERSION}; load it with the "
            "version of cseq that it was made with"
        )
    needed = {"algorithm", "dset_size", "shuffle"} if version == 1 else {"order"}
    missing = (needed | {"seed", "epoch", "consumed"}) - state.keys()
    if missing:
        raise ValueError(f"the state lacks {sorted(missing)}; give what state_dict() returned")
    if version == 1:
        name = state["algorithm"] if state["shuffle"] else Sequential.name
        return {"name": name, "samples": state["dset_size"]}
    facts = state["order"]
    if not isinstance(facts, dict):
        raise TypeError(f"the state has order={facts!r}; give what state_dict() returned")
    return facts


def load(state: dict[str, Any], sampler: Sampler, *, any_seed: bool) -> tuple[Sampler, int, int]:
    """Return the sampler that goes on with a state, and the state's epoch and units consumed.

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
    facts = _facts(state)
    seed = count("seed", state["seed"], 0, MOST_SEED)
    epoch = count("epoch", state["epoch"], 0, MOST_SEED)
    consumed = count("consumed", state["consumed"], least=0)
    order = sampler.order.resumed(facts, seed, epoch, consumed)
    if seed != sampler.seed and not any_seed:
        raise ValueError(
            f"the state has seed={seed}, but here it is seed={sampler.seed}; make it with the same "
            "(generator= of a DataLoader), or do not load this state"
        )
    if consumed > order.units:
        raise ValueError(f"the state has consumed={consumed} of {order.units} units of an epoch")
    if order is not sampler.order or seed != sampler.seed:
        sampler = sampler.changed(order=order, seed=seed)
    return sampler, epoch, consumed
