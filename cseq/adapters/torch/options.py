"""Options that torch's DataLoader lacks, and their values where none was given.

A framework that makes a loader of another one's attributes passes on the arguments of torch alone,
so the options have defaults for the whole process, and variables of the environment for those.
"""

from __future__ import annotations

import os

from cseq.check import choice

__all__ = ["ON_ERRORS", "RNGS", "Defaults", "defaults"]

RNGS = ("worker", "batch")
ON_ERRORS = ("raise", "skip")


class Defaults:
    """The values of options that a loader was not given.

    Attributes
    ----------
    rng : 'worker' or 'batch'
        See `DataLoader`; at first the environment's ``CSEQ_LOADER_RNG``.
    on_error : 'raise' or 'skip'
        See `DataLoader`; at first the environment's ``CSEQ_LOADER_ON_ERROR``.
    """

    def __init__(self) -> None:
        self.rng = os.environ.get("CSEQ_LOADER_RNG", "worker")
        self.on_error = os.environ.get("CSEQ_LOADER_ON_ERROR", "raise")

    @property
    def rng(self) -> str:
        """Which generators a batch draws from."""
        return self._rng

    @rng.setter
    def rng(self, value: str) -> None:
        self._rng: str = choice("rng", value, RNGS)

    @property
    def on_error(self) -> str:
        """What an exception of the data set does."""
        return self._on_error

    @on_error.setter
    def on_error(self, value: str) -> None:
        self._on_error: str = choice("on_error", value, ON_ERRORS)


defaults = Defaults()
