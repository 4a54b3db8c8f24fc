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
VALUES = {"rng": RNGS, "on_error": ON_ERRORS}  # the first of each: where nothing else is said


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
        for name, values in VALUES.items():
            variable = f"CSEQ_LOADER_{name.upper()}"
            setattr(self, name, choice(variable, os.environ.get(variable, values[0]), values))

    def __setattr__(self, name: str, value: str) -> None:
        if name not in VALUES:
            raise AttributeError(f"there is no default {name!r}; there are {', '.join(VALUES)}")
        super().__setattr__(name, choice(name, value, VALUES[name]))


defaults = Defaults()
