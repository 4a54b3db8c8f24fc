"""The user's worker as bytes that every worker process can read, made once.

An object is pickled once (protocol 5, large arrays out of band) and laid down in one anonymous
file; every worker process maps that file privately (copy on write). A data set of gigabytes is
therefore in memory once, whatever the number of workers, and a worker may still write to its
arrays without another one seeing it.

What a worker process can import goes by reference, as in every pickle. What it cannot import
goes by value with cloudpickle, which is imported only then: everything in ``__main__`` (scripts,
notebooks), classes and functions defined inside functions, and modules that the import system
would not find again.

::

    dump(worker) -> Payload ── share() ──> file ── read(fd), in every worker process ──> worker
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import importlib
import importlib.machinery
import io
import itertools
import mmap
import os
import pickle
import reprlib
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from cseq.descriptors import anonymous_file
from cseq.threads import imported

if TYPE_CHECKING:
    from cseq._core import Descriptor

__all__ = ["Payload", "dump", "dumps", "load", "loads", "promise", "read"]

UserObject: TypeAlias = Any  # whatever the user brought
Reduced: TypeAlias = Any  # what a reducer returns: a name, a tuple, or NotImplemented

_MAIN = ("__main__", "__mp_main__")  # the user's script, here and in multiprocessing's children
_MAGIC = b"cseq/obj"
_HEAD = struct.Struct("<8sQQ")  # magic, bytes of the pickle, number of buffers
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_SMALL = 1024  # bytes: below, a buffer of its own costs more than a copy
MOST_LEVELS = 24  # how deep the search for what cannot be pickled goes
MOST_PROBES = 4000  # how many objects that search tries to pickle

# Modules that worker processes will have although no finder finds them.
_promised: set[str] = set()

# cloudpickle's list of modules that go by value is one for the process.
_by_value_lock = threading.Lock()


class Payload:
    """An object as bytes: a pickle, and the large buffers that it refers to.

    The buffers are views of the object's own memory, not copies: write the payload before the
    object changes.

    Attributes
    ----------
    pickle : bytes
        The object without its large buffers.
    buffers : list of memoryview
        One flat view of bytes for each large buffer, in the pickle's order.
    by_value : bool
        Whether reading it needs cloudpickle.
    modules : tuple of str
        What reading it imports, as far as it is known: the modules that it refers to by name.
    """

    __slots__ = ("buffers", "by_value", "modules", "pickle")

    def __init__(
        self,
        pickle: bytes,
        buffers: list[memoryview],
        *,
        by_value: bool = False,
        modules: tuple[str, ...] = (),
    ) -> None:
        self.pickle = pickle
        self.buffers = buffers
        self.by_value = by_value
        self.modules = modules

    @property
    def nbytes(self) -> int:
        """Bytes that `write` takes."""
        return _layout(len(self.pickle), [view.nbytes for view in self.buffers])[-1]

    def write(self, fd: int) -> int:
        """Lay the payload down at the beginning of a file, and return its size in bytes.

        Raises
        ------
        MemoryError
            When there is no room for it.
        """
        sizes = [view.nbytes for view in self.buffers]
        *places, size = _layout(len(self.pickle), sizes)
        _reserve(fd, size)
        head = _HEAD.pack(_MAGIC, len(self.pickle), len(sizes))
        with open(fd, "r+b", closefd=False) as file:
            file.write(head + struct.pack(f"<{len(sizes)}Q", *sizes))
            file.seek(places[0])
            file.write(self.pickle)
            for place, view in zip(places[1:], self.buffers, strict=True):
                file.seek(place)
                file.write(view)
        return size

    def share(self) -> Descriptor:
        """Write the payload to a new anonymous file, and return that."""
        file, _ = anonymous_file("cseq-worker")
        self.write(file.fd)
        return file


def dump(obj: object, *, name: str = "worker") -> Payload:
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
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALL:
            return True  # stays in the pickle
        buffers.append(view)
        return False

    modules = _Modules()
    by_value = _pickle(obj, name, _Sink(file, keep, buffers.clear, dry=False), modules)
    return Payload(file.getvalue(), buffers, by_value=by_value, modules=modules.importable())


def promise(module: str) -> None:
    """Say that worker processes will have a module that they cannot import by themselves.

    Its classes and functions then go by reference. Whoever says so sees to it that the module is
    there before the rest of a pickle is read.
    """
    _promised.add(module)


def dumps(obj: object) -> bytes:
    """Pickle something small for a process at the other end of a pool, in one piece.

    By reference where the standard pickle can do that: unlike for `dump`, the reader is no new
    process but has imported its modules, and has a class of its own for each of the user's
    classes. Raises what pickling raises.
    """
    try:
        return pickle.dumps(obj, protocol=5)
    except Exception:  # noqa: BLE001 - cloudpickle can do more
        return _cloudpickled(obj)


def loads(data: bytes | memoryview) -> UserObject:
    """Make again what `dumps` has pickled."""
    return pickle.loads(data)


def load(pickled: bytes | memoryview, buffers: Iterable[Any] = ()) -> UserObject:
    """Make the object again from its pickle and its buffers (arrays are made on them, no copy)."""
    obj, _ = pickle.loads(pickled, buffers=buffers)
    return obj


def read(fd: int) -> UserObject:
    """Map a file that `Payload.write` has written, privately, and make the object again.

    The descriptor may be closed afterwards; the arrays keep the mapping. They are writable, and
    what is written to them stays in this process.

    Raises
    ------
    ValueError
        When the file was not written by `Payload.write`.
    """
    view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    magic, length, count = _HEAD.unpack_from(view) if len(view) >= _HEAD.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise ValueError(f"descriptor {fd} holds no payload: it begins with {bytes(view[:8])!r}")
    sizes = list(struct.unpack_from(f"<{count}Q", view, _HEAD.size))
    *places, _ = _layout(length, sizes)
    parts = [view[at : at + n] for at, n in zip(places, [length, *sizes], strict=True)]
    return load(parts[0], parts[1:])


# --- the file ------------------------------------------------------------------------------------


def _layout(length: int, sizes: list[int]) -> list[int]:
    """Where the pickle and each buffer begin in the file, and where the file ends."""
    at = _HEAD.size + 8 * len(sizes)
    places = []
    for size in [length, *sizes]:
        at += -at % _ALIGNMENT
        places.append(at)
        at += size
    return [*places, at]


def _reserve(fd: int, size: int) -> None:
    """Give the file all its room now: running out of it later, in a mapping, would be SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(fd, size)
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(f"no room for the worker's {size} bytes: {error}") from error
        os.ftruncate(fd, size)  # this file system cannot reserve


