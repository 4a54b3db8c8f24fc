"""Finds a data set that draws in threads from the program's global generators."""

from __future__ import annotations

import logging
from typing import Any

from cseq.adapters.torch.order import OWN, inner_of, look

__all__ = ["Draws"]

log = logging.getLogger("cseq")

CALLS = 4  # of the loop that are looked at


class Draws:
    """Looks at the global generators around the loop's first calls, which draw nothing themselves.

    So threads have drawn what was drawn meanwhile. A sampler that may draw for each key does so in
    these calls: with that, nothing is looked at.
    """

    def __init__(self, index_sampler: Any, dataset: Any) -> None:
        inner = type(inner_of(index_sampler))
        is_torchs = inner in OWN or inner.__module__.startswith("torch.utils.data.")
        self._dataset = dataset
        self._left = CALLS if is_torchs else 0
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Look, where a call begins."""
        self._before = look() if self._left else {}

    def end(self) -> bool:
        """Look again, where it ends, and log what was drawn from; return whether that was all."""
        now = look() if self._before else {}
        drawn = [name for name, state in self._before.items() if state != now[name]]
        self._left -= 1
        if drawn:
            log.warning(
                "dataset=%s draws from the global generators of %s, which worker threads share: "
                "what it draws changes from run to run. Draw from get_worker_info().rng, "
                "torch.thread_safe_generator() or cseq.rng(), or give "
                "worker_method='multiprocessing'",
                type(self._dataset).__name__,
                " and ".join(drawn),
            )
        return self._left <= 0 or bool(drawn)
