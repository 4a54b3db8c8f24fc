"""Split batches into a plan, arrays, and objects to pickle."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections import OrderedDict, defaultdict
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy import ndarray

from cseq._memory import axes_of
from cseq.encoding._plan import LONG, MAX_DEPTH, Plan
from cseq.encoding.pickling import (
    data_reducers,
    dumps,
    import_torch,
    is_usual,
    reduce_tensor,
    unpicklable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from cseq.encoding.pickling import Reduced, Reducers

Array: TypeAlias = ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]

__all__ = [
    "OBJECT",
    "Partial",
    "TooDeepError",
    "batch_reducers",
    "castable",
    "dump",
    "opened",
    "plan_for",
    "torch_type",
]


class Partial(NamedTuple):
    """A batch that lacks the samples that raised; `left` holds their indices and error texts."""

    batch: object
    left: tuple[tuple[object, str], ...]


def castable(dtype: Dtype) -> bool:
    """Return True if a writer casts arrays of this type: bool, int, uint or float."""
    return dtype.kind in "biuf"


OWN_WAYS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs_ex__")


@functools.lru_cache(maxsize=1024)
def opened(cls: type) -> str | tuple[str, ...] | None:
    """Return the container kind of a type, the slot names of a dataclass, or None for a leaf.

    Types with custom pickling are leaves, because their parts may not represent them fully. The
    methods that dataclass() generates for slots do not count as custom pickling.
    """
    if cls in (tuple, list):
        return "sequence"
    if cls in (dict, OrderedDict, defaultdict):
        return "mapping"
    ways = (getattr(cls, name, None) for name in OWN_WAYS)
    if not {getattr(way, "__module__", None) for way in ways} <= {None, "dataclasses"}:
        return None
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "named"
    if not is_dataclass(cls) or cls.__new__ is not object.__new__:
        return None
    members = [item for base in cls.__mro__ for item in vars(base).items()]
    return tuple(name for name, value in members if type(value) is types.MemberDescriptorType)


class TooDeepError(ValueError):
    """A batch contains itself or nests containers too deeply."""

    def __init__(self) -> None:
        super().__init__(
            f"the batch has more than {MAX_DEPTH} containers inside one another, or contains "
            "itself: return a flatter one"
        )


# A leaf in the tree is OBJECT or (token, dtype, axes as in `axes_of`). A container is (class, keys
# or None, number of children) and precedes its children. A dtype that `==` cannot distinguish from
# others is stored as its pickle. If numpy lacks a tensor's type, the token is that type's name.
ARRAY = "array"
TENSOR = "tensor"
BYTES = "bytes"
OBJECT = "object"
Node: TypeAlias = "str | tuple[object, ...]"

TEXT = {str}


class _Survey:
    """A batch's nodes and leaves in tree order."""

    __slots__ = ("arrays", "cast", "nodes", "objects")

    def __init__(self, cast: Dtype | None) -> None:
        self.cast = cast
        self.nodes: list[Node] = []
        self.arrays: list[Array] = []
        self.objects: list[object] = []

    def visit(self, value: Any, depth: int) -> None:
        """Describe a value and its descendants, and collect the leaves."""
        cls: type = type(value)
        if cls is ndarray or cls is np.memmap:
            array: Array | None = value if cls is ndarray else value.view(ndarray)
            if array is not None and _is_flat(array.dtype):
                return self._leaf(ARRAY, array, _target(array.dtype, self.cast))
        elif cls is tuple or cls is list:
            return self._container(value, None, value, depth)
        elif cls is dict:
            # Keys of other types may compare equal although they differ (1 == True).
            if {*map(type, value)} <= TEXT:
                return self._container(value, tuple(value), value.values(), depth)
        elif opened(cls) == "named":
            if not getattr(value, "__dict__", None):
                return self._container(value, None, value, depth)
        elif cls is bytes and len(value) >= LONG:
            return self._leaf(BYTES, np.frombuffer(value, np.uint8))
        elif cls is getattr(sys.modules.get("torch"), "Tensor", None):
            tensor: torch.Tensor = value
            if self.cast is not None and tensor.dtype != torch_type(self.cast):
                tensor = _plain_tensor(tensor, self.cast)
            bits, name = _bits(tensor.dtype)
            try:
                # `numpy` rejects tensors that are not strided or not on the CPU, conjugated
                # tensors, and tensors with a graph.
                plain = tensor if bits is None else tensor.view(bits)
                array = None if tensor.is_cuda else plain.numpy()
            except (RuntimeError, TypeError):
                array = None
            if array is not None:
                return self._leaf(name or TENSOR, array)
        return self._object(value)

    def _container(
        self, value: object, keys: tuple[str, ...] | None, children: Collection[object], depth: int
    ) -> None:
        """Collect the leaves of a container. A container without arrays is pickled as a whole."""
        if not depth:
            raise TooDeepError
        nodes, arrays, objects = len(self.nodes), len(self.arrays), len(self.objects)
        self.nodes.append((type(value), keys, len(children)))
        for child in children:
            self.visit(child, depth - 1)
        if len(self.arrays) == arrays:
            del self.nodes[nodes:], self.objects[objects:]
            self._object(value)

    def _object(self, value: object) -> None:
        self.nodes.append(OBJECT)
        self.objects.append(value)

    def _leaf(self, token: str, array: Array, kind: Dtype | None = None) -> None:
        """Collect a leaf's array; `kind` is the array's type in the slot."""
        kind = array.dtype if kind is None else kind
        exact = kind if is_usual(kind) else _dumps(kind)
        self.nodes.append((token, exact, axes_of(array)))
        self.arrays.append(array)


