"""Objects as bytes, for two kinds of readers.

`dump` is for a new process: cloudpickle writes by value what is in ``__main__`` or has no name, and
all else by reference, as in every pickle. `dumps` is for a process that runs already, between a
worker and the trainer: both have the same modules, and each its own copy of the user's classes. So
what has a name goes by reference, and the rest by value.

Both leave large arrays and tensors out of the pickle, as buffers: `codec` writes them beside it. A
data set of gigabytes is therefore in memory once, whatever the number of workers.
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

# What a reducer returns: a name, or a tuple.
Reduced: TypeAlias = "str | tuple[Any, ...]"
Reducers: TypeAlias = "dict[type, Callable[[Any], Reduced]]"

# The user's script, here and in multiprocessing's children.
MAIN = ("__main__", "__mp_main__")
# Bytes: smaller buffers stay inside the pickle.
IN_BAND = 512
# The index of the file's name among the arguments of `types.CodeType`.
FILENAME = 10

# What pickle raises for classes and functions that it cannot find by their names.
NAMELESS = (pickle.PicklingError, AttributeError, TypeError)

REMEDY = (
    "Worker processes get a copy of the {name}, made with pickle. Make or open such things where "
    "they are first used, in each worker process and not in the training process"
)

# Data that cloudpickle takes and pickle does not; of a file and a memoryview it makes another type.
EMPTY: tuple[dict[str, object], ...] = {}, OrderedDict()
VIEWS = {type(view()) for one in EMPTY for view in (one.keys, one.values, one.items)}
DATA = {io.TextIOWrapper, memoryview, *VIEWS}


class UnpicklableError(TypeError):
    """Something cannot be pickled for another process."""


def unpicklable(name: str, error: Exception, remedy: str) -> UnpicklableError:
    """Make the error for something that cannot be pickled, which a message calls `name`."""
    return UnpicklableError(f"{name}: {str(error) or type(error).__name__}. {remedy}")


class Pickled(NamedTuple):
    """An object as bytes: the pickle of a list that begins with it, and its large buffers.

    The buffers are views of the object's own memory, not copies: write them before it changes.
    `modules` are those that it refers to by name, as far as is known.
    """

    data: bytes
    buffers: list[memoryview]
    modules: tuple[str, ...] = ()


def dump(obj: object, *, name: str = "worker", reducers: Reducers | None = None) -> Pickled:
    """Pickle an object so that a new process can read it, if it can import the same modules.

    Parameters
    ----------
    obj : object
        A class, a factory, a `functools.partial`, or an object with data. What this function has
        returned is returned.
    name : str
        What error messages call it.
    reducers : dict, optional
        How objects of some types are pickled, by type.

    Raises
    ------
    TypeError
        When it cannot be pickled; the message says which of its attributes cannot, if one is to
        blame, and what to do.
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
    except Exception as error:  # noqa: BLE001 - its traceback is no news: the name says where
        remedy = REMEDY.format(name=name)
        for attribute, part in _attributes_of(obj).items():
            try:
                _dump_by_value(part, {}, reducers, None)
            except Exception as its:  # noqa: BLE001 - it is raised, whatever it is
                raise unpicklable(f"{name}.{attribute}", its, remedy) from None
        raise unpicklable(name, error, remedy) from None
    return Pickled(data, buffers, tuple(modules))


def _attributes_of(obj: object) -> dict[str, object]:
    """Return the attributes that an object is pickled with."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return dict(zip(obj._fields, obj, strict=True))
    try:
        state: object = obj.__reduce_ex__(5)[2]
    except Exception:  # noqa: BLE001 - then this object itself is the one to blame
        return {}
    return state if isinstance(state, dict) else {}


def dumps(
    obj: object,
    buffers: list[memoryview] | None = None,
    reducers: Callable[[], Reducers] | None = None,
) -> bytes:
    """Pickle something for a process at the other end of a pool; `pickle.loads` reads it.

    If `buffers` is given, large buffers of arrays and CPU tensors, inside any objects, are appended
    to it. `reducers` replaces `data_reducers`, which say how. Without `buffers`, the pickle can be
    read without cseq. An exception of pickling is raised as it is.
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


# Tables that were merged, each with what it was made of.
_tables: dict[Callable[[], Reducers], tuple[object, Reducers]] = {}


