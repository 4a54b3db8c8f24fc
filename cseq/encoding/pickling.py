"""Serializes objects for new processes and for running workers.

`dump` is for new processes. With cloudpickle, it pickles classes and functions by value if they are
in ``__main__`` or cannot be imported by name. `dumps` is for the trainer and running workers. They
have the same classes, which are therefore pickled by reference.

Both keep large arrays and tensors outside the pickle, so all workers share a single copy of even a
large data set.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import io
import mmap
import operator
import os
import pickle
import sys
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._memory import flat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    Named: TypeAlias = type | types.FunctionType | types.ModuleType

__all__ = [
    "Pickled",
    "UnpicklableError",
    "dump",
    "dumps",
    "import_torch",
    "publish",
    "reduce_storage",
    "unpicklable",
]

Reduced: TypeAlias = "str | tuple[Any, ...]"
Reducers: TypeAlias = "dict[type, Callable[[Any], Reduced]]"

# Module names of the user's script: in this process, and in multiprocessing's child processes.
MAIN = ("__main__", "__mp_main__")
# Smaller buffers are stored in the pickle.
IN_BAND = 512
# The index of the file name in the arguments of `types.CodeType`.
FILENAME = 10

# The exceptions that pickle raises if it cannot find a class or function by name.
NAMELESS = (pickle.PicklingError, AttributeError, TypeError)

REMEDY = (
    "Worker processes get a pickled copy of the {name}. Create or open such objects where they "
    "are first used, in each worker process and not in the training process"
)

# `dumps` rejects these types: only cloudpickle can pickle them, and not always as the same type.
EMPTY: tuple[dict[str, object], ...] = {}, OrderedDict()
VIEWS = {type(view()) for one in EMPTY for view in (one.keys, one.values, one.items)}
DATA = {io.TextIOWrapper, memoryview, *VIEWS}


class UnpicklableError(TypeError):
    """Raised if an object cannot be pickled for another process."""


def unpicklable(name: str, error: Exception, remedy: str) -> UnpicklableError:
    """Create an error for an object that cannot be pickled. `name` describes it in the message."""
    return UnpicklableError(f"{name}: {str(error) or type(error).__name__}. {remedy}")


class Pickled(NamedTuple):
    """A pickled list whose first item is the object, and the large buffers outside the pickle.

    The buffers are views, so write them before the object changes. `modules` are the importable
    modules that the pickle refers to.
    """

    data: bytes
    buffers: list[memoryview]
    modules: tuple[str, ...] = ()


def dump(obj: object, *, name: str = "worker", reducers: Reducers | None = None) -> Pickled:
    """Pickle an object for a new process that can import the same modules.

    `name` describes the object in messages. A `Pickled` is returned unchanged. If pickling fails,
    the TypeError's message names the offending attribute if possible, and suggests a remedy.
    """
    if isinstance(obj, Pickled):
        return obj
    modules: dict[str, None] = {}
    buffers: list[memoryview] = []
    reducers = reducers or {}
    try:
        data = _dump_by_value(obj, modules, reducers, buffers)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - its traceback adds nothing to the name
        remedy = REMEDY.format(name=name)
        for attribute, part in _attributes_of(obj).items():
            try:
                _dump_by_value(part, {}, reducers, None)
            except Exception as its:  # noqa: BLE001 - any error is raised below
                raise unpicklable(f"{name}.{attribute}", its, remedy) from None
        raise unpicklable(name, error, remedy) from None
    return Pickled(data, buffers, tuple(modules))


def _attributes_of(obj: object) -> dict[str, object]:
    """Return the attributes that are pickled."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return dict(zip(obj._fields, obj, strict=True))
    try:
        state: object = obj.__reduce_ex__(5)[2]
    except Exception:  # noqa: BLE001 - then the object itself is at fault
        return {}
    return state if isinstance(state, dict) else {}


def dumps(
    obj: object,
    buffers: list[memoryview] | None = None,
    reducers: Callable[[], Reducers] | None = None,
) -> bytes:
    """Pickle an object for the trainer or a running worker.

    Large buffers of arrays and CPU tensors are appended to `buffers`, if given. Without `buffers`,
    the pickle can be read without cseq. Errors from pickle are passed on unchanged.
    """
    keep = None if buffers is None else _keep_in(buffers)
    reducers = reducers or (dict if buffers is None else data_reducers)
    file = io.BytesIO()
    try:
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=keep)
        pickler.dispatch_table = _table_of(reducers)
        pickler.dump(obj)
    except NAMELESS:
        if buffers is not None:
            buffers.clear()
        file = io.BytesIO()
        by_value_pickler()(file, keep, _table_of(reducers), named_here, DATA).dump(obj)
    return file.getvalue()


# Maps `reducers` to a pair: (torch's classes, a copy of copyreg's table), and the merged table.
_tables: dict[Callable[[], Reducers], tuple[object, Reducers]] = {}