# --- picklers ------------------------------------------------------------------------------------


class _File(Protocol):
    """What a pickler needs of a file, and `_Sink.rewind`."""

    def write(self, data: bytes, /) -> int: ...
    def seek(self, place: int, /) -> object: ...
    def truncate(self) -> object: ...


class _Sink:
    """Where a pickler puts its bytes and its buffers, and how to begin again."""

    def __init__(
        self,
        file: _File,
        take: Callable[[pickle.PickleBuffer], bool],
        forget: Callable[[], None],
        *,
        dry: bool,
    ) -> None:
        self.file = file
        self.take = take
        self.dry = dry  # the pickle is discarded: no need to make contiguous copies
        self._forget = forget

    def rewind(self) -> None:
        """Drop what a pickler has written so far."""
        self.file.seek(0)
        self.file.truncate()
        self._forget()


class _Nothing:
    """A file that keeps nothing."""

    def write(self, data: bytes, /) -> int:
        return len(data)

    def seek(self, place: int, /) -> None:
        """Do nothing: there is one place only."""

    def truncate(self) -> None:
        """Do nothing: there is nothing."""


def _nowhere() -> _Sink:
    """Make a sink for finding out whether something can be pickled."""
    return _Sink(_Nothing(), lambda _: False, lambda: None, dry=True)


class _NotImportableError(Exception):
    """The plain pickler met a class or function that worker processes cannot import."""


class _Plain(pickle.Pickler):
    """The standard pickler, which gives up at the first thing that has to go by value."""

    def __init__(self, sink: _Sink, modules: _Modules) -> None:
        super().__init__(sink.file, protocol=5, buffer_callback=sink.take)
        self._dry = sink.dry
        self._modules = modules

    def reducer_override(self, obj: object) -> Reduced:
        if not isinstance(obj, (type, types.FunctionType)):
            return _reduce_data(obj, self._modules, dry=self._dry)
        if not self._modules.has(obj):
            raise _NotImportableError(f"{obj.__module__}.{obj.__qualname__}")
        return NotImplemented


_ByValue: TypeAlias = Any  # a subclass of cloudpickle.Pickler, which has no type hints


