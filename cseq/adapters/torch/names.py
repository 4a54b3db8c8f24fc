"""Names of torch that are not public: all that the loader relies on.

tests/adapters/test_torch_names.py has a test for each of them, so that a torch which lacks one, or
means something else by it, is found out by name.
"""

from __future__ import annotations

import dis
import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import collate, pin_memory, worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = [
    "DATAPIPES",
    "ITERABLE",
    "Base",
    "Inline",
    "Workers",
    "array_entry",
    "check_number_of_workers",
    "collate_map",
    "init",
    "make_fetcher",
    "next_from",
    "numpy_seed",
    "pin",
    "profiler_enabled",
    "set_worker_info",
    "tensor_entry",
]

dataloader: Any = _dataloader  # a type checker knows no private names
Base: Any = dataloader._BaseDataLoaderIter
Inline: Any = dataloader._SingleProcessDataLoaderIter
Workers: Any = dataloader._MultiProcessingDataLoaderIter

_get_iterator: Any = dataloader.DataLoader._get_iterator  # as it is before `install`

DATAPIPES = (data.IterDataPipe, data.MapDataPipe)

ITERABLE: int = dataloader._DatasetKind.Iterable  # what `DataLoader._dataset_kind` may be

collate_map: dict[Any, Any] = collate.default_collate_fn_map
tensor_entry = collate.collate_tensor_fn
array_entry = collate.collate_numpy_array_fn

pin: Any = pin_memory.pin_memory

profiler_enabled: Any = vars(torch.autograd)["_profiler_enabled"]


# Where torch's warnings are from: their place is that of the caller of what warns (`stacklevel=2`),
# by which filters choose them. So it is called from a frame that has the file, the line and the
# globals of the caller with torch.


def _call(function: Any, *args: Any) -> Any:
    return function(*args)  # in the line behind `def`


def _call_from(
    path: str, line: int, namespace: dict[str, Any], function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function from a frame at another place."""
    code = _call.__code__.replace(co_filename=path, co_firstlineno=line - 1)
    return FunctionType(code, namespace)(function, *args)


@functools.cache
def _line_of(code: CodeType, name: str) -> int:
    """Return the line of a function in which it says a name."""
    lines = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset) or line
        if instruction.argval == name:
            break
    return line


def _call_from_torch(
    caller: Callable[..., Any], name: str, function: Callable[..., Any], *args: Any
) -> None:
    """Call a function from where a function of torch's says a name."""
    code = caller.__code__
    line = _line_of(code, name)
    _call_from(code.co_filename, line, vars(dataloader), function, *args)


def init(iterator: Any, loader: Any, kind: Any) -> None:
    """Begin to make an iterator, which a profile then names as one of torch's (`kind`)."""
    _call_from_torch(kind.__init__, "super", Base.__init__, iterator, loader)
    iterator._profile_name = iterator._profile_name.replace(type(iterator).__name__, kind.__name__)


def check_number_of_workers(loader: Any) -> None:
    """Warn of more workers than cores."""
    check = loader.check_worker_number_rationality
    _call_from_torch(_get_iterator, "check_worker_number_rationality", check)


def next_from(caller: FrameType | None, iterator: Any) -> Any:
    """Return an iterator's next batch, which somebody else has asked for, with torch's warnings."""
    if caller is None:
        return Base.__next__(iterator)
    path, line = caller.f_code.co_filename, caller.f_lineno or 1
    return _call_from(path, line, caller.f_globals, Base.__next__, iterator)


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
