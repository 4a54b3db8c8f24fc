"""Parses out_type and dtype."""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from cseq.check import choice
from cseq.encoding.codec import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from cseq.converter import Array, Batch, Dtype

logger = logging.getLogger("cseq")

Kind = Literal["cuda", "cpu", "array", "null", "call"]

OUT_TYPES = "'cuda', 'cuda:1', 'cpu', 'null', None, a torch.device, or a callable for each array"


class Output(NamedTuple):
    """The parsed arguments ``out_type`` and ``dtype``.

    Attributes
    ----------
    kind : 'cuda', 'cpu', 'array', 'null' or 'call'
        CUDA tensors, CPU tensors, arrays (without torch), the unchanged batch, or the results of
        `function`.
    device : str
        ``'cuda'`` (the current device), ``'cuda:1'``, or ``'cpu'``.
    function : callable or None
        Applied to every array if `kind` is ``'call'``.
    dtype : numpy.dtype or None
        The type for numeric arrays, or None to keep their types.
    torch_dtype : str or None
        A type that only torch supports (``'bfloat16'``).
    """

    kind: Kind
    device: str = "cpu"
    function: Callable[[Array], object] | None = None
    dtype: Dtype | None = None
    torch_dtype: str | None = None

    @property
    def use_cuda(self) -> bool:
        """Whether batches go to a CUDA device or, before `resolve`, whether this was requested."""
        return self.kind == "cuda"


def parse(out_type: object, dtype: object) -> Output:
    """Check the arguments ``out_type`` and ``dtype``, without importing torch.

    Parameters
    ----------
    out_type : str, None, torch.device or callable
        ``'cuda'``, ``'cuda:1'``, ``'cpu'``, ``'null'``, None (same as ``'cpu'``), or a callable.
    dtype : str, type, numpy.dtype, torch.dtype or None
        A numeric type, including ``'bfloat16'``, or None to keep types.

    Raises
    ------
    ValueError
        If a name or a type is unknown or cannot be used.
    TypeError
        If an argument has the wrong type.
    """
    kind, device, function = _parse_out_type(out_type)
    cast, torch_dtype = _parse_dtype(dtype)
    return Output(kind, device, function, cast, torch_dtype)


def _parse_out_type(out_type: object) -> tuple[Kind, str, Callable[[Array], object] | None]:
    if out_type is None:
        return "cpu", "cpu", None
    if isinstance(out_type, str):
        return _parse_name(out_type, out_type)
    # A torch.device is also callable.
    if _is_torch(out_type, "device"):
        return _parse_name(re.sub(r"^cpu:\d+$", "cpu", str(out_type)), out_type)
    if callable(out_type):
        return "call", "cpu", out_type
    raise TypeError(f"out_type={out_type!r} has type {type(out_type).__name__}; pass {OUT_TYPES}")


def _parse_name(name: str, out_type: object) -> tuple[Kind, str, None]:
    if name == "null":
        return "null", "cpu", None
    if name == "cpu":
        return "cpu", "cpu", None
    if match := re.fullmatch(r"cuda(:[0-9]+)?", name):
        return "cuda", f"cuda:{int(match[1][1:])}" if match[1] else "cuda", None
    raise ValueError(f"out_type={out_type!r} is unknown; pass {OUT_TYPES}")


def _parse_dtype(dtype: object) -> tuple[Dtype | None, str | None]:
    """Return a numpy type, or the name of a type that only torch has."""
    if dtype is None:
        return None, None
    name = str(dtype).removeprefix("torch.") if _is_torch(dtype, "dtype") else dtype
    if name == "bfloat16" or (name is not dtype and str(name).startswith("float8_")):
        return None, str(name)
    try:
        known = np.dtype(name)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(f"dtype={dtype!r} is not a valid numpy dtype; {_DTYPES}") from error
    if known.kind not in "biufc" or known.type in (np.longdouble, np.clongdouble):
        raise ValueError(f"dtype={dtype!r} is not supported by tensors; {_DTYPES}")
    return np.dtype(np.dtype(known.type).str), None


_DTYPES = (
    "pass a numeric type such as 'float32', 'int64' or 'bfloat16', None to keep types, or 'auto'"
)


def _is_torch(value: object, name: str) -> bool:
    """Check the type without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == name


def for_test(output: Output, test_mode: str) -> Output:
    """Return the output for ``start_test(test_mode)``.

    Raises
    ------
    ValueError
        If `test_mode` is not ``'default'`` (the same output), ``'cpu'`` (CPU tensors) or
        ``'numpy'`` (the unchanged batch).
    """
    if choice("test_mode", test_mode, ("default", "cpu", "numpy")) == "default":
        return output
    kind: Kind = "cpu" if test_mode == "cpu" else "null"
    return output._replace(kind=kind, device="cpu", function=None)


def cast_dtype(output: Output) -> Dtype | None:
    """Return the type that workers cast numeric arrays to, or None."""
    return output.dtype if output.kind in ("cuda", "cpu", "array") else None


def explain_cast(batch: Batch, output: Output) -> str | None:
    """Return a warning if labels appear to have been cast to floats, otherwise None.

    With several arrays, integer arrays count as labels, except multidimensional ``uint8`` (images).
    """
    dtype = output.dtype
    if output.kind not in ("cpu", "cuda", "array") or dtype is None or dtype.kind != "f":
        return None
    arrays, labels = 0, []

    def leaf(value: object) -> object:
        nonlocal arrays
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            arrays += 1
            name = str(value.dtype).removeprefix("torch.")
            if name.startswith(("int", "uint")) and (name != "uint8" or len(value.shape) < 2):
                labels.append(f"{name} of shape {tuple(value.shape)}")
        return value

    map_leaves(leaf, batch)
    if arrays < 2 or not labels:
        return None
    return (
        f"integer arrays of the first batch ({', '.join(labels)}) were converted to {dtype}, "
        f"because of dtype={dtype.name!r}; for labels and indices, pass dtype=None, which keeps "
        "the type of each array"
    )


def resolve(output: Output) -> Output:
    """Return the output for this machine, with a device number. This may import torch.

    Without CUDA, ``'cuda'`` becomes ``'cpu'``. Without torch, tensors become arrays. This does not
    initialize CUDA.

    Raises
    ------
    ValueError
        If there is no device with this number.
    """
    if output.kind not in ("cuda", "cpu"):
        return output
    torch = _find_torch()
    if torch is None:
        say_once(
            "torch is not installed, so batches are numpy arrays; to get tensors, run pip install "
            "torch"
        )
        return output._replace(kind="array", device="cpu")
    if output.kind == "cpu":
        return output
    if not torch.cuda.is_available():
        say_once("CUDA is not available, so out_type='cuda' returns CPU tensors, like 'cpu'")
        return output._replace(kind="cpu", device="cpu")
    return output._replace(device=_name_device(torch, output.device))


def _name_device(torch: ModuleType, device: str) -> str:
    """Add a number to the device's name, because each thread has its own current device."""
    if device == "cuda":
        # Querying the current device would initialize CUDA.
        return f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
    count = torch.cuda.device_count()
    if int(device.removeprefix("cuda:")) >= count:
        raise ValueError(
            f"out_type={device!r} does not exist: this machine has {count} CUDA devices, numbered "
            f"from 0; pass 'cuda', or a number below {count}"
        )
    return device


def _find_torch() -> ModuleType | None:
    """Import torch. Return None if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return torch


@functools.cache
def say_once(message: str) -> None:
    """Log a message once per process."""
    logger.warning(message)
