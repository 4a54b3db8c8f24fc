"""Objects as bytes, for two kinds of readers.

`dump` is for a new process: what it can import goes by reference, as in every pickle, and all else
by value with cloudpickle, which is imported only then. `dumps` is for a process that runs already,
between a worker and the trainer: both have the same modules, and each its own copy of the user's
classes. So what has a name goes by reference, and the rest by value.

Large arrays and tensors stay out of the pickle, as buffers: `codec` writes both. A data set of
gigabytes is therefore in memory once, whatever the number of workers.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import io
import mmap
import os
import pickle
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq._lock import Lock
from cseq.importable import MAIN, Importable, named_here
from cseq.threads import imported
from cseq.unpicklable import UnpicklableError, unpicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Pickled", "dump", "dumps", "reducing"]

Reduced: TypeAlias = Any  # what a reducer returns: a name, a tuple, or NotImplemented

IN_BAND = 512  # bytes; buffers below this stay inside the pickle

# What pickle raises for classes and functions that it cannot find by their names.
NAMELESS = (pickle.PicklingError, AttributeError, TypeError)

NEEDS_CLOUDPICKLE = (
    "{name}: {missing} cannot be imported by worker processes and has to go to them by value, "
    "which needs cloudpickle: pip install cloudpickle, or put it in a module that can be imported"
)
REMEDY = (
    "Worker processes get a copy of the {name}, made with pickle. Open such things where they are "
    "first used, in each worker process (and not before, for a look at a sample), or {otherwise}"
)
THREADS = "use MTSequence, whose threads copy nothing"
OTHERWISE = {"producer": "start the workers by 'fork', which copies nothing"}

# cloudpickle has one list of modules that go by value, for the whole process.
_by_value_lock = Lock()


class Pickled(NamedTuple):
    """An object as bytes: the pickle of a list that begins with it, and its large buffers.

    The buffers are views of the object's own memory, not copies: write them before it changes.
    """

    data: bytes
    buffers: list[memoryview]
    modules: tuple[str, ...] = ()  # that it refers to by name, as far as is known


def dump(obj: object, *, name: str = "worker") -> Pickled:
    """Pickle an object so that any process of this machine can read it.

    Parameters
    ----------
    obj : object
        A class, a factory, a `functools.partial`, or an object with data.
    name : str
        What error messages call it.

    Raises
    ------
    TypeError
        When it cannot be pickled; the message says which attribute is to blame and what to do.
    """
    modules = Importable()
    buffers: list[memoryview] = []
    try:
        data = _dump_plainly(obj, modules, buffers)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, cloudpickle can do more
        buffers.clear()
        data = _dump_otherwise(obj, name, modules, buffers, error)
    return Pickled(data, buffers, modules.importable())


class _Reducing(threading.local):
    """The function that a thread has given to `reducing`."""

    reduce: Callable[[object], Reduced] | None = None


_thread = _Reducing()


@contextlib.contextmanager
def reducing(reduce: Callable[[object], Reduced]) -> Iterator[None]:
    """In this context, have `dump` ask a function, in this thread, how objects are reduced.

    It returns what a pickler's ``reducer_override`` does: NotImplemented for all others.
    """
    before, _thread.reduce = _thread.reduce, reduce
    try:
        yield
    finally:
        _thread.reduce = before


def dumps(obj: object, buffers: list[memoryview] | None = None, *, tensors: bool = True) -> bytes:
    """Pickle something for a process at the other end of a pool; `pickle.loads` reads it.

    Large buffers are appended to `buffers`, if that is given: those of arrays and CPU tensors, in
    whatever objects these are. `tensors`: False if there is surely no tensor, which is quicker.
    Raises what pickling raises.
    """
    keep = None if buffers is None else _keep_in(buffers)
    tables = _tensor_tables() if tensors and buffers is not None else {}
    try:
        if not tables:
            return pickle.dumps(obj, protocol=5, buffer_callback=keep)
        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=keep)
        pickler.dispatch_table = copyreg.dispatch_table | tables
        pickler.dump(obj)
        return file.getvalue()
    except NAMELESS:
        if not _has_cloudpickle():
            raise
    if buffers is not None:
        buffers.clear()
    file = io.BytesIO()

    def reduce(part: object) -> Reduced:
        reducer = tables.get(type(part))
        return NotImplemented if reducer is None else reducer(part)

    by_value_pickler()(file, keep, named_here, reduce).dump(obj)
    return file.getvalue()


def _keep_in(buffers: list[memoryview] | None) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a pickler's `buffer_callback` that appends large buffers; None: drops all of them."""

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffers is None:
            return False
        view = buffer.raw()
        if view.nbytes < IN_BAND:
            return True
        buffers.append(view)
        return False

    return is_in_band


