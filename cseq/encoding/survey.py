"""Splits batches into a plan, arrays, and objects to pickle."""

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
    """An incomplete batch. `left` lists the index and error text of each missing sample."""

    batch: object
    left: tuple[tuple[object, str], ...]


def castable(dtype: Dtype) -> bool:
    """Return True for types that are cast: bool, int, uint and float."""
    return dtype.kind in "biuf"


OWN_WAYS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs_ex__")


@functools.lru_cache(maxsize=1024)
def opened(cls: type) -> str | tuple[str, ...] | None:
    """Return the kind of container, the slots of a dataclass, or None for a leaf.

    Types with custom pickling methods are leaves, because their fields may not be their entire
    state. Methods that dataclass() adds for slots do not count as custom.
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
    """Raised if containers are nested too deeply or contain themselves."""

    def __init__(self) -> None:
        super().__init__(
            f"the batch nests more than {MAX_DEPTH} containers or contains itself; return a "
            "flatter batch"
        )


# In the tree, a leaf is OBJECT or (token, dtype, axes as in `axes_of`). A container is (class, keys
# or None, number of children), followed by its children. A dtype that `==` cannot distinguish from
# others is pickled. If numpy lacks a tensor's type, the token is the name of that type.
ARRAY = "array"
TENSOR = "tensor"
BYTES = "bytes"
OBJECT = "object"
Node: TypeAlias = "str | tuple[object, ...]"

TEXT = {str}


class _Survey:
    """The nodes and leaves of a batch, in tree order."""

    __slots__ = ("arrays", "cast", "nodes", "objects")

    def __init__(self, cast: Dtype | None) -> None:
        self.cast = cast
        self.nodes: list[Node] = []
        self.arrays: list[Array] = []
        self.objects: list[object] = []

    def visit(self, value: Any, depth: int) -> None:
        """Add the nodes of a value and collect the leaves."""
        cls: type = type(value)
        if cls is ndarray or cls is np.memmap:
            array: Array | None = value if cls is ndarray else value.view(ndarray)
            if array is not None and _is_flat(array.dtype):
                return self._leaf(ARRAY, array, _target(array.dtype, self.cast))
        elif cls is tuple or cls is list:
            return self._container(value, None, value, depth)
        elif cls is dict:
            # Accept only str, because keys of other types can compare equal (1 == True).
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
                # `numpy` raises if a tensor is not strided, not on the CPU, conjugated, or in a
                # graph.
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
        """Add a container, or pickle it as a whole if it has no arrays."""
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
        """Add a leaf. `kind` is its type in the slot."""
        kind = array.dtype if kind is None else kind
        exact = kind if is_usual(kind) else _dumps(kind)
        self.nodes.append((token, exact, axes_of(array)))
        self.arrays.append(array)


def _is_flat(dtype: Dtype) -> bool:
    """Return True if an array of this type is fully represented by its bytes, unlike np.record."""
    return not dtype.hasobject and dtype.type is not np.record


@functools.cache
def torch_type(dtype: Dtype) -> torch.dtype:
    """Return the torch dtype for a numpy dtype. Raises TypeError if there is none."""
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def _bits(dtype: torch.dtype) -> tuple[torch.dtype | None, str | None]:
    """If numpy lacks a torch dtype, return an integer dtype of the same size and the torch name."""
    import torch

    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return getattr(torch, f"int{8 * dtype.itemsize}"), str(dtype).removeprefix("torch.")
    return None, None


class Plans(Protocol):
    """The part of `Encoder` that `plan_for` uses."""

    @property
    def cast(self) -> Dtype | None:
        """The type that numbers are cast to."""

    @property
    def plans(self) -> list[Plan]:
        """The plans for the most recent structures."""

    def remember(self, plan: Plan) -> None:
        """Add a plan to `plans`."""


def plan_for(batch: object, encoder: Plans) -> tuple[Plan, list[Array], list[object]]:
    """Return the plan, the arrays and the other leaves of a batch."""
    survey = _Survey(encoder.cast)
    try:
        survey.visit(batch, MAX_DEPTH)
    except TooDeepError:
        survey = _Survey(encoder.cast)
        survey.nodes, survey.objects = [OBJECT], [batch]
    nodes, sources = tuple(survey.nodes), [array.dtype for array in survey.arrays]
    # Search here as well, because `match` rejects batches with tensors that must be cast.
    for plan in encoder.plans:
        if plan.nodes == nodes and plan.sources == sources:
            return plan, survey.arrays, survey.objects
    plan = Plan(_dumps(nodes), nodes, sources)
    encoder.remember(plan)
    return plan, survey.arrays, survey.objects


def _target(dtype: Dtype, cast: Dtype | None) -> Dtype:
    """Return the type that an array has in the slot."""
    # Check for None first, because float64 compares equal to it.
    if cast is None or not castable(dtype) or dtype == cast:
        return dtype
    return cast


def _plain_tensor(tensor: torch.Tensor, cast: Dtype | None) -> torch.Tensor:
    """Cast a tensor and shrink its storage. Special tensors are returned unchanged."""
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

REMEDY = "Return arrays, tensors, numbers, strings, bytes, None, or objects that can be pickled"


def dump(objects: list[object]) -> tuple[bytes, list[Array]]:
    """Return a pickle of the other leaves, and its out-of-band buffers."""
    buffers: list[memoryview] = []
    pickled = _dumps(objects, buffers, batch_reducers)
    return pickled, [np.frombuffer(buffer, np.uint8) for buffer in buffers]


def _number_reducer(dtype: Dtype) -> Callable[[np.generic], Reduced]:
    """Return a reducer for numpy scalars. numpy's own reducer imports a module on every call."""
    make: object = np.float64().__reduce__()[0]
    return lambda number: (make, (dtype, number.tobytes()))


NUMBERS = {
    kind: _number_reducer(np.dtype(kind))
    for kind in {*np.sctypeDict.values()}
    if np.dtype(kind).kind in "biufc"
}


def batch_reducers(*, handles: bool = True) -> Reducers:
    """Return the reducers for arrays, numbers and tensors in a batch.

    Only the used part of a tensor's storage is copied. With `handles`, CUDA tensors are reduced to
    handles to their memory.
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
    """Pickle part of a batch. Error messages list the supported types."""
    try:
        return dumps(value, *how)
    except MemoryError:
        raise
    except Exception as error:
        raise unpicklable("batch", error, REMEDY) from error