def _table_of(reducers: Callable[[], Reducers]) -> Reducers:
    """Return copyreg's table merged with the reducers, cached until it changes or torch loads."""
    made_of, table = _tables.get(reducers, (None, {}))
    if made_of != (_torch_types(), copyreg.dispatch_table):
        own: Reducers = copyreg.dispatch_table.copy()
        table = own | DTYPES | reducers()
        _tables[reducers] = (_torch_types(), own), table
    return table


def _keep_in(buffers: list[memoryview] | None) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `buffer_callback` that adds large buffers to a list or, without one, drops all."""

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffers is None:
            return False
        view = buffer.raw()
        if view.nbytes < IN_BAND:
            return True
        buffers.append(view)
        return False

    return is_in_band


# -- arrays and tensors, out of band ---------------------------------------------------------------
# torch pickles a tensor in terms of its storage, and a storage as a torch.save file inside the
# pickle. In this module, the bytes of a storage become a buffer. Storages keep their identity, so
# tensors that share a storage also share one in the other process.


def data_reducers() -> Reducers:
    """Return the reducers for arrays and, if torch is loaded, for tensors and storages."""
    reducers: Reducers = {np.ndarray: _reduce_array, np.memmap: _reduce_array}
    for_torch = reduce_tensor, reduce_storage, _reduce_typed
    return reducers | dict(zip(_torch_types(), for_torch, strict=False))


def _torch_types() -> tuple[type, ...]:
    """Return torch's tensor and storage classes, if torch is loaded."""
    torch = sys.modules.get("torch")
    tensor, storage = getattr(torch, "Tensor", None), getattr(torch, "UntypedStorage", None)
    typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
    # Another thread may still be importing torch.
    return (tensor, storage, typed) if tensor and storage and typed else ()


def _reduce_array(array: _Array) -> Reduced:
    dtype, flat = array.dtype, flat_of(array)
    if dtype.kind not in "biufcmMSUV" or dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    if flat is None:
        array = array.copy()
        flat = array.reshape(-1)
    # NumPy does not export dates and times as buffers.
    view: Any = flat.view(np.uint8) if dtype.kind in "mMV" else flat
    buffer = pickle.PickleBuffer(view)
    data = bytearray(buffer.raw()) if flat.nbytes < IN_BAND else buffer
    kind = dtype.str if dtype.kind != "V" and is_usual(dtype) else dtype
    return np.ndarray, (array.shape, kind, data, 0, array.strides)


def is_usual(dtype: np.dtype[Any]) -> bool:
    """Return True unless a dtype has properties that `==` ignores, such as metadata."""
    if dtype.metadata is not None or type(dtype) in DTYPES or dtype.isalignedstruct:
        return False
    if dtype.fields is not None:
        return all(is_usual(part) for part, *_ in dtype.fields.values())
    return dtype.subdtype is None or is_usual(dtype.base)


def _reduce_dtype(dtype: np.dtype[Any]) -> Reduced:
    make, (_, *flags), *state = tuple(dtype.__reduce__())
    return make, (dtype.char, *flags), *state


