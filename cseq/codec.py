"""A batch of any shape, written into a slot and read from it again.

A batch is any nesting of tuple, list, dict, named tuple and dataclass. Of its leaves, arrays, CPU
tensors, torch's storages, numpy's scalars and long bytes are copied into the slot; all other leaves
are pickled, except the bytes of arrays and CPU tensors in them, which are copied as well. So is a
batch as a whole that contains itself, or is nested too deep to be opened.

    slot    ┌────────────────────────┬─────────────────────┬───────────┬────────┬─────────┐
            │ arrays, 64-byte aligned│ buffers of pickles  │ structure │ layout │ objects │
            └────────────────────────┴─────────────────────┴───────────┴────────┴─────────┘
                                                           ▲ offset    └── lengths ───────┘  Record

*Structure* is the containers, types and memory orders: a pickle, made and read only when it
changes. *Layout* is where the arrays begin, and their shapes: integers. *Objects* are the other
leaves: one pickle. All of it lies in the slot, so a batch can be read without any other batch. A
`bytearray` alone has neither structure nor layout.

At both ends, a structure is held as a `Plan`. A batch that matches one of the writer's last plans
is written in C; any other batch is surveyed here, which makes a plan for the next ones. Arrays are
always written and read by a plan.

The guarantee: the batch that is read equals the one written, in types and bits, and is writable.
Arrays arrive C- or Fortran-contiguous as they were, any other layout as C; an array in two places
arrives as two, and so does a container of arrays; a tensor arrives without its graph (a leaf that
requires gradients if it did).
"""

from __future__ import annotations

import functools
import importlib
import operator
import pickle
import sys
from array import array as machine_array
from collections import OrderedDict, defaultdict
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy import ndarray

from cseq._plan import LONG, Plan, Reader
from cseq._tensors import TensorMaker
from cseq.importable import named_here
from cseq.pickling import dumps, storage_on
from cseq.unpicklable import unpicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from cseq._memory import Memory
    from cseq.pickling import Pickled
    from cseq.writer import Writer

Array: TypeAlias = ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]
Leaf: TypeAlias = tuple[Dtype, int, bool]  # dtype, dimensions, Fortran order

__all__ = [
    "LONG",
    "Record",
    "castable",
    "decode",
    "decode_pickled",
    "encode",
    "encode_pickled",
    "map_leaves",
    "used",
]

MAX_DEPTH = 100  # containers inside one another that are opened


class Record(NamedTuple):
    """Where a batch lies in its slot; four words of a cell of the ring, in bytes."""

    offset: int  # where the structure begins
    structure: int  # its length
    layout: int  # the length of what follows it
    objects: int  # the length of what follows that, 0 if there are none

    @property
    def used(self) -> int:
        """Bytes of the slot that the batch takes, all in all."""
        return self.offset + self.structure + self.layout + self.objects


def used(record: Sequence[int]) -> int:
    """Bytes of the slot that a batch takes, from the first words of its cell."""
    return record[0] + record[1] + record[2] + record[3]


def castable(dtype: Dtype) -> bool:
    """Whether arrays of this type are numbers that `encode` casts: bool, int, uint, float."""
    return dtype.kind in "biuf"


# -- containers ---------------------------------------------------------------------------------
# A container is opened into what the structure says of it (`fixed`: field names or keys, if these
# are strings), an object that is pickled (`loose`: other keys, or None) and its children.

Opened: TypeAlias = "tuple[tuple[str, ...] | None, Any, Collection[Any]]"

TEXT = {str}


def _open_plain(value: Any) -> Opened:
    """Open a tuple or a list."""
    return None, None, value


def _open_named(value: Any) -> Opened | None:
    """Open a named tuple, unless it has attributes besides its fields."""
    return None if getattr(value, "__dict__", None) else (None, None, value)


def _open_dict(value: dict[Any, Any]) -> Opened:
    """Open a dict; only keys that are strings differ whenever they are unequal (1 == True)."""
    keys = tuple(value)
    fixed = {*map(type, keys)} <= TEXT
    return (keys, None, value.values()) if fixed else (None, keys, value.values())


def _open_default(value: Any) -> Opened:
    """Open a defaultdict."""
    return None, (value.default_factory, *value), value.values()


