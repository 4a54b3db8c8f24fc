"""Creates and validates the states that `MSequence.state_dict` returns."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from cseq.check import integer
from cseq.order.base import AGAIN, MOST_SEED
from cseq.order.shuffled import Sequential

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler

VERSION = 3


def make(
    sampler: Sampler,
    world_size: int,
    epoch: int,
    consumed: int,
    tokens: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Return a state that describes a position in a sampler's epochs.

    All states have the same keys and no nested dicts, as torch's distributed checkpoints require.
    """
    return {
        "version": VERSION,
        "order": sampler.facts,
        "indices": sampler.fingerprint,
        "data": None if sampler.data is None else json.dumps(sampler.data.fingerprints),
        "seed": sampler.seed,
        "batch_size": sampler.batch_size,
        "world_size": world_size,
        "drop_last": sampler.drop_last,
        "epoch": epoch,
        "consumed": consumed,
        "tokens": json.dumps(tokens or {}),
    }


def _facts_in(state: dict[str, Any]) -> dict[str, Any]:
    """Check the version and keys of a state, and return the facts of its order."""
    version, remedy = state.get("version"), "pass the dict that state_dict() returned"
    if version not in (1, 2, VERSION):
        raise ValueError(
            f"the state has version={version!r}, but this version of cseq reads only versions "
            f"1 to {VERSION}; load the state with the version of cseq that saved it"
        )
    first = {"algorithm", "shuffle", "dset_size"} if version == 1 else {"order"}
    if missing := (first | {"seed", "epoch", "consumed"}) - state.keys():
        raise ValueError(f"the state lacks the keys {sorted(missing)}; {remedy}")
    # Version 1 supported only shuffled and sequential orders. Version 2 stored the order as a
    # dict, and did not store a fingerprint of the indices.
    if version == 1:
        name = state["algorithm"] if state["shuffle"] else Sequential.name
        return {"name": name, "samples": state["dset_size"]}
    facts = state["order"]
    try:
        facts = facts if version == 2 else json.loads(facts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state has an invalid order={facts!r}; {remedy}") from error
    if not isinstance(facts, dict):
        raise TypeError(f"the state has an invalid order={facts!r}; {remedy}")
    return facts


def load(
    state: dict[str, Any], sampler: Sampler, *, any_seed: bool, strict: bool = True
) -> tuple[Sampler, int, int]:
    """Return the sampler, the epoch, and the number of consumed units to continue from.

    Raises TypeError or ValueError if the state is invalid, if its seed differs and `any_seed` is
    not set, or if its order, indices or data differ and `strict` is set.
    """
    if not isinstance(state, dict):
        raise TypeError(f"state={state!r} is not a dict; pass the dict that state_dict() returned")
    facts = _facts_in(state)
    seed = integer("seed", state["seed"], 0, MOST_SEED)
    epoch = integer("epoch", state["epoch"], 0, MOST_SEED)
    consumed = integer("consumed", state["consumed"], least=0)
    order = sampler.order
    fingerprints = {} if sampler.data is None else sampler.data.fingerprints
    try:
        order = order.resumed(facts, seed, epoch, consumed)
        fingerprint = state.get("indices", sampler.fingerprint)
        if fingerprint != sampler.fingerprint:
            raise ValueError(
                f"the sample indices have fingerprint {fingerprint} in the state, but "
                f"{sampler.fingerprint} now (None means that no indices were passed); {AGAIN}"
            )
        before = json.loads(state.get("data") or "{}")
        for name in before.keys() & fingerprints.keys():
            if before[name] != fingerprints[name]:
                raise ValueError(
                    f"the content of source {name!r} has changed: its fingerprint is "
                    f"{before[name]} in the state, but {fingerprints[name]} now; {AGAIN}"
                )
    except ValueError:
        if strict:
            raise
    if seed != sampler.seed and not any_seed:
        raise ValueError(
            f"the state was saved with seed={seed}, but the current seed is {sampler.seed}; pass "
            "the same seed (or generator= to a DataLoader), or do not load this state"
        )
    if consumed > order.units:
        raise ValueError(
            f"the state has consumed={consumed}, but an epoch has only {order.units} units; use "
            "the same data as when the state was saved, or do not load this state"
        )
    if order is not sampler.order or seed != sampler.seed:
        sampler = sampler.changed(order=order, seed=seed)
    return sampler, epoch, consumed


def tokens_of(state: dict[str, Any]) -> Counter[str]:
    """Return the number of tokens consumed from each source, as recorded in a state."""
    given = state.get("tokens") or "{}"
    try:
        return Counter({name: integer(name, n, 0) for name, n in json.loads(given).items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the state has invalid tokens={given!r}; pass the dict that state_dict() returned"
        ) from error
