"""Options that torch's DataLoader lacks, and their defaults; one of its own.

A framework that makes a loader of another one's attributes passes on the arguments of torch alone,
so the options have defaults for the whole process, and variables of the environment for those.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.check import choice
from cseq.options import MAX_RESTARTS

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["VALUES", "Defaults", "Options", "defaults", "start_method_of"]

# The first is the default.
VALUES = {
    "rng": ("worker", "batch"),
    "on_error": ("raise", "skip"),
    "worker_method": ("multiprocessing", "thread"),
}


class Options(NamedTuple):
    """What an iterator needs besides torch's arguments: see `DataLoader`."""

    rng: str
    on_error: str
    worker_method: str
    # None if no state is asked for.
    snapshot_every: int | None = None
    max_restarts: int = MAX_RESTARTS


class Defaults:
    """The values of options that a loader was not given: `rng`, `on_error`, `worker_method`.

    At first, CSEQ_LOADER_RNG, CSEQ_LOADER_ON_ERROR and CSEQ_LOADER_WORKER_METHOD of the environment
    set them. `worker_method` is for loaders of map-style data sets.
    """

    rng: str
    on_error: str
    worker_method: str

    def __setattr__(self, name: str, value: str) -> None:
        if name not in VALUES:
            raise AttributeError(f"there is no default {name!r}; there are {', '.join(VALUES)}")
        super().__setattr__(name, choice(name, value, VALUES[name]))


defaults = Defaults()
for _name, _values in VALUES.items():
    _variable = f"CSEQ_LOADER_{_name.upper()}"
    setattr(defaults, _name, choice(_variable, os.environ.get(_variable, _values[0]), _values))


def start_method_of(loader: DataLoader[Any]) -> str:
    """Name the way in which a loader's worker processes are started."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())
