"""The benchmark cases, one file per group: `CASES` in each module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.case import Case

MODULES = (
    "small",
    "brief",
    "large",
    "fleet",
    "structure",
    "tensors",
    "computing",
    "interpreted",
    "starting",
    "epochs",
    "permutation",
    "orders",
    "tokens",
    "memory",
    "idle",
    "advice",
    "auto",
    "tracing",
    "adapters",
    "keys",
    "dataloader",
    "threads",
    "cached",
    "store",
    "peers",
    "picture",
)


def groups() -> dict[str, tuple[Case, ...]]:
    """The cases of each file, in the order of the table."""
    return {name: import_module(f"cases.{name}").CASES for name in MODULES}


def all_cases() -> dict[str, Case]:
    """All cases by name, including those in `gpu`."""
    ours = [*groups().values(), import_module("gpu.cases").CASES]
    return {case.name: case for cases in ours for case in cases}