@functools.cache
def by_value_pickler() -> _ByValue:
    """Make the class of picklers that put by value what worker processes cannot import."""
    base = imported("cloudpickle").Pickler

    def prepare(self: _ByValue, sink: _Sink, modules: _Modules, register: _Register) -> None:
        base.__init__(self, sink.file, protocol=5, buffer_callback=sink.take)
        self.dry, self.modules, self.register = sink.dry, modules, register
        self.classes = _Classes()

    def reducer_override(self: _ByValue, obj: object) -> Reduced:
        if not isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            return _reduce_data(obj, self.modules, dry=self.dry)
        module = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
        if not self.modules.findable(module):
            self.register(module)
        if isinstance(obj, type) and module in _MAIN:
            self.classes.append(obj)
        return base.reducer_override(self, obj)

    return type("_ByValue", (base,), {"__init__": prepare, "reducer_override": reducer_override})


def _pickle(obj: object, name: str, sink: _Sink, modules: _Modules) -> bool:
    """Write an object's pickle to a sink, plainly or else by value; say whether by value."""
    try:
        _dump_plainly(obj, sink, modules)
        return False
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, cloudpickle can do more
        plainly = error
    try:
        sink.rewind()
        try:
            by_value_pickler()
        except ModuleNotFoundError:
            raise _without_cloudpickle(obj, name, plainly) from plainly
        try:
            _dump_by_value(obj, sink, modules)
        except MemoryError:
            raise
        except Exception as error:
            raise _unpicklable(obj, name, error, _dump_by_value) from error
    finally:
        del plainly  # its traceback has this frame, and with it all of the caller's: a circle
    return True


def _dump_plainly(obj: object, sink: _Sink, modules: _Modules) -> None:
    """Pickle by reference."""
    _Plain(sink, modules).dump((obj, None))


def _dump_by_value(obj: object, sink: _Sink, modules: _Modules) -> None:
    """Pickle with cloudpickle, with every module that workers cannot import by value."""
    with _modules_by_value() as register:
        pickler = by_value_pickler()(sink, modules, register)
        pickler.dump((obj, pickler.classes))  # in this order: the classes are known at the end


def _cloudpickled(obj: object) -> bytes:
    """Pickle with cloudpickle, or raise what pickle raises where there is no cloudpickle."""
    try:
        return dump_by_value(obj)
    except ModuleNotFoundError as error:
        if error.name != "cloudpickle":
            raise
        return pickle.dumps(obj, protocol=5)


def dump_by_value(
    obj: object,
    protocol: int = 5,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
) -> bytes:
    """Pickle what has no name by value, and the rest by name: so it keeps its identity."""
    file = io.BytesIO()
    _named_first()(file, protocol, buffer_callback=buffer_callback).dump(obj)
    return file.getvalue()


@functools.cache
def _named_first() -> Any:
    """Make the pickler of `dump_by_value`; cloudpickle is imported here."""
    cloudpickle = imported("cloudpickle")

    class NamedFirst(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)):
                home = sys.modules.get(obj.__module__ or "")
                if home is not None and _lookup(home, obj.__qualname__) is obj:
                    return NotImplemented
            return super().reducer_override(obj)

    return NamedFirst


_Register: TypeAlias = Callable[[str], None]