def _table_of(reducers: Callable[[], Reducers]) -> Reducers:
    """Return copyreg's table with reducers in it; it is merged again when one of both changes."""
    made_of, table = _tables.get(reducers, (None, {}))
    if made_of != (_torch_types(), copyreg.dispatch_table):
        own: Reducers = copyreg.dispatch_table.copy()
        table = own | DTYPES | reducers()
        _tables[reducers] = (_torch_types(), own), table
    return table


def _keep_in(buffers: list[memoryview] | None) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a pickler's `buffer_callback`: it appends large buffers; without a list, drops all."""

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
# torch pickles a tensor as a function of its storage, and a storage as a file of torch.save within
# the pickle. Here, the storage's bytes are a buffer. Storages keep their identity, so tensors that
# share one do so in the other process, too.


def data_reducers() -> Reducers:
    """Return how arrays are pickled, and torch's tensors and storages where it is loaded."""
    reducers: Reducers = {np.ndarray: _reduce_array, np.memmap: _reduce_array}
    for_torch = reduce_tensor, reduce_storage, _reduce_typed
    return reducers | dict(zip(_torch_types(), for_torch, strict=False))


def _torch_types() -> tuple[type, ...]:
    """Return torch's Tensor and both its storages; none where torch is not loaded."""
    torch = sys.modules.get("torch")
    tensor, storage = getattr(torch, "Tensor", None), getattr(torch, "UntypedStorage", None)
    typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
    # Without one of them, another thread is importing torch.
    return (tensor, storage, typed) if tensor and storage and typed else ()


def _reduce_array(array: _Array) -> Reduced:
    """Reduce an array to its buffer and strides; one with gaps to the buffer of a copy."""
    dtype, flat = array.dtype, flat_of(array)
    if dtype.kind not in "biufcmMSUV" or dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    if flat is None:
        array = array.copy()
        flat = array.reshape(-1)
    # numpy gives no buffer of dates and times.
    view: Any = flat.view(np.uint8) if dtype.kind in "mMV" else flat
    buffer = pickle.PickleBuffer(view)
    data = bytearray(buffer.raw()) if flat.nbytes < IN_BAND else buffer
    kind = dtype.str if dtype.kind != "V" and is_usual(dtype) else dtype
    return np.ndarray, (array.shape, kind, data, 0, array.strides)


def is_usual(dtype: np.dtype[Any]) -> bool:
    """Tell whether a type has nothing that `==` does not look at, such as metadata."""
    if dtype.metadata is not None or type(dtype) in DTYPES or dtype.isalignedstruct:
        return False
    if dtype.fields is not None:
        return all(is_usual(part) for part, *_ in dtype.fields.values())
    return dtype.subdtype is None or is_usual(dtype.base)


def _reduce_dtype(dtype: np.dtype[Any]) -> Reduced:
    make, (_, *flags), *state = tuple(dtype.__reduce__())
    return make, (dtype.char, *flags), *state


