"""What torchtitan asks of a dataloader, as its release 0.3.0 and its newer sources have it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

MODULES = {
    "0.3.0": "torchtitan.components.dataloader",
    "newer": "torchtitan.components.data.loader",
}


class Configurable:
    """Has a `Config`, whose `build` makes it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Of nothing."""

        owner: ClassVar[Any] = None

        def build(self, **arguments):
            """Make what it configures."""
            return self.owner(config=replace(self), **arguments)

    def __init_subclass__(cls):
        cls.Config.owner = cls


class Older(Configurable):
    """The base class of 0.3.0."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Of a data set of torchtitan's."""

        dataset: str = ""
        dataset_path: str | None = None


class Newer(Configurable):
    """The base class of the newer sources."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Of nothing more."""


BASES = {"0.3.0": Older, "newer": Newer}


def adapter(monkeypatch, contract):
    """Import the adapter where torchtitan is one of the two; call it no more after the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchtitan", "tyro")]:
        monkeypatch.delitem(sys.modules, name)
    parts = MODULES[contract].split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.BaseDataLoader = BASES[contract]
    tyro = ModuleType("tyro")
    tyro.conf = ModuleType("tyro.conf")
    tyro.conf.Suppress = object()
    monkeypatch.setitem(sys.modules, "tyro", tyro)
    monkeypatch.delitem(sys.modules, "cseq.adapters.torchtitan", raising=False)
    found = import_module("cseq.adapters.torchtitan")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.delattr("cseq.adapters.torchtitan")
    return found


def build(config, contract, row, rows, rank=0, ranks=1):
    """Make a loader as the trainer does."""
    sizes = {
        "0.3.0": {"seq_len": row, "local_batch_size": rows, "snapshot_every_n_steps": None},
        "newer": {"max_context_length": row, "num_tokens_per_batch": row * rows},
    }
    place = {"dp_rank": rank, "dp_world_size": ranks}
    return config.build(**place, tokenizer=None, **sizes[contract])


def rows_of(loader, row, steps=None):
    """Go through a loader: the rows of each batch, as triples of tokens, positions and labels."""
    iterator = iter(loader)
    while steps is None or steps > 0:
        found = next(iterator, None)
        if found is None:
            return
        inputs, labels = found
        parts = (inputs["input"], inputs["positions"], labels)
        yield [*zip(*(part.reshape(-1, row).tolist() for part in parts), strict=True)]
        steps = steps and steps - 1
