"""Orders that mix several orders by weight or change the epoch size of an order."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from cseq.check import choice, integer
from cseq.order._readers import MIXTURE, seed_of, shuffle
from cseq.order.base import MOST_SAMPLES, WORD, Order, runs
from cseq.order.shares import Shares
from cseq.order.sources import MOST_SOURCES, Composed, by_source, check_sources, passes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from cseq.order.base import Ints, Sums
    from cseq.order.sources import Drawn, Draws

# Maximum number of sources to list in a message.
SHOWN = 5

Weights: TypeAlias = Mapping[str, float]


class Mixture(Composed):
    """Mixes units from several orders according to weights.

    The mixture is divided into blocks, with the units of a block in random order. After each
    block, the number of units from a source is within one unit of its exact share, or within 1.7
    units for sources with less than one unit per block.

    Each source is read repeatedly, in a different order in every pass. Passes continue across
    epochs. Samples are numbered consecutively over all sources.

    Parameters
    ----------
    sources : dict of str to Order
        The orders to mix, by name, with the same type of units (samples, rows or batches). The
        order of a source depends on its name, but not on other sources.
    weights : dict of str to number, or list of (int, dict)
        The share of each source. Only the ratios matter. A weight of 0 excludes a source. For a
        curriculum, pass a list of (unit, weights), starting with unit 0. Units are counted over
        all epochs, and weights take effect at the next block.
    weights_of : 'units' or 'tokens'
        What the weights measure. With 'tokens', a source with longer rows gets fewer rows for the
        same weight. Use it for `Packed` and `Concatenated`.
    block : int
        The number of units in a block. It may be smaller than the number of sources.
    epoch_size : int, optional
        The number of units in an epoch.
    stop : 'all' or 'first'
        Where an epoch ends by default: after every source has completed a pass ('all'), or before
        any source starts a second pass ('first'). The epoch size is a multiple of `block`, and is
        based on the first weights.

    Warns
    -----
    UserWarning
        If sources with nonzero weights contribute less than one unit per epoch.

    Notes
    -----
    A state can be loaded into a mixture with other weights, blocks or sources. The sources continue
    from their saved positions. The epoch size must not change: pass `epoch_size` if necessary.

    Examples
    --------
    >>> sources = {"web": cseq.Shuffled(70), "code": cseq.Shuffled(30)}
    >>> order = cseq.Mixture(sources, {"web": 3, "code": 1}, block=8, epoch_size=16)
    >>> [sum(sample >= 70 for sample in block) for block in order.batches(8, seed=1)]
    [2, 2]
    """

    name = "mixture-v2"
    _reweighed: list[float] | None = None
    _meant: dict[str, Any] = {}  # noqa: RUF012 - never changed
    replaced: ClassVar[dict[str, str]] = {
        "mixture-v1": "a small weight no longer gives a source at least one unit of every block"
    }

    def __init__(
        self,
        sources: Mapping[str, Order],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        weights_of: Literal["units", "tokens"] = "units",
        block: int = 1024,
        epoch_size: int | None = None,
        stop: Literal["all", "first"] = "all",
    ) -> None:
        self.sources = check_sources(sources)
        length = integer("block", block, 1, MOST_SOURCES)
        given = _phases(weights, list(self.sources))
        self._by_tokens = choice("weights_of", weights_of, ("units", "tokens")) == "tokens"
        if self._by_tokens:
            self._meant = {"weights": [[unit, list(values)] for unit, values in given]}
        self._given = [(unit, self._rates(values)) for unit, values in given]
        self._plan = _Plan(list(self.sources), self._given, length, 0, {})
        members = list(self.sources.values())
        lost = [
            f"in {name}, {part.left_out}" for name, part in self.sources.items() if part.left_out
        ]
        self.left_out = _listed(lost)
        self.samples = sum(order.samples or 0 for order in members)
        self.room = max(order.room for order in members)
        self.is_batch = members[0].is_batch
        choice("stop", stop, ("all", "first"))
        self.units = (
            self._end(stop)
            if epoch_size is None
            else integer("epoch_size", epoch_size, 1, MOST_SAMPLES)
        )
        if rare := self._rare():
            warnings.warn(
                f"the sources {_listed(rare)} get less than one unit in an epoch of {self.units}; "
                "pass larger weights for them, a weight of 0, or a larger epoch_size",
                stacklevel=2,
            )

    def _rates(self, weights: list[float]) -> list[float]:
        """Convert token weights to unit weights."""
        if not self._by_tokens:
            return weights
        for name, order in self.sources.items():
            if order.tokens is None:
                raise TypeError(
                    f"weights_of='tokens' needs the mean number of tokens in a unit, but "
                    f"sources[{name!r}]={order!r} does not provide it; pass a Packed or "
                    "Concatenated order, or a Resized or Balanced that wraps one"
                )
        means = [order.tokens or 1.0 for order in self.sources.values()]
        rates = [weight * (max(means) / mean) for weight, mean in zip(weights, means, strict=True)]
        if not all(map(math.isfinite, rates)):
            raise ValueError(f"weights={weights} are too large for token shares; pass smaller ones")
        return rates

    def _end(self, stop: str) -> int:
        """Return the default epoch size, which is a multiple of the block size."""
        shares = self._plan.shares[0]
        used = zip(self.sources.values(), shares.whole, strict=True)
        units = np.array([order.units if weight else 0 for order, weight in used], np.uint64)

        def is_over(blocks: int) -> bool:
            before = shares.before(blocks)
            return bool((before >= units).all() if stop == "all" else (before > units).any())

        most = MOST_SAMPLES // shares.block
        if not is_over(most):
            name = [*self.sources][int((shares.before(most) < units).argmax())]
            raise ValueError(
                f"with stop={stop!r}, source {name!r} makes an epoch longer than {MOST_SAMPLES} "
                "units; pass epoch_size or other weights"
            )
        blocks = bisect.bisect_left(range(most), 1, key=is_over) - (stop == "first")
        if not blocks:
            s = int((shares.before(1) > units).argmax())
            raise ValueError(
                f"source {[*self.sources][s]!r} has {units[s]} units, but the first block of "
                f"{shares.block} needs {shares.before(1)[s]}, so no epoch can end before a second "
                "pass; pass a smaller block, stop='all' or epoch_size"
            )
        return blocks * shares.block

    def _rare(self) -> list[str]:
        """Return sources with nonzero weight but less than one unit per epoch in every phase."""
        phases = self._plan.shares
        return [
            name
            for s, name in enumerate(self.sources)
            if any(phase.whole[s] for phase in phases)
            and all(phase.whole[s] * self.units < phase.total for phase in phases)
        ]

    def facts(self) -> dict[str, Any]:
        """Return everything that determines the order.

        `weights` are the original unit weights, `meant` the token weights, and `reweighed` the unit
        weights set later. The plan starts at unit `since`, after `taken` units from each source.
        """
        plan = self._plan
        return ({"meant": self._meant} if self._by_tokens else {}) | {
            "name": self.name,
            "samples": self.samples,
            "units": self.units,
            "block": plan.block,
            "sources": [[name, order.facts()] for name, order in self.sources.items()],
            "weights": [[unit, list(weights)] for unit, weights in self._given],
            "reweighed": self._reweighed,
            "since": plan.since,
            "taken": dict(plan.taken),
        }

    def resumed(self, facts: dict[str, Any], seed: int, epoch: int, consumed: int) -> Self:
        ours = self.facts()
        if facts == ours:
            return self
        if facts.get("name") != self.name or ours.keys() - facts.keys() - {"meant"}:
            try:
                return super().resumed(facts, seed, epoch, consumed)
            except ValueError as error:
                raise ValueError("; ".join([str(error), *self._outdated(facts)])) from None
        before, source_facts = _before(facts)
        if consumed > self.units:
            raise ValueError(
                f"the state is at unit {consumed} of an epoch, but an epoch of this mixture has "
                f"only {self.units} units; pass epoch_size={facts['units']}"
            )
        taken = before.taken_before(seed, epoch * facts["units"] + consumed)
        order = copy.copy(self)
        order.sources = {
            name: self._source(name, source_facts.get(name), seed, taken.get(name, 0))
            for name in self.sources
        }
        same = all(facts[key] == ours[key] for key in ("units", "block", "weights"))
        if same and [*source_facts] == [*self.sources]:
            order._plan, order._reweighed = before, facts["reweighed"]
            order._meant = facts.get("meant", self._meant)
        else:
            order._reweighed = None
            since = epoch * self.units + consumed & WORD
            order._plan = _Plan(list(self.sources), self._given, self._plan.block, since, taken)
        return order

    def reweighed(self, weights: Weights, seed: int, epoch: int, consumed: int) -> Self:
        """Return an order that uses new weights from a position onwards; see `MSequence.reweigh`.

        The epoch size does not change. After loading a state of the new order, a mixture with the
        original weights also continues with the new weights.
        """
        names, plan = list(self.sources), self._plan
        unit = epoch * self.units + consumed
        order, given = copy.copy(self), _weights(weights, names)
        order._reweighed = self._rates(given)
        order._meant = self._meant | {"reweighed": given}
        taken = plan.taken_before(seed, unit)
        order._plan = _Plan(names, [(0, order._reweighed)], plan.block, unit & WORD, taken)
        return order

    def _outdated(self, facts: dict[str, Any]) -> list[str]:
        """Describe what has changed in the sources since an older version."""
        if str(facts.get("name")) not in self.replaced:
            return []
        _, source_facts = _before(facts)
        names = {name: str(values.get("name")) for name, values in source_facts.items()}
        return [
            f"the saved source {name!r} has name={names[name]!r}: {order.replaced[names[name]]}"
            for name, order in self.sources.items()
            if names.get(name) in order.replaced
        ]

    def _source(self, name: str, facts: dict[str, Any] | None, seed: int, taken: int) -> Order:
        order = self.sources[name]
        if facts is None or facts == order.facts():
            return order
        # If the length of a pass has changed, the saved position in it is meaningless.
        same = facts.get("units", order.units) == order.units
        resumed = order.resumed if same else partial(Order.resumed, order)
        try:
            return resumed(facts, seed_of(seed, name), *divmod(taken, order.units))
        except ValueError as error:
            raise ValueError(f"source {name!r}: {error}; or give the source another name") from None

    def seeded(self, seed: int) -> list[tuple[Order, int]]:
        return [(order, seed_of(seed, name)) for name, order in self.sources.items()]

    def token_sums(self, seed: int) -> Sums | None:
        sums_of = [order.token_sums(own) for order, own in self.seeded(seed)]
        known = [sums for sums in sums_of if sums is not None]
        if len(known) < len(sums_of):
            return None
        draws = self.draws(seed)

        def sums(epoch: int, units: Ints) -> list[int]:
            totals = [0] * len(known)
            for s, number, part in passes(draws(epoch, units), self.sources):
                totals[s] += sum(known[s](number, part))
            return totals

        return sums

    def draws(self, seed: int) -> Draws:
        plan = self._plan
        before = lru_cache(2)(plan.before)
        block_of = lru_cache(1)(partial(plan.block_of, seed, before))

        def draw(epoch: int, units: Ints) -> Drawn:
            numbers = units.view(np.uint64) + np.uint64(epoch * self.units - plan.since & WORD)
            blocks = numbers // np.uint64(plan.block)
            positions = numbers - blocks * np.uint64(plan.block)
            unit_sources, drawn = np.empty(len(units), np.uint16), np.empty(len(units), np.uint64)
            for start, stop in runs(blocks):
                part = positions[start:stop].view(np.int64)
                block_sources, draws = block_of(int(blocks[start]))
                unit_sources[start:stop] = block_sources.take(part)
                drawn[start:stop] = draws.take(part)
            return by_source(unit_sources, drawn)

        return draw

    def describe(self) -> str:
        block, first = self._plan.block, self._plan.shares[0]
        weights, by = [weight / first.total for weight in first.whole], ""
        if self._by_tokens:
            given, by = self._meant["weights"][0][1], " by tokens"
            weights = [weight / sum(given) for weight in given]
        shares = [f"{part:.3g} of {name}" for name, part in zip(self.sources, weights, strict=True)]
        rare = self._rare()
        less = f"; less than one unit of {_listed(rare)}" if rare else ""
        left_out = f"; {self.left_out}" if self.left_out else ""
        return f"{self.units:,} units in blocks of {block}{by}: {_listed(shares)}{less}{left_out}"


class Resized(Composed):
    """An order whose epochs are joined and then cut into epochs of `epoch_size` units.

    Shorter epochs each cover part of the data, and all samples appear before any is repeated.
    Longer epochs contain samples more than once.

    Parameters
    ----------
    order : Order
    epoch_size : int
        The number of units in an epoch.

    Examples
    --------
    >>> order = cseq.Resized(cseq.Sequential(5), 2)
    >>> [order.batches(2, seed=1, epoch=epoch) for epoch in range(3)]
    [[[0, 1]], [[2, 3]], [[4, 0]]]
    """

    name = "resized-v1"

    def __init__(self, order: Order, epoch_size: int) -> None:
        if not isinstance(order, Order):
            raise TypeError(f"order={order!r} is not a cseq.Order; pass one")
        size = integer("epoch_size", epoch_size, 1, MOST_SAMPLES)
        self.order, self._size, self.sources = order, size, {"": order}
        self.samples, self.room, self.is_batch = order.samples, order.room, order.is_batch
        self.is_seeded, self.left_out, self.tokens = order.is_seeded, order.left_out, order.tokens
        self.units = size if order.units else 0

    def over(self, samples: int) -> Self:
        order = self.order.over(samples)
        return self if order is self.order else type(self)(order, self._size)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "units": self._size, "order": self.order.facts()}

    def resumed(self, facts: dict[str, Any], seed: int, epoch: int, consumed: int) -> Self:
        inner = facts.get("order")
        if facts | {"order": None} != self.facts() | {"order": None} or not isinstance(inner, dict):
            return super().resumed(facts, seed, epoch, consumed)
        at = divmod(epoch * self._size + consumed, self.order.units)
        order = self.order.resumed(inner, seed, *at)
        return self if order is self.order else type(self)(order, self._size)

    def draws(self, seed: int) -> Draws:
        def draw(epoch: int, units: Ints) -> Drawn:
            numbers = units.view(np.uint64) + np.uint64(epoch * self._size & WORD)
            return slice(None), np.zeros(len(units), np.uint16), numbers

        return draw

    def describe(self) -> str:
        return f"{self._size:,} units at a time of {self.order.describe()}"


def _before(facts: dict[str, Any]) -> tuple[_Plan, dict[str, dict[str, Any]]]:
    """Return the plan that a state describes, and each source's facts."""
    try:
        source_facts = {name: dict(values) for name, values in facts["sources"]}
        names = list(source_facts)
        given = facts["weights"] if facts.get("reweighed") is None else [(0, facts["reweighed"])]
        weights = [(unit, dict(zip(names, values, strict=True))) for unit, values in given]
        taken = {
            name: integer(f"taken[{name!r}]", n, 0, WORD) for name, n in facts["taken"].items()
        }
        block = integer("block", facts["block"], 1, MOST_SOURCES)
        since = integer("since", facts["since"], 0, WORD)
        integer("units", facts["units"], 1, MOST_SAMPLES)
        return _Plan(names, _phases(weights, names), block, since, taken), source_facts
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the state of a Mixture is damaged: {error}; pass the dict that state_dict() returned"
        ) from error