@contextlib.contextmanager
def _modules_by_value() -> Iterator[_Register]:
    """Make cloudpickle treat modules by value for a while; return the function that names one."""
    cloudpickle = imported("cloudpickle")
    ours: list[types.ModuleType] = []

    def register(name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            ours.append(module)

    with _by_value_lock:
        try:
            yield register
        finally:
            for module in ours:
                cloudpickle.unregister_pickle_by_value(module)


class _Classes(list[type]):
    """Classes of the user's script that went by value: a worker's ``__main__`` gets them again.

    So that a worker process can pickle their instances by name, and the trainer finds its own
    class under that name.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _publish, ([cls for cls in self if "." not in cls.__qualname__],)


def _publish(classes: list[type]) -> None:
    """Make classes known under their names in ``__main__``, unless the names are taken."""
    for cls in classes:
        main = sys.modules.setdefault(cls.__module__, sys.modules["__main__"])
        if not hasattr(main, cls.__name__):
            setattr(main, cls.__name__, cls)


# --- data that would be copied without need ------------------------------------------------------


_Array: TypeAlias = np.ndarray[Any, Any]
_Memmap: TypeAlias = Any  # np.memmap, with the attributes that its type hints leave out
_Tensor: TypeAlias = Any  # torch.Tensor


def _reduce_data(obj: object, modules: _Modules, *, dry: bool) -> Reduced:
    """Put arrays and tensors out of band that do not go there by themselves."""
    if isinstance(obj, np.ndarray):
        return _reduce_array(obj, dry=dry)
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is getattr(torch, "Tensor", None):
        modules.findable("torch")
        return _reduce_tensor(obj)
    return NotImplemented


def _reduce_array(array: _Array, *, dry: bool) -> Reduced:
    """Reduce what is not contiguous to a copy that is, a part of a mapped file to its place."""
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


# --- what worker processes can import ------------------------------------------------------------


class _Modules:
    """Which modules a new process can import; each is looked for once."""

    def __init__(self) -> None:
        self._findable: dict[str, bool] = {}

    def has(self, obj: type | types.FunctionType) -> bool:
        """Whether a class or function can be had by importing its module."""
        module, qualname = obj.__module__, obj.__qualname__
        if module == "builtins":
            return True
        return self.findable(module) and _lookup(sys.modules[module], qualname) is obj

    def findable(self, name: str) -> bool:
        """Whether a new process would find this module, and would find the same one."""
        if name not in self._findable:
            self._findable[name] = self._find(name)
        return self._findable[name]

    def importable(self) -> tuple[str, ...]:
        """Those that were asked for and are found, in the order of asking; parents come first."""
        return tuple(
            name for name, found in self._findable.items() if found and name not in _promised
        )

    def _find(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None or name in _MAIN:
            return False
        if name in _promised:
            return True
        parent = name.rpartition(".")[0]
        if not parent:
            return _is_same(module, find_spec(name, None))
        if not self.findable(parent):
            return False
        path = getattr(sys.modules[parent], "__path__", None)
        # A part of a module that is no package was made by that module, and will be again.
        return path is None or _is_same(module, find_spec(name, path))


def _lookup(obj: object, qualname: str) -> object:
    """Find the object under a dotted name; None when there is none."""
    for part in qualname.split("."):
        obj = getattr(obj, part, None)
    return obj


def find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Find what a new process would import under this name."""
    for finder in sys.meta_path:
        if _is_everywhere(finder):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def _is_everywhere(finder: object) -> bool:
    """Whether a new process has this finder: the standard ones, and those of editable installs."""
    standard = (
        importlib.machinery.BuiltinImporter,
        importlib.machinery.FrozenImporter,
        importlib.machinery.PathFinder,
    )
    home = getattr(finder, "__module__", None) or ""
    return finder in standard or "editable" in home


def _is_same(module: types.ModuleType, spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether what would be imported is what this module was imported from."""
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    here = getattr(module, "__file__", None)
    if here is None or spec.origin is None:  # a folder without __init__.py
        return here is spec.origin and hasattr(module, "__path__")
    return bool(os.path.realpath(here) == os.path.realpath(spec.origin))


# --- what cannot be pickled ----------------------------------------------------------------------

_NEEDS_CLOUDPICKLE = (
    "{name}: {missing} cannot be imported by worker processes and has to go to them by value, "
    "which needs cloudpickle: pip install cloudpickle, or put it in a module that can be imported"
)
_REMEDY = (
    "Worker processes get a copy of the {name}, made with pickle. Open such things in its "
    "__init__ (it runs in each worker process), or use thread_type='thread', which copies nothing"
)


def _unpicklable(obj: object, name: str, error: Exception, dump: _Dump) -> TypeError:
    """Make the error that says which part of an object cannot be pickled, and what to do."""
    path, error = _Search(dump).find(obj, name, error)
    said = str(error) or type(error).__name__
    return TypeError(f"{path}: {said}. {_REMEDY.format(name=name)}")


def _without_cloudpickle(obj: object, name: str, error: Exception) -> TypeError:
    """Make the error for what pickle alone cannot do."""
    if isinstance(error, _NotImportableError):
        return TypeError(_NEEDS_CLOUDPICKLE.format(name=name, missing=error))
    return _unpicklable(obj, name, error, _dump_plainly)


_Dump = Callable[[object, _Sink, _Modules], None]  # one way to pickle


class _Search:
    """Finds the innermost part of an object that cannot be pickled."""

    def __init__(self, dump: _Dump) -> None:
        self._dump = dump
        self._modules = _Modules()
        self._failing: set[int] = set()
        self._alive: list[object] = []  # an id stays the name of its object while this runs
        self._probes = 0

    def find(self, obj: object, path: str, error: Exception) -> tuple[str, Exception]:
        """Its path, and what its pickling raised."""
        self._failing.add(id(obj))
        return self._descend(obj, path, error, 0) or (path, error)

    def _descend(
        self, obj: object, path: str, error: Exception, level: int
    ) -> tuple[str, Exception] | None:
        innermost = True
        for step, part in self._parts(obj, level):
            if id(part) in self._failing:  # seen already, or a way back
                innermost = False
                continue
            failure = self._try(part)
            if failure is None:
                continue
            innermost = False
            self._failing.add(id(part))
            found = self._descend(part, path + step, failure, level + 1)
            if found is not None:
                return found
        return (path, error) if innermost else None

    def _parts(self, obj: object, level: int) -> Iterator[tuple[str, object]]:
        """Parts of an object, as long as the search is within its bounds."""
        if level >= MOST_LEVELS:
            return
        for step, part in _parts(obj, self._modules):
            self._probes += 1
            if self._probes > MOST_PROBES:
                return
            self._alive.append(part)
            yield step, part

    def _try(self, obj: object) -> Exception | None:
        """Return what pickling an object raises."""
        try:
            self._dump(obj, _nowhere(), self._modules)
        except Exception as error:  # noqa: BLE001 - it is looked at, whatever it is
            return error
        return None


_Parts = Iterator[tuple[str, object]]


def _parts(obj: object, modules: _Modules) -> _Parts:
    """List the parts that an object's pickle consists of, each with its step in the path."""
    if isinstance(obj, types.FunctionType):
        return iter(()) if modules.has(obj) else _parts_of_function(obj)
    if isinstance(obj, type):
        return iter(()) if modules.has(obj) else _parts_of_class(obj)
    if isinstance(obj, functools.partial):
        return _attributes(obj, ("func", "args", "keywords"))
    if isinstance(obj, types.MethodType):
        return _attributes(obj, ("__self__", "__func__"))
    if isinstance(obj, (staticmethod, classmethod)):
        return _attributes(obj, ("__func__",))
    if isinstance(obj, property):
        return _attributes(obj, ("fget", "fset", "fdel"))
    return itertools.chain(_parts_of_container(obj), _parts_of_instance(obj))


def _attributes(obj: object, names: Iterable[str]) -> _Parts:
    """Attributes by name."""
    return ((f".{name}", getattr(obj, name)) for name in names)


def _items(step: str, items: Iterable[tuple[Any, object]]) -> _Parts:
    """Items of something like a dictionary."""
    return ((f"{step}[{reprlib.repr(key)}]", value) for key, value in items)


def _parts_of_container(obj: object) -> _Parts:
    """List the items of the standard containers and of arrays of objects."""
    if isinstance(obj, dict):
        return itertools.chain(_items("", obj.items()), ((" key", key) for key in obj))
    if isinstance(obj, (list, tuple, collections.deque)):
        return _items("", enumerate(obj))
    if isinstance(obj, (set, frozenset)):
        return ((f"{{{reprlib.repr(item)}}}", item) for item in obj)
    if isinstance(obj, np.ndarray) and obj.dtype == object:
        return _items(".flat", enumerate(obj.flat))
    return iter(())


def _parts_of_function(function: types.FunctionType) -> _Parts:
    """List what a function that goes by value takes with it."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" variable {name!r}", cell.cell_contents
    yield from _items(".__defaults__", enumerate(function.__defaults__ or ()))
    yield from _items(".__kwdefaults__", (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(function).items())
    for name in code.co_names:
        if name in function.__globals__:
            yield f" global {name!r}", function.__globals__[name]


def _parts_of_class(cls: type) -> _Parts:
    """List what a class that goes by value takes with it."""
    own = ("__dict__", "__weakref__", "__module__", "__doc__")
    yield from ((f".{name}", value) for name, value in vars(cls).items() if name not in own)
    yield from _items(".__bases__", enumerate(cls.__bases__))


def _parts_of_instance(obj: object) -> _Parts:
    """List what an object's own way of pickling puts into the pickle."""
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - then this object itself is the one to blame
        return
    if isinstance(reduced, str):
        return
    args: Iterable[object] = reduced[1]
    state = reduced[2] if len(reduced) > 2 else None
    states = state if isinstance(state, tuple) else (state,)
    for part in states:  # a dictionary, or a pair of them where there are __slots__
        if isinstance(part, dict):
            yield from ((f".{name}", value) for name, value in part.items())
        elif part is not None:
            yield ".__getstate__()", part
    yield from _items(".__reduce__()", enumerate(args))