# -- tensors, out of band ------------------------------------------------------------------------
# torch pickles a tensor as a function of its storage, and a storage as a file of torch.save within
# the pickle. In `dumps`, the storage's bytes are a buffer. Storages keep their identity, so tensors
# that share one do so in the other process, too.


def _tensor_tables() -> dict[type, Callable[[Any], Reduced]]:
    """Return how torch's storages are pickled, by their types; empty where torch is not loaded."""
    torch = sys.modules.get("torch")
    storage = getattr(torch, "UntypedStorage", None)
    typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
    if storage is None or typed is None:  # or torch is being imported by another thread
        return {}
    return {storage: _reduce_storage, typed: _reduce_typed}


def _reduce_storage(storage: Any) -> Reduced:
    """Reduce a storage to its bytes, not copied."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return storage.__reduce__()
    torch = sys.modules["torch"]
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return storage_on, (pickle.PickleBuffer(data),)


def _reduce_typed(storage: Any) -> Reduced:
    """Reduce a storage of a type: to one without, and the type."""
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu" or not untyped.nbytes():
        return storage.__reduce__()
    return _typed, (untyped, storage.dtype)


def storage_on(buffer: Any) -> Any:
    """Make a storage on a buffer, which is neither copied nor read."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).untyped_storage()


def _typed(storage: Any, dtype: Any) -> Any:
    """Make a storage of a type."""
    torch = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# -- for a new process; without a list of buffers: to test whether something can be pickled --------


class _NotImportableError(Exception):
    """The plain pickler met a class or function that worker processes cannot import."""


class _Plain(pickle.Pickler):
    """The standard pickler, which gives up at the first thing that has to go by value."""

    def __init__(
        self, file: io.BytesIO, modules: Importable, buffers: list[memoryview] | None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=_keep_in(buffers))
        self._dry = buffers is None
        self._modules = modules

    def reducer_override(self, obj: object) -> Reduced:
        if not isinstance(obj, (type, types.FunctionType)):
            return _reduce_data(obj, self._modules, dry=self._dry)
        if not self._modules.has(obj):
            raise _NotImportableError(f"{obj.__module__}.{obj.__qualname__}")
        return NotImplemented


def _dump_plainly(obj: object, modules: Importable, buffers: list[memoryview] | None) -> bytes:
    """Pickle by reference."""
    file = io.BytesIO()
    _Plain(file, modules, buffers).dump([obj, None])
    return file.getvalue()


def _dump_by_value(obj: object, modules: Importable, buffers: list[memoryview] | None) -> bytes:
    """Pickle with cloudpickle; modules that workers cannot import go by value."""
    file = io.BytesIO()
    classes = _Classes()
    with _modules_by_value() as register:

        def by_name(named: Any) -> bool:
            """Register a module that goes by value; then let cloudpickle decide."""
            module = named.__name__ if isinstance(named, types.ModuleType) else named.__module__
            if not modules.findable(module):
                register(module)
            if isinstance(named, type) and module in MAIN:
                classes.append(named)
            return False

        reduce = functools.partial(_reduce_data, modules=modules, dry=buffers is None)
        pickler = by_value_pickler()(file, _keep_in(buffers), by_name, reduce)
        pickler.dump([obj, classes])  # in this order: the classes are known at the end
    return file.getvalue()


def _dump_otherwise(
    obj: object, name: str, modules: Importable, buffers: list[memoryview], plainly: Exception
) -> bytes:
    """Pickle by value what cannot be pickled plainly, or say which part of it is to blame."""
    if not _has_cloudpickle():
        if isinstance(plainly, _NotImportableError):
            text = NEEDS_CLOUDPICKLE.format(name=name, missing=plainly)
            raise UnpicklableError(text) from plainly
        raise _blame(obj, name, plainly, _dump_plainly) from plainly
    try:
        return _dump_by_value(obj, modules, buffers)
    except MemoryError:
        raise
    except Exception as error:
        raise _blame(obj, name, error, _dump_by_value) from error


def _blame(
    obj: object, name: str, error: Exception, dump: Callable[[object, Importable, None], bytes]
) -> UnpicklableError:
    """Make the error for an object that this way of pickling cannot take."""
    modules = Importable()
    return unpicklable(
        obj,
        name,
        error,
        probe=lambda part: dump(part, modules, None),
        known=modules.has,
        remedy=REMEDY.format(name=name, otherwise=OTHERWISE.get(name, THREADS)),
    )


# -- by value -------------------------------------------------------------------------------------


_ByValue: TypeAlias = Any  # a subclass of cloudpickle.Pickler, which has no type hints