# Of two types that are equal (long and long long), numpy's text, and its pickle, name one.
DTYPES: Reducers = {
    type(dtype): _reduce_dtype
    for dtype in map(np.dtype, np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
    if np.dtype(dtype.str).char != dtype.char
}


def _reduce_as_torch(value: object) -> Reduced:
    """Reduce something of torch's in its own way, which has no types."""
    return value.__reduce_ex__(5)


def reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor to its storage and what part of that it is; odd ones as torch does."""
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
    """Make a tensor of a part of a storage."""
    empty: torch.Tensor = import_torch().empty(0, dtype=dtype, device="cpu")
    tensor = empty.set_(storage, *part)
    return tensor.requires_grad_() if grad else tensor


def _sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    """Make a sparse tensor; torch's own function would keep it, for `torch.load` to look at."""
    import torch

    if layout is torch.sparse_coo:
        *parts, coalesced = data
        return torch.sparse_coo_tensor(*parts, is_coalesced=coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=False)


def reduce_storage(storage: torch.UntypedStorage) -> Reduced:
    """Reduce a storage to its bytes, not copied."""
    if storage.device.type != "cpu":
        return _reduce_as_torch(storage)
    if not storage.nbytes():
        return type(storage), (0,)
    torch = sys.modules["torch"]
    data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return _storage_on, (pickle.PickleBuffer(data),)


def _storage_on(buffer: memoryview) -> torch.UntypedStorage:
    """Make a storage on a buffer, which is neither copied nor read."""
    tensor: torch.Tensor = import_torch().from_numpy(np.frombuffer(buffer, np.uint8))
    return tensor.untyped_storage()


def _reduce_typed(storage: torch.TypedStorage) -> Reduced:
    """Reduce a storage of a type: to one without, and the type."""
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu":
        return _reduce_as_torch(storage)
    return _typed, (untyped, storage.dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> object:
    """Make a storage of a type."""
    return import_torch().storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@functools.cache
def import_torch() -> Any:
    """Import torch, once there is a tensor to be made."""
    return importlib.import_module("torch")


# -- by value -------------------------------------------------------------------------------------


def _dump_by_value(
    obj: object, modules: dict[str, None], reducers: Reducers, buffers: list[memoryview] | None
) -> bytes:
    """Pickle with cloudpickle, and note the modules that the pickle refers to.

    Without a list of buffers, these are dropped: to test whether something can be pickled.
    """
    file = io.BytesIO()
    classes = _Classes()
    reducers = data_reducers() | {np.memmap: _reduce_memmap} | reducers

    def by_name(named: Named) -> bool:
        """Note a module that a new process may import; then let cloudpickle decide."""
        module = named.__name__ if isinstance(named, types.ModuleType) else named.__module__
        if module in MAIN:
            if isinstance(named, type):
                classes.append(named)
        # One without a spec was made by another module, and will be again.
        elif module != "builtins" and getattr(sys.modules.get(module), "__spec__", None):
            modules[module] = None
        if named is _tensor_on:
            modules["torch"] = None
        return False

    pickler = by_value_pickler()(file, _keep_in(buffers), reducers, by_name)
    # In this order, since all classes are known only at the end.
    pickler.dump([obj, classes])
    return file.getvalue()


@functools.cache
def by_value_pickler() -> Callable[..., pickle.Pickler]:
    """Make the class of picklers by value; cloudpickle is imported here."""
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
        # cloudpickle writes "<dynamic-code>" for the file, so that a notebook's function has always
        # the same pickle. Here, tracebacks and stacks of workers are to name file and line.
        reduced: tuple[object, tuple[object, ...]] = table[types.CodeType](code)
        make, args = reduced
        return make, (*args[:FILENAME], code.co_filename, *args[FILENAME + 1 :])

    return Pickler


class _Classes(list[type]):
    """Classes of the user's script that went by value; unpickling puts them into ``__main__``.

    So a worker process can pickle their instances by name, and the trainer finds its own class
    under that name.
    """

    def __reduce__(self) -> tuple[object, ...]:
        names = [cls for cls in self if "." not in cls.__qualname__]
        return (publish, (names,)) if names else (list, ())


def publish(named: Iterable[type | types.FunctionType]) -> None:
    """Make a script's classes and functions known by their names here, unless these are taken."""
    main = sys.modules["__main__"]
    for one in named:
        if one.__module__ in MAIN:
            sys.modules.setdefault(one.__module__, main)
            if not hasattr(main, one.__name__):
                setattr(main, one.__name__, one)


def named_here(obj: Named) -> bool:
    """Whether a class or function has a name in this process, importable or not."""
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):
        return False


# -- data of a worker -----------------------------------------------------------------------------


_Array: TypeAlias = np.ndarray[Any, Any]
_Memmap: TypeAlias = "np.memmap[Any, Any]"


def _reduce_memmap(array: _Memmap) -> Reduced:
    """Reduce an array that maps a file to its place there; else, as any other one."""
    place = _place_in_file(array)
    return _reduce_array(array.view(np.ndarray)) if place is None else (np.memmap, place)


def _place_in_file(array: _Memmap) -> tuple[object, ...] | None:
    """Find arguments for `np.memmap` that map the same part of the same file, if possible."""
    mapped: mmap.mmap | None = array._mmap  # type: ignore[attr-defined]
    if mapped is None or array.filename is None or array.size == 0:
        return None
    if array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        # In mode 'c', the array has private changes that are not in the file.
        return None
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    skipped = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    at = array.ctypes.data - begin + skipped
    with contextlib.suppress(OSError):
        if os.path.getsize(array.filename) >= at + array.nbytes:
            # A worker's changes are its own.
            mode = "r" if array.mode == "r" else "c"
            return str(array.filename), array.dtype, mode, at, array.shape
    return None
