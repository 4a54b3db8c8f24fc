"""The loader whose workers are threads, and the cases in which it matches torch's processes.

Threads share the data set and the generators.
"""

import json

from case import settle

import cseq.adapters.torch

PATH = "in_threads:Loader"
MANY = "This DataLoader will create"


class Loader(cseq.adapters.torch.DataLoader):
    def __init__(self, *args, **options):
        super().__init__(*args, worker_method="thread", **options)


def in_processes(events):
    """Return events without the number of processes, and without the fact that there are none."""
    text = json.dumps([event for event in events if MANY not in str(event)])
    return json.loads(text.replace("DataLoader worker thread", "DataLoader worker process"))


def settled(options):
    """Return a case without the options that threads lack.

    - How processes are started (`method`, `context`).
    - What a call leaves in the data set or a collate function (`calls`, `init` of "dataset"): they
      are not copied, so it is there for all workers, and for the trainer.
    - A data set's own tensors that the trainer writes to: samples may be these, no copies.
    - The global generators, which are the trainer's, and `get_worker_info`, which is None.
    - An IterableDataset in several workers.
    """
    case = settle(options)
    for name in ("method", "method_object", "context", "draws", "info"):
        case.pop(name, None)
    case["kinds"] = []
    if case.init in ("dataset", "seed", "draw"):
        case.pop("init")
    # It fails at a given number of calls.
    if case.fails("collate"):
        case.pop("error")
    if case.collate == "count":
        case.pop("collate")
    if case.streams and case.num_workers > 1:
        case["num_workers"] = 1
    other = ("collate count", *(("num_workers",) if case.streams else ()))
    case["steps"] = [step for step in case.steps if not step.startswith(other)]
    if case.dataset in ("tensor", "stack"):
        case["kept"] = True
    return settle(case)