def _open_data(value: Any) -> Opened | None:
    """Open a dataclass, unless it lacks a field that has a slot."""
    cls: Any = type(value)
    slots, state = _slotted_fields(cls), getattr(value, "__dict__", {})
    try:
        children = [getattr(value, name) for name in slots]
    except AttributeError:
        return None
    return (*slots, *state), None, [*children, *state.values()]


def _close_plain(cls: Any, _fixed: Any, _loose: Any, children: Iterable[Any]) -> Any:
    """Build a tuple or a list."""
    return cls(children)


def _close_named(cls: Any, _fixed: Any, _loose: Any, children: Iterable[Any]) -> Any:
    """Build a named tuple."""
    return tuple.__new__(cls, children)


def _close_dict(cls: Any, fixed: Any, loose: Any, children: Iterable[Any]) -> Any:
    """Build a dict."""
    return cls(zip(loose if fixed is None else fixed, children, strict=True))


def _close_default(_cls: Any, _fixed: Any, loose: Any, children: Iterable[Any]) -> Any:
    """Build a defaultdict."""
    return defaultdict(loose[0], zip(loose[1:], children, strict=True))


def _close_data(cls: Any, fixed: Any, _loose: Any, children: Iterable[Any]) -> Any:
    """Build a dataclass, without calling it: `__post_init__` has been run once."""
    value = object.__new__(cls)
    for name, child in zip(fixed, children, strict=True):
        object.__setattr__(value, name, child)
    return value


class _Kind(NamedTuple):
    """How one kind of container is taken apart and put together."""

    open: Callable[[Any], Opened | None]
    close: Callable[[Any, Any, Any, Iterable[Any]], Any]


_KINDS = {
    "tuple": _Kind(_open_plain, _close_plain),
    "list": _Kind(_open_plain, _close_plain),
    "dict": _Kind(_open_dict, _close_dict),
    "ordered": _Kind(_open_dict, _close_dict),
    "default": _Kind(_open_default, _close_default),
    "named": _Kind(_open_named, _close_named),
    "data": _Kind(_open_data, _close_data),
}

_EXACT: dict[type, str] = {
    ndarray: "array",
    np.memmap: "memmap",
    tuple: "tuple",
    list: "list",
    dict: "dict",
    OrderedDict: "ordered",
    defaultdict: "default",
    bytes: "bytes",
}


@functools.lru_cache(maxsize=1024)
def _tag(cls: type) -> str:
    """Return what the codec calls a type: a key of `_KINDS`, or a kind of leaf."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, (np.bool_, np.number, np.datetime64, np.timedelta64)):
        return "scalar"
    torch = sys.modules.get("torch")
    if cls is getattr(torch, "Tensor", None):
        return "tensor"
    if cls is getattr(torch, "UntypedStorage", None):
        return "storage"
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "object" if _pickles_itself(cls) else "named"
    if is_dataclass(cls) and _is_plain(cls):
        return "data"
    return "object"


def _pickles_itself(cls: type) -> bool:
    """Whether a class defines how it is pickled; then it is pickled, not opened."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__", "__getstate__", "__getnewargs_ex__")
    # Methods that dataclass() has written (for slots) pickle the fields, nothing else.
    return any(
        name in vars(base) and vars(base)[name].__module__ != "dataclasses"
        for base in cls.__mro__[:-1]
        if base is not tuple
        for name in names
    )


def _is_plain(cls: Any) -> bool:
    """Whether the instances of a dataclass are its fields and attributes, and nothing else."""
    try:
        object.__new__(cls)  # impossible for what derives from dict, Exception and the like
    except TypeError:
        return False
    return _slots(cls) == {*_slotted_fields(cls)} and not _pickles_itself(cls)


@functools.lru_cache(maxsize=1024)
def _slotted_fields(cls: Any) -> tuple[str, ...]:
    """Names of those fields of a dataclass that are not in its dictionary."""
    return tuple(field.name for field in fields(cls) if field.name in _slots(cls))


def _slots(cls: type) -> set[str]:
    """Names in all ``__slots__`` of a class."""
    named = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    slots = {name for names in named for name in ([names] if isinstance(names, str) else names)}
    return slots - {"__dict__", "__weakref__"}


