"""Options that cseq adds to torch's DataLoader, and their process-wide defaults.

Frameworks recreate loaders with only torch's own arguments, so cseq's options need defaults.
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

# The first value of each option is the default.
VALUES = {
    "rng": ("worker", "batch"),
    "on_error": ("raise", "skip"),
    "worker_method": ("multiprocessing", "thread"),
}


class Options(NamedTuple):
    """Options that cseq adds to torch's DataLoader; see `DataLoader`."""

    rng: str
    on_error: str
    worker_method: str
    # None if the loader does not support states.
    snapshot_every: int | None = None
    max_restarts: int = MAX_RESTARTS


class Defaults:
    """Process-wide defaults for `rng`, `on_error` and `worker_method`.

    The environment variables CSEQ_LOADER_RNG, CSEQ_LOADER_ON_ERROR and CSEQ_LOADER_WORKER_METHOD
    set the initial values. `worker_method` only applies to loaders with a map-style data set.
    """

    rng: str
    on_error: str
    worker_method: str

    def __setattr__(self, name: str, value: str) -> None:
        if name not in VALUES:
            raise AttributeError(f"{name!r} is not a default; the defaults are {', '.join(VALUES)}")
        super().__setattr__(name, choice(name, value, VALUES[name]))


defaults = Defaults()
for _name, _values in VALUES.items():
    _variable = f"CSEQ_LOADER_{_name.upper()}"
    setattr(defaults, _name, choice(_variable, os.environ.get(_variable, _values[0]), _values))


def start_method_of(loader: DataLoader[Any]) -> str:
    """Return the start method for a loader's workers."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())
