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

    rng: str
    on_error: str

    def __init__(self) -> None:
        self.rng = os.environ.get("CSEQ_LOADER_RNG", "worker")
        self.on_error = os.environ.get("CSEQ_LOADER_ON_ERROR", "raise")

    def __setattr__(self, name: str, value: str) -> None:
        values = {"rng": RNGS, "on_error": ON_ERRORS}.get(name)
        super().__setattr__(name, value if values is None else choice(name, value, values))


defaults = Defaults()
