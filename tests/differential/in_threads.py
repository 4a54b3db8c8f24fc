"""The loader whose workers are threads, and the cases in which it does what torch's processes do.

A data set is shared then, and a thread's generators are its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from case import settle

import cseq.adapters.torch

if TYPE_CHECKING:
    from case import Case

PATH = "in_threads:Loader"
MANY = "This DataLoader will create"


class Loader(cseq.adapters.torch.DataLoader):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, worker_method="thread", **options)


def in_processes(events: list[Any]) -> list[Any]:
    """Return events without what says how many processes there are, and that these are none."""
    text = json.dumps([event for event in events if MANY not in str(event)])
    told: list[Any] = json.loads(
        text.replace("DataLoader worker thread", "DataLoader worker process")
    )
    return told


def settled(case: Case) -> Case:
    """Leave out what threads cannot have, or may do in another way."""
    for name in ("method", "method_object", "context", "info"):
        case.pop(name, None)
    if case.dataset == "pipe":
        case.pop("dataset")
    for name in ("init", "collate"):
        if case.get(name) in ("dataset", "draw", "seed", "count"):  # of what is shared
            case.pop(name)
    if case.fails("collate"):  # the collate function that fails draws, too
        case.pop("error")
    if "steps" in case:
        case["steps"] = [step for step in case.steps if step != "collate count"]
    case["draws"] = [name for name in case.draws if name != "numpy"]  # of another kind
    return settle(case)
