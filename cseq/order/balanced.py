"""An order that balances the attention work in each step across ranks."""

from __future__ import annotations

import functools
import json
import logging
import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cseq.check import choice, integer
from cseq.order._readers import (
    AHEAD,
    BALANCE,
    ArrayReader,
    Permutation,
    deal,
    fingerprint,
    gather,
)
from cseq.order.base import Order
from cseq.order.tables import cache_of, tables

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from cseq._core import Reader
    from cseq.order.base import Floats, Ints, Read, Sums, Works
    from cseq.order.mixture import Weights
    from cseq.order.tables import New, Tables

# Log each message once.
warn = functools.cache(logging.getLogger("cseq").warning)
# Number of rows to cache. Each takes 4 bytes, plus 8 for its work unless over='epoch'.
KEPT = 2**17
STEPS = {"step": 1, "window": 16}
ARTICLES = {"step": "a step", "window": "16 steps", "epoch": "an epoch"}
# Balancing takes time proportional to rows times ranks.
MOST_STEP = 2**15


class Balanced(Order):
    """Wraps another order and rearranges its rows so that ranks have nearly equal work per step.

    A row's work is its attention cost, the sum of the squared lengths of its pieces. Ranks do not
    communicate. Each step contains the same rows, regardless of the number of ranks.

    Parameters
    ----------
    order : Order
        `Packed` or `Concatenated`, or a `Mixture` or `Resized` that wraps only these.
    step : int
        The number of rows in an optimizer step, over all ranks and microbatches, at most 2**15.
    over : 'step', 'window' or 'epoch'
        Whether rows stay in their step, or are exchanged among 16 steps ('window') or all steps
        ('epoch'). Exchanging rows evens out the work within groups of `together` rows, but each
        step still contains both heavy and light groups.
    together : int, optional
        The number of consecutive rows with similar work. It should be a multiple of the number of
        ranks. Defaults to ``step // gcd(step, 4)``, usually a quarter of a step.
    cache : path, optional
        A local folder for over='epoch'. All processes on a machine then share one table, which
        takes 4 bytes per row.

    Notes
    -----
    `step` should be a multiple of the global batch (`batch_size` times the number of ranks).
    Batches that span two steps are not balanced, and a warning is logged.

    Examples
    --------
    >>> packed = cseq.Packed([9, 9, 5, 4, 3, 3, 3, 1, 1, 1], 9)
    >>> cseq.Balanced(packed, step=4)
    <Balanced: 5 rows, filled to 86.67 %, 1–3 samples a row; in steps of 4, by work within a step>
    """

    name = "balanced-v1"

    def __init__(
        self,
        order: Order,
        step: int,
        *,
        over: Literal["step", "window", "epoch"] = "step",
        together: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(order, Order):
            raise TypeError(f"order={order!r} is not a cseq.Order; pass one")
        # Raises TypeError if the order cannot compute the amount of work for a unit.
        order.measured(0)
        self.order, self.step = order, integer("step", step, 1, MOST_STEP)
        quarter = self.step // math.gcd(self.step, 4)
        self.together = integer("together", quarter if together is None else together, 1, self.step)
        if self.step % self.together:
            raise ValueError(f"together={together} does not divide step={step}; pass a divisor")
        self._over, self._cache = choice("over", over, (*STEPS, "epoch")), cache_of(cache)
        self._window = self.step * STEPS.get(over, max(1, order.units // self.step))
        self.samples, self.units, self.room = order.samples, order.units, order.room
        self.left_out, self.tokens = order.left_out, order.tokens
        ours = {"step": self.step, "over": self._over, "together": self.together}
        self._facts = {"units": self.units, **ours, "order": order.facts()}

    def describe(self) -> str:
        said = f"in steps of {self.step:,}, by work within {ARTICLES[self._over]}"
        return f"{self.order.describe()}; {said}"

    def resumed(self, facts: dict[str, Any], seed: int, epoch: int, consumed: int) -> Self:
        inner, any_ = facts.get("order"), {"order": None, "samples": None}
        if facts | any_ != self.facts() | any_ or not isinstance(inner, dict):
            return super().resumed(facts, seed, epoch, consumed)
        order = self.order.resumed(inner, seed, epoch, consumed)
        return self._of(order, consumed, is_same=order.facts() == inner)

    def reweighed(self, weights: Weights, seed: int, epoch: int, consumed: int) -> Self:
        if not hasattr(self.order, "reweighed"):
            raise TypeError(f"order={self!r} has no weights; pass a Balanced that wraps a Mixture")
        order = self.order.reweighed(weights, seed, epoch, consumed)
        return self._of(order, consumed, is_same=False)

    def _of(self, order: Order, consumed: int, *, is_same: bool) -> Self:
        if order is self.order:
            return self
        if not is_same and consumed % self._window and consumed < self.units:
            raise ValueError(
                f"the order cannot change after row {consumed} of an epoch, in the middle of a "
                f"window of {self._window} rows that are balanced together, because some rows "
                "would be repeated; change the order at the start of a window"
            )
        return type(self)(
            order, self.step, over=self._over, together=self.together, cache=self._cache
        )

    def reader(self, seed: int) -> Reader:
        reader, works = self.order.measured(seed)
        # Number of windows to cache: at least two, for reading ahead.
        kept = max(2, KEPT // self._window)
        window = lru_cache(kept)(partial(self._sorted, seed, works))
        dealt = lru_cache(2)(partial(self._dealt, window, works))

        def read(epoch: int, units: Ints) -> Read:
            return gather(reader, epoch, self._rows(window, epoch, units))

        def share(epoch: int, first: int, together: int, start: int, size: int) -> Ints:
            step, phase = divmod(first, self.step)
            batch, phase = divmod(phase, together)
            if self.step % together:
                warn(
                    "step=%d is not a multiple of the global batch of %d rows, so a batch that "
                    "spans two steps is not balanced; pass another step or batch_size",
                    self.step,
                    together,
                )
            whole = phase + (batch + 1) * together <= self.step
            if not whole or (step + 1) * self.step > self.units:
                return np.arange(start, start + size, dtype=np.int64)
            ours: Ints = dealt(epoch, step, phase, together, size)[batch, (start - first) // size]
            return ours

        return ArrayReader(self, seed, read, share, AHEAD)

    def token_sums(self, seed: int) -> Sums | None:
        inner = self.order.token_sums(seed)
        if inner is None:
            return None

        measured = lru_cache(1)(self.order.measured)

        def works(epoch: int, units: Ints) -> Floats:
            return measured(seed)[1](epoch, units)

        window = lru_cache(2)(partial(self._sorted, seed, works))
        return lambda epoch, units: inner(epoch, self._rows(window, epoch, units, is_sum=True))

    def _rows(self, window: Any, epoch: int, units: Ints, *, is_sum: bool = False) -> Ints:
        """Return the row for each unit. If `is_sum` is set, do not rearrange complete windows."""
        numbers, counts = np.unique(windows := units // self._window, return_counts=True)
        rows: Ints = units.copy()
        for w, number in zip(numbers.tolist(), counts.tolist(), strict=True):
            first = w * self._window
            if not is_sum or number < min(self._window, self.units - first):
                ours = np.flatnonzero(windows == w)
                rows[ours] = window(epoch, w)["rows"].take(units[ours] - first)
        return rows

    def _sorted(self, seed: int, works: Works, epoch: int, number: int) -> Tables:
        """Return the sorted rows of a window, and their work unless over='epoch'."""
        name, folder = "", None
        if self._over == "epoch" and number == 0 and self._cache is not None:
            facts = np.frombuffer(json.dumps(self.facts()).encode(), np.uint8)
            name, folder = f"{self.name}-{fingerprint(facts):016x}-{seed:x}", self._cache
        make = partial(self._sort, seed, works, epoch, number)
        return tables(folder, name, make, epoch)

    def _sort(self, seed: int, works: Works, epoch: int, number: int, new: New) -> None:
        first = number * self._window
        rows = np.arange(first, min(first + self._window, self.units))
        work = works(epoch, rows)
        steps, groups = len(rows) // self.step, self.step // self.together
        order = np.argsort(-work[: steps * self.step], kind="stable")
        if steps == 1:
            bins, turns = deal(work.take(order), np.zeros_like(order), self.together, 1, groups)
            order[turns * self.together + bins] = order.copy()
        elif steps:
            alike = order.reshape(groups, steps, self.together)
            # Each step gets one group per work level, in descending order of work.
            for k in range(groups):
                key = number * groups + k
                turn = Permutation(steps, seed, epoch, BALANCE, key).at(np.arange(steps))
                alike[k] = alike[k].take(turn, axis=0)
            order = alike.swapaxes(0, 1).ravel()
        rows[: len(order)] = rows.take(order)
        new("rows", len(rows), np.uint32 if self.units <= 2**32 else np.int64)[:] = rows
        if self._over != "epoch":
            work[: len(order)] = work.take(order)
            new("work", len(rows), work.dtype)[:] = work

    def _dealt(
        self,
        window: Any,
        works: Works,
        epoch: int,
        step: int,
        phase: int,
        together: int,
        size: int,
    ) -> Ints:
        """Return each rank's units in each global batch of a step."""
        number, at = divmod(step * self.step + phase, self._window)
        batches, ranks = (self.step - phase) // together, together // size
        span, kept = slice(at, at + batches * together), window(epoch, number)
        work = (
            kept["work"][span]
            if "work" in kept
            else works(epoch, kept["rows"][span].astype(np.int64))
        )
        order = np.argsort(-work, kind="stable")
        ours, turns = deal(work.take(order), order // together, ranks, batches, size)
        units = np.empty((batches, ranks, size), np.int64)
        units[order // together, ours, turns] = order + step * self.step + phase
        units.sort(axis=2)
        return units
