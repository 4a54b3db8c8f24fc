"""The interface that torchtitan requires of a dataloader, in release 0.3.0 and in newer sources."""

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar

MODULES = {
    "0.3.0": "torchtitan.components.dataloader",
    "newer": "torchtitan.components.data.loader",
}


class Configurable:
    """Has a `Config` that builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """A config without fields."""

        owner: ClassVar[Any] = None

        def build(self, **arguments):
            return self.owner(config=replace(self), **arguments)

    def __init_subclass__(cls):
        cls.Config.owner = cls


class Older(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """The base of a config with torchtitan's data set."""

        dataset: str = ""
        dataset_path: str | None = None


BASES = {"0.3.0": Older, "newer": Configurable}


def adapter(monkeypatch, contract):
    """Import the adapter against a contract of torchtitan; the import ends with the test."""
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
    """Make a loader as the trainer makes it."""
    sizes = {
        "0.3.0": {"seq_len": row, "local_batch_size": rows, "snapshot_every_n_steps": None},
        "newer": {"max_context_length": row, "num_tokens_per_batch": row * rows},
    }
    place = {"dp_rank": rank, "dp_world_size": ranks}
    return config.build(**place, tokenizer=None, **sizes[contract])


def rows_of(loader, row, steps=None):
    """Yield the rows of each batch, as triples of tokens, positions and labels."""
    for inputs, labels in islice(loader, steps):
        parts = (inputs["input"], inputs["positions"], labels)
        yield [*zip(*(part.reshape(-1, row).tolist() for part in parts), strict=True)]
