"""Functions and classes of torch that are not public and that the loader uses.

Methods and attributes of torch's loader and iterators are not here, but used where they are needed
(`_get_iterator`, `_index_sampler`, `_base_seed`, …), and so is what is multiprocessing's own, in
`worker` and `spawning`. tests/adapters/test_torch_names.py has a test for each of all these, so
that a torch which lacks one, or means something else by it, is found out by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import data
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import collate, pin_memory, worker

__all__ = [
    "DATAPIPES",
    "ITERABLE",
    "Base",
    "Inline",
    "Workers",
    "array_entry",
    "collate_map",
    "make_fetcher",
    "numpy_seed",
    "pin",
    "profile_name",
    "profiler_enabled",
    "set_worker_info",
    "tensor_entry",
]

dataloader: Any = _dataloader  # a type checker knows no private names
Base: Any = dataloader._BaseDataLoaderIter
Inline: Any = dataloader._SingleProcessDataLoaderIter
Workers: Any = dataloader._MultiProcessingDataLoaderIter

DATAPIPES = (data.IterDataPipe, data.MapDataPipe)

ITERABLE: int = dataloader._DatasetKind.Iterable  # what `DataLoader._dataset_kind` may be

collate_map: dict[Any, Any] = collate.default_collate_fn_map
tensor_entry = collate.collate_tensor_fn
array_entry = collate.collate_numpy_array_fn

pin: Any = pin_memory.pin_memory

profiler_enabled: Any = vars(torch.autograd)["_profiler_enabled"]


def profile_name(kind: Any) -> str:
    """Return the name that a profile has for the batches of one of torch's iterators."""
    return f"enumerate(DataLoader)#{kind.__name__}.__next__"


def make_fetcher(
    kind: int, dataset: Any, *, auto_collation: bool, collate_fn: Any, drop_last: bool
) -> Any:
    """Make what fetches a batch: ``fetch(index)``; for an IterableDataset it calls `iter`."""
    return dataloader._DatasetKind.create_fetcher(
        kind, dataset, auto_collation, collate_fn, drop_last
    )


def numpy_seed(base_seed: int, number: int) -> list[int]:
    """Return the words that torch seeds numpy's generator with, in a worker."""
    generate: Any = worker._generate_state
    words: list[int] = generate(base_seed, number)
    return words


def set_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Set what `torch.utils.data.get_worker_info` returns in this process."""
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )
