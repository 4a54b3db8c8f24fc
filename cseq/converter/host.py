"""Converts arrays and CPU tensors in the calling thread."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from cseq._memory import flat_of
from cseq.encoding import failure
from cseq.encoding.codec import map_leaves, recast
from cseq.encoding.survey import castable, torch_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.converter import Array, Batch, Convert, Dtype, Tensor
    from cseq.converter.output import Kind, Output


def is_array(leaf: object) -> TypeGuard[Array]:
    """Return True for arrays, except masked arrays."""
    return type(leaf) is np.ndarray or (
        isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    )


@functools.lru_cache(256)
def target_of(dtype: Dtype, cast: Dtype | None) -> Dtype | None:
    """Return the type to cast an array to, or None if torch does not support it.

    Booleans and real numbers are cast to `cast`, if given. Otherwise, only byte order may change.
    """
    if dtype.kind not in "biufc":
        return None
    wanted = cast if cast is not None and castable(dtype) else dtype.newbyteorder("=")
    target: Dtype = np.dtype(wanted.str)
    try:
        torch_type(target)
    except TypeError:
        return None
    return target


def is_usable(array: Array, target: Dtype) -> bool:
    """Return True if a tensor can share the memory of an array.

    The array must be writable and contiguous. Otherwise, writing to a tensor could crash the
    process, or the strides in a batch would depend on the pool.
    """
    return array.dtype == target and array.flags.behaved and flat_of(array) is not None


class Host:
    """Converts arrays and CPU tensors to the output types."""

    def __init__(self, output: Output) -> None:
        self.torch = torch = importlib.import_module("torch")
        self.from_numpy: Callable[[Array], Tensor] = torch.from_numpy
        self.cast = output.dtype
        self.late = getattr(torch, output.torch_dtype) if output.torch_dtype else None
        self.wanted = torch_type(output.dtype) if output.dtype is not None else self.late

    def leaf(self, leaf: object) -> object:
        """Convert an array or a CPU tensor. Return other leaves unchanged."""
        if is_array(leaf):
            return self.array(leaf)
        return self.tensor(leaf) if isinstance(leaf, self.torch.Tensor) else leaf

    def array(self, array: Array) -> Array | Tensor:
        """Convert an array."""
        laid: Any = self.lay(array)
        return laid if self.late is None or laid is array else self.tensor(laid)

    def lay(self, array: Array, make: Callable[..., Array] = np.empty) -> Array | Tensor:
        """Create a tensor that shares memory with the array or, if necessary, with a copy."""
        target = target_of(array.dtype, self.cast)
        if target is None:
            return array
        if not is_usable(array, target):
            array = recast(array, target, make)
        elif array.dtype.char != target.char:
            array = array.view(target)
        return self.from_numpy(array)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Cast a CPU tensor, unless it is complex or quantized."""
        if not self.casts(tensor) or tensor.dtype == self.wanted:
            return tensor
        return tensor.to(self.wanted, copy=True)

    def casts(self, tensor: Tensor) -> bool:
        """Return True if the tensor must be cast."""
        return (
            self.wanted is not None
            and tensor.device.type == "cpu"
            and not (tensor.is_complex() or tensor.is_quantized)
        )


class Converter:
    """Converts batches in the calling thread."""

    __slots__ = ("convert", "output")

    def __init__(self, output: Output) -> None:
        self.output = output
        self.convert: Convert = _MAKERS[output.kind](output)

    def leaf_for(self, dtype: Dtype | None) -> Convert | None:
        """Return a function to convert `dtype` arrays (tensors if None), or None to keep them."""
        output = self.output
        if output.kind != "cpu":
            return self.convert
        if dtype is None:
            return None if output.dtype is None and output.torch_dtype is None else self.convert
        target = target_of(dtype, output.dtype)
        if target is None:
            return None
        if output.torch_dtype is not None or target != dtype or target.char != dtype.char:
            return self.convert
        function: Convert = importlib.import_module("torch").from_numpy
        return function


def _make_null(output: Output) -> Convert:  # noqa: ARG001
    return lambda batch: batch


def _make_call(output: Output) -> Convert:
    function = output.function
    assert function is not None

    def call(array: Array) -> object:
        try:
            return function(array)
        except SystemExit as error:
            if failure.ends_program(error):
                raise
            raise failure.ordinary(error) from error

    return _on_arrays(call)


def _make_array(output: Output) -> Convert:
    cast = output.dtype
    if cast is None:
        return _make_null(output)

    def function(array: Array) -> Array:
        return recast(array, cast) if castable(array.dtype) and array.dtype != cast else array

    return _on_arrays(function)


def _on_arrays(function: Callable[[Array], object]) -> Convert:
    def leaf(value: object) -> object:
        return function(value) if isinstance(value, np.ndarray) else value

    return lambda batch: map_leaves(leaf, batch)


def _make_cpu(output: Output) -> Convert:
    host, ready = Host(output), output.dtype
    from_numpy, array, leaf = host.from_numpy, host.array, host.leaf

    def convert(batch: Batch) -> Batch:
        if type(batch) is not np.ndarray:
            return map_leaves(leaf, batch)
        if batch.dtype is ready and is_usable(batch, ready):
            return from_numpy(batch)
        return array(batch)

    return convert


def _make_cuda(output: Output) -> Convert:
    """Convert synchronously, for test mode."""
    host, device = Host(output), output.device

    def leaf(value: object) -> object:
        value = host.leaf(value)
        return value.to(device) if isinstance(value, host.torch.Tensor) else value

    return lambda batch: map_leaves(leaf, batch)


_MAKERS: dict[Kind, Callable[[Output], Convert]] = {
    "null": _make_null,
    "call": _make_call,
    "array": _make_array,
    "cpu": _make_cpu,
    "cuda": _make_cuda,
}