# If two types compare equal, such as long and long long on Linux, numpy pickles both as one.
DTYPES: Reducers = {
    type(dtype): _reduce_dtype
    for dtype in map(np.dtype, np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
    if np.dtype(dtype.str).char != dtype.char
}


def _reduce_as_torch(value: object) -> Reduced:
    return value.__reduce_ex__(5)


def reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor to its storage and a view. Special tensors are left to torch."""
    if str(tensor.layout).startswith("torch.sparse"):
        return _sparse_tensor, _reduce_as_torch(tensor)[1]
    if (
        tensor.layout is not sys.modules["torch"].strided
        or not tensor.is_cpu
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
    ):
        return _reduce_as_torch(tensor)
    part = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _tensor_on, (tensor.untyped_storage(), tensor.dtype, part, tensor.requires_grad)


def _tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    part: tuple[int, tuple[int, ...], tuple[int, ...]],
    grad: bool,  # noqa: FBT001
) -> torch.Tensor:
    empty: torch.Tensor = import_torch().empty(0, dtype=dtype, device="cpu")
    tensor = empty.set_(storage, *part)
    return tensor.requires_grad_() if grad else tensor


def _sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    """Create a sparse tensor. torch's rebuild function would keep a reference for `torch.load`."""
    import torch

    if layout is torch.sparse_coo:
        *parts, coalesced = data
        return torch.sparse_coo_tensor(*parts, is_coalesced=coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=False)


def reduce_storage(storage: torch.UntypedStorage) -> Reduced:
    """Reduce a storage to a buffer without copying."""
    if storage.device.type != "cpu":
        return _reduce_as_torch(storage)
    if not storage.nbytes():
        return type(storage), (0,)
    torch = sys.modules["torch"]
    data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return _storage_on, (pickle.PickleBuffer(data),)


def _storage_on(buffer: memoryview) -> torch.UntypedStorage:
    tensor: torch.Tensor = import_torch().from_numpy(np.frombuffer(buffer, np.uint8))
    return tensor.untyped_storage()


def _reduce_typed(storage: torch.TypedStorage) -> Reduced:
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu":
        return _reduce_as_torch(storage)
    return _typed, (untyped, storage.dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> object:
    return import_torch().storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@functools.cache
def import_torch() -> Any:
    """Import torch when the first tensor is created."""
    return importlib.import_module("torch")


# -- by value -------------------------------------------------------------------------------------


def _dump_by_value(
    obj: object, modules: dict[str, None], reducers: Reducers, buffers: list[memoryview] | None
) -> bytes:
    """Pickle an object with cloudpickle and record the modules that the pickle refers to.

    If `buffers` is None, buffers are dropped; this only tests whether pickling works.
    """
    file = io.BytesIO()
    classes = _Classes()
    reducers = data_reducers() | {np.memmap: _reduce_memmap} | reducers

    def by_name(named: Named) -> bool:
        """Record the module if a new process may import it, and leave the rest to cloudpickle."""
        module = named.__name__ if isinstance(named, types.ModuleType) else named.__module__
        if module in MAIN:
            if isinstance(named, type):
                classes.append(named)
        # A module without a spec was created at run time, not imported.
        elif module != "builtins" and getattr(sys.modules.get(module), "__spec__", None):
            modules[module] = None
        if named is _tensor_on:
            modules["torch"] = None
        return False

    pickler = by_value_pickler()(file, _keep_in(buffers), reducers, by_name)
    # `classes` is complete only after `obj` has been pickled.
    pickler.dump([obj, classes])
    return file.getvalue()


@functools.cache
def by_value_pickler() -> Callable[..., pickle.Pickler]:
    """Return the pickler class that pickles by value. This imports cloudpickle."""
    import cloudpickle

    base: type = cloudpickle.Pickler
    table: dict[type, Callable[[Any], tuple[Any, ...]]] = cloudpickle.Pickler.dispatch_table

    class Pickler(base):  # type: ignore[misc]
        def __init__(
            self,
            file: io.BytesIO,
            keep: Callable[[pickle.PickleBuffer], bool] | None,
            reducers: Reducers,
            by_name: Callable[[Named], bool],
            refused: Iterable[type] = (),
        ) -> None:
            known = {**table, types.CodeType: reduce_code, **DTYPES, **reducers}
            self.dispatch_table = {cls: known[cls] for cls in known if cls not in refused}
            self.by_name = by_name
            super().__init__(file, protocol=5, buffer_callback=keep)

        def reducer_override(self, obj: object) -> object:
            if isinstance(obj, (type, types.FunctionType, types.ModuleType)) and not self.by_name(
                obj
            ):
                return super().reducer_override(obj)
            return NotImplemented

    def reduce_code(code: types.CodeType) -> Reduced:
        # cloudpickle drops the file name so that notebook functions pickle identically, but
        # tracebacks and worker stacks need it.
        reduced: tuple[object, tuple[object, ...]] = table[types.CodeType](code)
        make, args = reduced
        return make, (*args[:FILENAME], code.co_filename, *args[FILENAME + 1 :])

    return Pickler


class _Classes(list[type]):
    """Classes from the user's script. Unpickling adds them to ``__main__``.

    A worker can then pickle their instances by class name.
    """

    def __reduce__(self) -> tuple[object, ...]:
        names = [cls for cls in self if "." not in cls.__qualname__]
        return (publish, (names,)) if names else (list, ())


def publish(named: Iterable[type | types.FunctionType]) -> None:
    """Add classes and functions to ``__main__``, unless their names are in use."""
    main = sys.modules["__main__"]
    for one in named:
        if one.__module__ in MAIN:
            sys.modules.setdefault(one.__module__, main)
            if not hasattr(main, one.__name__):
                setattr(main, one.__name__, one)


def named_here(obj: Named) -> bool:
    """Return True if this process can find a class or function by its name."""
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):
        return False


# -- worker data ----------------------------------------------------------------------------------


_Array: TypeAlias = np.ndarray[Any, Any]
_Memmap: TypeAlias = "np.memmap[Any, Any]"


def _reduce_memmap(array: _Memmap) -> Reduced:
    """Reduce a memory-mapped array to its location in the file, if possible."""
    place = _place_in_file(array)
    return _reduce_array(array.view(np.ndarray)) if place is None else (np.memmap, place)


def _place_in_file(array: _Memmap) -> tuple[object, ...] | None:
    """Return `np.memmap` arguments that map the same part of the file, or None."""
    mapped: mmap.mmap | None = array._mmap  # type: ignore[attr-defined]
    if mapped is None or array.filename is None or array.size == 0:
        return None
    if array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        # With mode 'c', the array may have private changes that are not in the file.
        return None
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    skipped = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    at = array.ctypes.data - begin + skipped
    with contextlib.suppress(OSError):
        if os.path.getsize(array.filename) >= at + array.nbytes:
            # The mapping is private, so a worker's writes are not shared.
            mode = "r" if array.mode == "r" else "c"
            return str(array.filename), array.dtype, mode, at, array.shape
    return None