class _Plan:
    """Assigns units to sources.

    `phases` contains the first unit and the weights of each phase. Block 0 starts at unit `since`,
    after `taken` units from each source, including removed sources.
    """

    def __init__(
        self,
        names: list[str],
        phases: Sequence[tuple[int, list[float]]],
        block: int,
        since: int,
        taken: dict[str, int],
    ) -> None:
        self.names, self.phases, self.block, self.since = names, phases, block, since
        self.taken = {**dict.fromkeys(names, 0), **taken}
        self.shares = [Shares(weights, block) for _, weights in phases]
        self._sources = np.arange(len(names), dtype=np.uint16)
        self._numbers = np.arange(block, dtype=np.uint64)
        self._blocks = [max(0, -(-(unit - since) // block)) for unit, _ in phases]
        self._drawn = [np.array([self.taken[name] for name in names], np.uint64)]
        for shares, (start, stop) in zip(
            self.shares, itertools.pairwise(self._blocks), strict=False
        ):
            self._drawn.append(self._drawn[-1] + shares.before(stop - start))

    def before(self, block: int) -> NDArray[np.uint64]:
        """Return the number of draws per source before a block, modulo 2**64."""
        phase = bisect.bisect_right(self._blocks, block) - 1
        return self._drawn[phase] + self.shares[phase].before(block - self._blocks[phase])

    def block_of(
        self, seed: int, before: Callable[[int], NDArray[np.uint64]], block: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint64]]:
        """Return each unit's source in a block, and the unit's index among that source's draws."""
        first = before(block)
        quotas = before(block + 1) - first
        counts, offsets = quotas.view(np.int64), first - quotas.cumsum() + quotas
        sources = self._sources.repeat(counts)
        unit_sources = sources.take(shuffle(self.block, seed, 0, MIXTURE, block))
        draws = np.empty(self.block, np.uint64)
        draws[unit_sources.argsort(kind="stable")] = offsets.repeat(counts) + self._numbers
        return unit_sources, draws

    def taken_before(self, seed: int, unit: int) -> dict[str, int]:
        """Return the number of draws per source before a unit, over all epochs."""
        block, position = divmod(unit - self.since & WORD, self.block)
        unit_sources, _ = self.block_of(seed, self.before, block)
        part = np.bincount(unit_sources[:position], minlength=len(self.names)).astype(np.uint64)
        counts = (self.before(block) + part).tolist()
        return {**self.taken, **dict(zip(self.names, counts, strict=True))}


def _listed(texts: list[str]) -> str:
    more = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


def _phases(
    weights: Weights | Sequence[tuple[int, Weights]], names: list[str]
) -> list[tuple[int, list[float]]]:
    """Return each phase's first unit and its weights in source order."""
    phases = [(0, weights)] if isinstance(weights, Mapping) else weights
    if not isinstance(phases, (list, tuple)) or not phases:
        raise TypeError(
            f"weights={phases!r} is neither a dict nor a list of phases; pass a dict of names and "
            "numbers, or a list of (unit, dict)"
        )
    checked: list[tuple[int, list[float]]] = []
    for phase in phases:
        if not isinstance(phase, (list, tuple)) or len(phase) != 2 or not hasattr(phase[1], "keys"):
            raise TypeError(f"weights contains {phase!r}; pass (unit, dict of names and numbers)")
        unit = integer(f"weights[{len(checked)}][0]", phase[0], 0, 2**63)
        if unit <= checked[-1][0] if checked else unit:
            raise ValueError(
                f"weights[{len(checked)}][0]={unit} is out of order; pass units in ascending "
                "order, starting with 0"
            )
        checked.append((unit, _weights(phase[1], names)))
    return checked


def _weights(weights: Weights, names: list[str]) -> list[float]:
    """Return the weights in source order."""
    sources = set(names)
    for name in [*weights, *names]:
        if name not in sources:
            raise ValueError(f"weights has {name!r}, which is not a source; the names are {names}")
        if name not in weights:
            raise ValueError(f"weights lacks source {name!r}; pass its share, or 0 to leave it out")
        weight = weights[name]
        if isinstance(weight, (bool, np.bool_)) or not isinstance(weight, Real):
            raise TypeError(f"weights[{name!r}]={weight!r} must be a non-negative number")
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"weights[{name!r}]={weight!r} is negative or not finite; pass a finite number of "
                "at least 0"
            )
    plain = [
        int(weight) if isinstance(weight, (int, np.integer)) else float(weight)
        for weight in map(weights.__getitem__, names)
    ]
    if not any(plain):
        raise ValueError(f"all weights are 0: {dict(weights)}; pass at least one above 0")
    return plain
