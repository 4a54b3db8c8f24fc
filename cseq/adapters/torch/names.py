"""Private torch functions and classes that the loader uses.

`_use` tries each of them once. If this version of torch lacks one, `REASON` is set, and all loaders
fall back to torch's own iterator.

Other modules also use private attributes of torch's loader and iterators. test_torch_names.py
checks the private multiprocessing names that `cseq.processes` uses.
"""

from __future__ import annotations

import inspect
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data

# Other modules use these aliases.
__all__ = ["Base", "Inline", "Workers"]

# Datapipes are deprecated, and may be removed from a future version of torch.
DATAPIPES = tuple(getattr(data, name, ()) or () for name in ("IterDataPipe", "MapDataPipe"))

if TYPE_CHECKING:
    # Import the types that torch declares, and declare the others.
    from collections.abc import Callable

    from torch.overrides import TorchFunctionMode
    from torch.utils.data.dataloader import _BaseDataLoaderIter as Base
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Workers
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as Inline

    function_modes: Callable[[], list[TorchFunctionMode]]
    push_mode: Callable[[TorchFunctionMode], object]
    profiler_enabled: Callable[[], bool]
    numpy_seed: Callable[[int, int], list[int]]
    pin: Callable[[object, str | None], object]
    tensor_entry: Callable[..., torch.Tensor]
    array_entry: Callable[..., torch.Tensor]
    collate_map: dict[type | tuple[type, ...], Callable[..., Any]]
    make_fetcher: Callable[..., Any]
    worker: Any
else:
    Base = Inline = Workers = object
    function_modes = list
# The value of `DataLoader._dataset_kind` for an IterableDataset.
ITERABLE = 1
# The reason that cseq's iterator does not work with this version of torch, if any.
REASON: str | None = None


def settle_pinning(device: str | None) -> Any:
    """Return a function that a pinning thread must call first, as in torch."""
    module = getattr(torch, torch.device(device or "cuda").type, None)
    if module is None or not module.is_available():
        return partial(torch.set_num_threads, 1)
    # Look up the current device here, because new threads start with the first device.
    index = module.current_device()

    def settle() -> None:
        torch.set_num_threads(1)
        module.set_device(index)

    return settle


_KNOWN = {
    "self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers",
    "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device", "in_order", "worker_method",
}  # fmt: skip

# Arguments added by newer versions of torch, with their defaults.
UNKNOWN: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(data.DataLoader.__init__).parameters.items()
    if name not in _KNOWN
}


def as_generic(kind: Any) -> Any:
    """Subscript a class with its type parameters, so that subclasses are generic as well."""
    parameters = getattr(kind, "__parameters__", ())
    return kind[parameters] if parameters else kind


def set_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Set what `torch.utils.data.get_worker_info` returns in this process."""
    info = worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)
    worker._worker_info = info


def forget_worker_info() -> None:
    """Make `get_worker_info` return None again for exit handlers."""
    worker._worker_info = None


_OF_ITERATORS = attrgetter(
    "_dataset", "_dataset_kind", "_auto_collation", "_collate_fn", "_drop_last", "_index_sampler",
    "_num_workers", "_timeout", "_pin_memory", "_pin_memory_device", "_persistent_workers",
    "_sampler_iter", "_base_seed", "_num_yielded", "_profile_name", "_IterableDataset_len_called",
)  # fmt: skip


def _use() -> None:
    """Try each name once, without starting processes or using the global generators.

    The caller must set the default device to the CPU, because the generator is on the CPU.
    """
    samples: Any = [0]
    loader: Any = data.DataLoader(samples, generator=torch.Generator())
    loader.check_worker_number_rationality()
    attrgetter("_index_sampler", "_dataset_kind", "_auto_collation")(loader)
    attrgetter("_iterator", "_IterableDataset_len_called", "_get_iterator")(loader)
    iterator = Base(loader)
    _OF_ITERATORS(iterator)
    iterator._reset(loader, False)  # noqa: FBT003 - as torch calls it
    attrgetter("_reset", "_shutdown_workers")(Workers)
    present = worker._worker_info
    make_fetcher(0, samples, True, list, False).fetch([0])  # noqa: FBT003
    set_worker_info(0, 1, 0, None)
    worker._worker_info = present
    numpy_seed(0, 0)
    profiler_enabled()
    mode = torch.overrides.BaseTorchFunctionMode()
    push_mode(mode)
    if function_modes()[-1] is not mode:
        raise ValueError("the last function mode is not the one that was pushed")
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


try:
    if not TYPE_CHECKING:
        Base = data.dataloader._BaseDataLoaderIter
        Inline = data.dataloader._SingleProcessDataLoaderIter
        Workers = data.dataloader._MultiProcessingDataLoaderIter
    _kinds = data.dataloader._DatasetKind
    ITERABLE = _kinds.Iterable
    make_fetcher = _kinds.create_fetcher
    collate_map = data._utils.collate.default_collate_fn_map
    tensor_entry = data._utils.collate.collate_tensor_fn
    array_entry = data._utils.collate.collate_numpy_array_fn
    pin = data._utils.pin_memory.pin_memory
    worker = data._utils.worker
    numpy_seed = worker._generate_state
    # Since torch 2.14.1, workers drop the data set before they exit.
    _loop = getattr(worker, "_worker_loop", repr)
    GIVES_BACK = "dataset_holder" in inspect.signature(_loop).parameters
    profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    function_modes = torch.overrides._get_current_function_mode_stack
    push_mode = torch.overrides._push_mode
    with torch.device("cpu"):
        _use()
# A renamed or changed function may raise any exception.
except Exception as error:  # noqa: BLE001
    _what = f"{type(error).__name__}: {error}"
    REASON = f"torch {torch.__version__} differs from the versions that cseq supports ({_what})"
