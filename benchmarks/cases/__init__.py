"""The cases, one file a group: `CASES` in each module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.case import Case

MODULES = (
    "small",
    "large",
    "structure",
    "tensors",
    "computing",
    "starting",
    "epochs",
    "permutation",
    "memory",
    "idle",
)


def all_cases() -> dict[str, Case]:
    """Every case by its name, in the order of the table."""
    modules = [import_module(f"cases.{name}") for name in MODULES]
    return {case.name: case for module in modules for case in module.CASES}