class _TooDeepError(ValueError):
    """A batch contains itself, or has too many containers inside one another."""

    def __init__(self) -> None:
        super().__init__(
            f"the batch has more than {MAX_DEPTH} containers inside one another, or contains "
            "itself: return a flatter one"
        )


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf: all but tuples, lists, dicts, named tuples, dataclasses.

    Returns
    -------
    object
        The same containers with the results in them; the very same object if no leaf changed.

    Raises
    ------
    ValueError
        If the batch contains itself.
    """
    return _map(function, batch, MAX_DEPTH)


def _map(function: Callable[[Any], Any], value: Any, depth: int) -> Any:
    """Apply a function to the leaves below one value."""
    cls: Any = type(value)
    kind = _KINDS.get(_tag(cls))
    opened = kind and kind.open(value)
    if kind is None or opened is None:
        return function(value)
    if not depth:
        raise _TooDeepError
    fixed, loose, children = opened
    mapped = [_map(function, child, depth - 1) for child in children]
    if all(map(operator.is_, mapped, children)):
        return value
    return kind.close(cls, fixed, loose, mapped)


# -- writing ------------------------------------------------------------------------------------

# Tokens of leaves in the tree. Those of containers are (tag, class, fixed, has loose, tokens),
# where a number in place of tokens says that all children are arrays.
ARRAY = "array"
OBJECT = "object"
SCALAR = "scalar"
BYTES = "bytes"
STORAGE = "storage"
Token: TypeAlias = "str | tuple[Any, ...]"

ARRAYS = {ndarray}
# Types of elements that are nothing but bytes, and equal only to themselves.
FLAT = {*np.sctypeDict.values()} - {np.object_, np.void}


class _Survey:
    """What a batch consists of: its leaves, in the order of its tree."""

    __slots__ = ("arrays", "cast", "objects", "raws")

    def __init__(self, cast: Dtype | None) -> None:
        self.cast = cast
        self.arrays: list[Array] = []  # arrays of the batch, which may be cast
        self.raws: list[Array] = []  # arrays that other leaves consist of
        self.objects: list[Any] = []  # for pickle

    def visit(self, value: Any, depth: int) -> Token:
        """Collect the leaves below a value, and describe it."""
        cls: Any = type(value)
        tag = _tag(cls)
        if tag in _KINDS:
            return self._container(tag, value, depth)
        if tag in ("array", "memmap"):
            return self._array(value)
        if tag == "scalar":
            return self._raw(SCALAR, np.asarray(value))
        if tag == "bytes" and len(value) >= LONG:
            return self._raw(BYTES, np.frombuffer(value, np.uint8))
        if tag == STORAGE and value.device.type == "cpu":  # torch cannot read what it pickles of it
            return self._raw(STORAGE, _storage_bytes(value))
        return self._tensor(value) if tag == "tensor" else self._object(value)

    def _container(self, tag: str, value: Any, depth: int) -> Token:
        """Collect the leaves of a container; one of pickled leaves alone is pickled as one."""
        opened = _KINDS[tag].open(value)
        if opened is None:
            return self._object(value)
        if not depth:
            raise _TooDeepError
        fixed, loose, children = opened
        before = len(self.arrays) + len(self.raws), len(self.objects)
        if loose is not None:
            self.objects.append(loose)
        tokens = self._children(children, depth - 1)
        pickled = self.objects[before[1] :]
        if len(self.arrays) + len(self.raws) == before[0] and _ByHandle not in map(type, pickled):
            del self.objects[before[1] :]
            return self._object(value)
        return tag, type(value), fixed, loose is not None, tokens

    def _children(self, children: Collection[Any], depth: int) -> int | tuple[Token, ...]:
        """Collect the leaves below some values."""
        if {*map(type, children)} == ARRAYS and {child.dtype.type for child in children} <= FLAT:
            self.arrays += children
            return len(children)
        return tuple([self.visit(child, depth) for child in children])

    def _object(self, value: Any) -> Token:
        """Collect a leaf for pickle."""
        self.objects.append(value)
        return OBJECT

    def _raw(self, token: Token, array: Array) -> Token:
        """Collect the array that a leaf consists of."""
        self.raws.append(array)
        return token

    def _array(self, value: Array) -> Token:
        """Collect an array."""
        if value.dtype.hasobject or value.dtype.type is np.record:  # equal to one of np.void
            return self._object(value)
        self.arrays.append(value.view(ndarray) if type(value) is np.memmap else value)
        return ARRAY

    def _tensor(self, tensor: Any) -> Token:
        """Collect a tensor; numpy's view of it if it lies on the CPU."""
        torch = sys.modules["torch"]
        if tensor.is_cuda:
            return self._object(_ByHandle(tensor))
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return self._object(tensor)
        if tensor.is_quantized or tensor.is_nested:
            return self._object(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        if self.cast is not None and not plain.is_complex():
            plain = plain.to(torch_type(self.cast))
        bits, name = _bits(plain.dtype)
        if bits is not None:
            plain = plain.view(bits)
        return self._raw(("tensor", name, tensor.requires_grad), plain.numpy())


class _ByHandle:
    """A CUDA tensor that is pickled as a handle of its memory (torch's CUDA IPC)."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        return reductions.reduce_tensor(self.tensor)


@functools.cache
def torch_type(dtype: Dtype) -> Any:
    """Return torch's dtype for one of numpy's; TypeError if there is none."""
    return _torch().from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def tensor_maker(dtype: Dtype) -> Callable[[Any], Any]:
    """Return what makes tensors of fresh arrays of a type: a `TensorMaker`, else `from_numpy`.

    A version of torch may lack the function, which has no public name, or not take the type: that
    is tried out here, once.
    """
    torch = _torch()
    from_numpy: Callable[[Any], Any] = torch.from_numpy
    example = np.ones((2, 3), dtype)
    try:
        maker = TensorMaker(from_numpy, torch._C._from_dlpack, dtype)
        made = maker(maker.copy(example)).numpy()
    except (AttributeError, BufferError, RuntimeError, TypeError):
        return from_numpy
    return maker if made.dtype == dtype and np.array_equal(made, example) else from_numpy


@functools.cache
def _bits(dtype: Any) -> tuple[Any, str | None]:
    """Return, for a torch dtype that numpy lacks, an integer dtype of its size, and its name."""
    torch = _torch()
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return getattr(torch, f"int{8 * dtype.itemsize}"), str(dtype).removeprefix("torch.")
    return None, None


def _bytes_array(value: bytes) -> Array | None:
    """Return long bytes as an array; None for short ones, which are pickled."""
    return np.frombuffer(value, np.uint8) if len(value) >= LONG else None


def _storage_bytes(storage: Any) -> Array:
    """Return the bytes of a storage, not copied; RuntimeError where it is not on the CPU."""
    torch = _torch()
    array: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


def encode(batch: Any, writer: Writer, cast: Dtype | None = None) -> Record:
    """Write a batch into a slot.

    Parameters
    ----------
    batch : object
    writer : Writer
        At the slot; bytes in use there stay. Arrays that lie in this slot are not copied.
    cast : numpy.dtype, optional
        Type that arrays and tensors of numbers (`castable`) are cast to on the way.

    Returns
    -------
    Record
        What `decode` needs.

    Raises
    ------
    TypeError
        If something cannot be pickled; says where in the batch.
    ValueError
        If the batch is to be cast, and contains itself or has more than `MAX_DEPTH` containers
        inside one another.
    MemoryError
        If there is no room for it.
    """
    if type(batch) is bytearray:
        offset = writer.place(len(batch))
        writer.memory.store_bytes(offset, batch)
        return Record(offset, 0, 0, len(batch))
    found = writer.match(batch, cast)
    plan, arrays, objects = plan_for(batch, writer, cast) if found is None else found
    if writer.watched:
        plain = zip(arrays, plan.casts, strict=True)
        writer.learn([array for array, casts in plain if not casts and array.flags.forc])
    if not objects:
        return _record(writer.encode(plan, arrays))
    return _record(writer.encode(plan, arrays, *_pickled(batch, objects)))


_record: Callable[[tuple[int, ...]], Record] = functools.partial(tuple.__new__, Record)


def plan_for(batch: Any, writer: Writer, cast: Dtype | None) -> tuple[Plan, list[Array], list[Any]]:
    """Return a batch's plan, which the writer then remembers, its arrays, and its other leaves."""
    survey = _Survey(cast)
    try:
        tree: Token = survey.visit(batch, MAX_DEPTH)
    except _TooDeepError:
        if cast is not None:  # pickle casts nothing
            raise
        survey, tree = _Survey(cast), OBJECT
        survey.objects.append(batch)
    arrays = survey.arrays + survey.raws
    sources = [array.dtype for array in arrays]
    split = len(survey.arrays)
    kinds = [_target(dtype, cast) for dtype in sources[:split]] + sources[split:]
    pairs = zip(kinds, arrays, strict=True)
    leaves: list[Leaf] = [(kind, array.ndim, array.flags.fnc) for kind, array in pairs]
    for plan in writer.plans:  # `match` does not recognise all of them
        same = plan.cast is cast and plan.token == tree
        if same and plan.leaves == leaves and plan.sources == sources:
            return plan, arrays, survey.objects
    structure = _pickled(batch, (tree, split, leaves))[0]
    plan = Plan(structure, tree, split, leaves, _KINDS, _tag, _raw, cast, sources)
    writer.remember(plan)
    return plan, arrays, survey.objects


def _target(dtype: Dtype, cast: Dtype | None) -> Dtype:
    """Return the type that arrays of a type have in the slot."""
    # Not `==` alone: a dtype of float64 equals None.
    if cast is None or not castable(dtype) or dtype == cast:
        return dtype
    return cast


def _raw(token: Any, dtype: Dtype) -> tuple[Any, Any, Any, bool]:
    """Return how a leaf that is not an array becomes one, and back; see `Plan`."""
    if token == SCALAR:
        return dtype.type, np.asarray, operator.itemgetter(()), False
    if token == BYTES:
        return bytes, _bytes_array, ndarray.tobytes, False
    torch = _torch()
    if token == STORAGE:
        return torch.UntypedStorage, _storage_bytes, storage_on, False
    _, name, grad = token
    if name is None and not grad:
        # `numpy` refuses what is not strided, not on the CPU, or lazily conjugated or negated.
        return torch.Tensor, torch.Tensor.numpy, tensor_maker(dtype), True
    return torch.Tensor, None, functools.partial(_as_tensor, name=name, grad=grad), True


# -- pickle -------------------------------------------------------------------------------------

REMEDY = "Return arrays, tensors, numbers, strings, bytes, None, or objects that pickle takes"


def _pickled(batch: Any, value: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle a part of a batch: return the pickle, and the large buffers that are not in it."""
    buffers: list[memoryview] = []
    try:
        tensors = not all(map(OBJECT_ALONE.is_plain, value))
        return dumps(value, buffers, tensors=tensors), buffers
    except MemoryError:
        raise
    except Exception as error:
        raise unpicklable(
            batch,
            "batch",
            error,
            probe=lambda part: dumps(part, []),
            known=named_here,
            remedy=REMEDY,
        ) from error


# What `encode` would make of an object that is no container and no array.
OBJECT_ALONE = Plan(pickle.dumps((OBJECT, 0, []), protocol=5), OBJECT, 0, [], _KINDS, _tag, _raw)


def encode_pickled(pickled: Pickled, writer: Writer) -> Record:
    """Write an object that is pickled already into a slot; `decode` returns it.

    Raises
    ------
    MemoryError
        If there is no room for it.
    """
    return _record(writer.encode(OBJECT_ALONE, [], pickled.data, pickled.buffers))


# -- reading ------------------------------------------------------------------------------------


def _parse(structure: bytes) -> Plan:
    """Read a structure."""
    tree, split, leaves = pickle.loads(structure)
    return Plan(structure, tree, split, leaves, _KINDS, _tag, _raw)


def _load_objects(memory: Memory, offset: int, nbytes: int) -> list[Any]:
    """Read the leaves that were pickled; behind the pickle lies the table of its buffers."""
    view = memoryview(memory)
    data = view[offset : offset + nbytes]
    count = int.from_bytes(data[-8:], sys.byteorder)
    if not count:
        return pickle.loads(data)  # type: ignore[no-any-return]
    numbers = iter(machine_array("q", bytes(data[len(data) - 8 - 16 * count : -8])))
    buffers = [view[at : at + size] for at, size in zip(numbers, numbers, strict=True)]
    objects: list[Any] = pickle.loads(data, buffers=buffers)
    return objects


def decode_pickled(memory: Memory, record: Record) -> Any:
    """Read what `encode_pickled` has written, from a mapping that need not be shared."""
    offset = record.offset + record.structure + record.layout
    return _load_objects(memory, offset, record.objects)[0]


def _as_tensor(array: Array, *, name: str | None, grad: bool) -> Any:
    """Make a tensor that shares an array's memory."""
    torch = _torch()
    tensor = torch.from_numpy(array)
    if name is not None:
        tensor = tensor.view(getattr(torch, name))
    return tensor.requires_grad_() if grad else tensor


@functools.cache
def _torch() -> Any:
    """Import torch, once a batch has a tensor."""
    return importlib.import_module("torch")


reader = Reader(_parse, _load_objects)
decode = reader.decode