@functools.cache
def by_value_pickler() -> _ByValue:
    """Make the class of picklers by value; cloudpickle is imported here."""
    base = imported("cloudpickle").Pickler

    def prepare(
        self: _ByValue,
        file: io.BytesIO,
        keep: Callable[[pickle.PickleBuffer], bool] | None,
        by_name: Callable[[Any], bool],
        reduce: Callable[[object], Reduced],
    ) -> None:
        base.__init__(self, file, protocol=5, buffer_callback=keep)
        self.by_name, self.reduce = by_name, reduce

    def reducer_override(self: _ByValue, obj: object) -> Reduced:
        if not isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            return self.reduce(obj)
        return NotImplemented if self.by_name(obj) else base.reducer_override(self, obj)

    return type("_ByValue", (base,), {"__init__": prepare, "reducer_override": reducer_override})


def _has_cloudpickle() -> bool:
    """Whether cloudpickle is there, to pickle by value."""
    try:
        by_value_pickler()
    except ModuleNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _modules_by_value() -> Iterator[Callable[[str], None]]:
    """In this context, give the function that makes cloudpickle pickle a module by value."""
    cloudpickle = imported("cloudpickle")
    ours: list[types.ModuleType] = []

    def register(name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            ours.append(module)

    with _by_value_lock.hold():
        try:
            yield register
        finally:
            for module in ours:
                cloudpickle.unregister_pickle_by_value(module)


class _Classes(list[type]):
    """Classes of the user's script that went by value; unpickling puts them into ``__main__``.

    So a worker process can pickle their instances by name, and the trainer finds its own class
    under that name.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _publish, ([cls for cls in self if "." not in cls.__qualname__],)


def _publish(classes: list[type]) -> None:
    """Make classes known under their names in ``__main__``, unless the names are taken."""
    for cls in classes:
        main = sys.modules.setdefault(cls.__module__, sys.modules["__main__"])
        if not hasattr(main, cls.__name__):
            setattr(main, cls.__name__, cls)


# -- data that would be copied without need -------------------------------------------------------


_Array: TypeAlias = np.ndarray[Any, Any]
_Memmap: TypeAlias = Any  # np.memmap, with the attributes that its type hints leave out
_Tensor: TypeAlias = Any  # torch.Tensor


def _reduce_data(obj: object, modules: Importable, *, dry: bool) -> Reduced:
    """Put arrays and tensors out of band that do not go there by themselves; see `reducing`."""
    if _thread.reduce is not None:
        reduced = _thread.reduce(obj)
        if reduced is not NotImplemented:
            return reduced
    if isinstance(obj, np.ndarray):
        return _reduce_array(obj, dry=dry)
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is getattr(torch, "Tensor", None):
        modules.findable("torch")
        return _reduce_tensor(obj)
    return NotImplemented


def _reduce_array(array: _Array, *, dry: bool) -> Reduced:
    """Reduce an array: if not contiguous, to a copy; if it maps a file, to its place there."""
    if type(array) not in (np.ndarray, np.memmap) or array.dtype.hasobject:
        return NotImplemented
    if dry:
        return np.empty, (0,)
    if isinstance(array, np.memmap):
        place = _place_in_file(array)
        if place is not None:
            return np.memmap, place
    if array.dtype.kind in "mM":  # dates and times: numpy gives no buffer of them
        return _as_type, (array.view(np.int64), array.dtype)
    if type(array) is np.ndarray and (array.flags.c_contiguous or array.flags.f_contiguous):
        return NotImplemented
    return np.ascontiguousarray(array).view(np.ndarray).__reduce_ex__(5)


def _as_type(array: _Array, dtype: np.dtype[Any]) -> _Array:
    """Look at an array's memory as another type."""
    return array.view(dtype)


def _place_in_file(array: _Memmap) -> tuple[Any, ...] | None:
    """Find arguments for `np.memmap` that map the same part of the same file, if possible."""
    if array._mmap is None or array.filename is None or array.size == 0:
        return None
    if array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        return None  # mode 'c' has private changes that are not in the file
    begin = np.frombuffer(array._mmap, np.uint8).ctypes.data
    skipped = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    at = array.ctypes.data - begin + skipped
    with contextlib.suppress(OSError):
        if os.path.getsize(array.filename) >= at + array.nbytes:
            mode = "r" if array.mode == "r" else "c"  # a worker's changes are its own
            return str(array.filename), array.dtype, mode, at, array.shape
    return None


def _reduce_tensor(tensor: _Tensor) -> Reduced:
    """Reduce a plain CPU tensor to its array: torch's own way copies data into the pickle."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.__dict__:
        return NotImplemented
    try:
        array = tensor.numpy() if tensor.is_contiguous() else None
    except (TypeError, RuntimeError):  # a type or a layout that numpy does not have
        array = None
    return NotImplemented if array is None else (_tensor, (array,))


def _tensor(array: _Array) -> _Tensor:
    """Make a CPU tensor on an array's memory."""
    return importlib.import_module("torch").from_numpy(array)