def _is_flat(dtype: Dtype) -> bool:
    """Return True if raw bytes fully represent arrays of a type, which excludes np.record."""
    return not dtype.hasobject and dtype.type is not np.record


@functools.cache
def torch_type(dtype: Dtype) -> torch.dtype:
    """Return the torch dtype for a numpy dtype. Raise TypeError if there is none."""
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def _bits(dtype: torch.dtype) -> tuple[torch.dtype | None, str | None]:
    """Return an integer dtype of the same size and the name of a torch dtype that numpy lacks."""
    import torch

    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return getattr(torch, f"int{8 * dtype.itemsize}"), str(dtype).removeprefix("torch.")
    return None, None


class Plans(Protocol):
    """An encoder's cast type and known plans."""

    @property
    def cast(self) -> Dtype | None:
        """The type to which numbers are cast, or None."""

    @property
    def plans(self) -> list[Plan]:
        """The plans of the most recent structures."""

    def remember(self, plan: Plan) -> None:
        """Add a plan to the known plans."""


def plan_for(batch: object, encoder: Plans) -> tuple[Plan, list[Array], list[object]]:
    """Return a batch's plan, arrays and other leaves. The encoder stores the plan."""
    survey = _Survey(encoder.cast)
    try:
        survey.visit(batch, MAX_DEPTH)
    except TooDeepError:
        survey = _Survey(encoder.cast)
        survey.nodes, survey.objects = [OBJECT], [batch]
    nodes, sources = tuple(survey.nodes), [array.dtype for array in survey.arrays]
    # `match` does not recognise a plan whose tensors are cast.
    for plan in encoder.plans:
        if plan.nodes == nodes and plan.sources == sources:
            return plan, survey.arrays, survey.objects
    plan = Plan(_dumps(nodes), nodes, sources)
    encoder.remember(plan)
    return plan, survey.arrays, survey.objects


def _target(dtype: Dtype, cast: Dtype | None) -> Dtype:
    """Return the type that arrays of `dtype` have in the slot."""
    # Check for None first: the float64 dtype equals None.
    if cast is None or not castable(dtype) or dtype == cast:
        return dtype
    return cast


def _plain_tensor(tensor: torch.Tensor, cast: Dtype | None) -> torch.Tensor:
    """Return a cast tensor whose storage has no extra bytes. Return unusual tensors unchanged."""
    if tensor.device.type != "cpu" or tensor.layout is not import_torch().strided:
        return tensor
    if tensor.is_nested or (tensor.is_quantized and cast is not None):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if cast is not None and not plain.is_complex() and plain.dtype != torch_type(cast):
        plain = plain.to(torch_type(cast), copy=True)
    elif plain.untyped_storage().nbytes() > plain.nbytes:
        plain = plain.to(plain.dtype, copy=True)
    if plain.data_ptr() == tensor.data_ptr() and plain.dtype == tensor.dtype:
        return tensor
    return plain.requires_grad_() if tensor.requires_grad else plain


# -- pickle ----------------------------------------------------------------------------------------

REMEDY = "Return arrays, tensors, numbers, strings, bytes, None, or objects that pickle takes"


def dump(objects: list[object]) -> tuple[bytes, list[Array]]:
    """Pickle a batch's other leaves. Return the pickle and its out-of-band buffers."""
    buffers: list[memoryview] = []
    pickled = _dumps(objects, buffers, batch_reducers)
    return pickled, [np.frombuffer(buffer, np.uint8) for buffer in buffers]


def _number_reducer(dtype: Dtype) -> Callable[[np.generic], Reduced]:
    """Make a reducer for numpy scalars of a type; numpy's own imports a module on each call."""
    make: object = np.float64().__reduce__()[0]
    return lambda number: (make, (dtype, number.tobytes()))


NUMBERS = {
    kind: _number_reducer(np.dtype(kind))
    for kind in {*np.sctypeDict.values()}
    if np.dtype(kind).kind in "biufc"
}


def batch_reducers(*, handles: bool = True) -> Reducers:
    """Return the reducers for the arrays, numbers and tensors in a batch.

    A tensor that uses only part of a storage is reduced to a copy of that part. With `handles`, a
    CUDA tensor is reduced to a handle to its memory.
    """
    reducers = data_reducers() | NUMBERS
    tensor: type | None = getattr(sys.modules.get("torch"), "Tensor", None)
    reduce = _reduce_to_handle if handles else _reduce_part
    return reducers | {tensor: reduce} if tensor in reducers else reducers


def _reduce_to_handle(tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda:
        return _reduce_part(tensor)
    return importlib.import_module("torch.multiprocessing.reductions").reduce_tensor(tensor)


def _reduce_part(tensor: torch.Tensor) -> Reduced:
    return reduce_tensor(_plain_tensor(tensor, None))


def _dumps(value: object, *how: Any) -> bytes:
    """Pickle part of a batch. If that fails, raise an error that lists the supported contents."""
    try:
        return dumps(value, *how)
    except MemoryError:
        raise
    except Exception as error:
        raise unpicklable("batch", error, REMEDY) from error
