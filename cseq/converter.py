"""Stage 2: the arrays of a batch become tensors, on the CPU or a CUDA device.

The guarantee: what a batch becomes depends on ``out_type`` and ``dtype`` alone, bit for bit,
whichever pool ran it. Arrays are cast by numpy, wherever that happens; tensors by torch on the CPU.
torch is imported when a converter is made, never by importing this module.

    parse ──► for_test ──► resolve ──┬─► Converter       at once: inline, threads, the trainer
    arguments  test mode   machine   └─► CudaConverter   copies on a stream of its own
                                            │ in a thread:   convert ─► Transfer ─► receive
                                            └ in a process:  export  ─► Handle   ─► Receiver.unpack
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from cseq.codec import castable, map_leaves, torch_type
from cseq.edge import Lost
from cseq.threads import imported

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    from cseq._core import Memory

logger = logging.getLogger("cseq")

# torch's own types, which this module does not import, not even for the type checker.
Tensor: TypeAlias = Any
TorchType: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]
Event: TypeAlias = Any
Batch: TypeAlias = Any  # whatever the indexer returned
Convert: TypeAlias = Callable[[Batch], Batch]

Kind = Literal["cuda", "cpu", "array", "null", "call"]

OUT_TYPES = "'cuda', 'cuda:1', 'cpu', 'null', None, a torch.device, or a callable for every array"
TEST_MODES = ("default", "cpu", "numpy")


# -- what the user asked for --------------------------------------------------------------------


class Output(NamedTuple):
    """What a batch becomes: ``out_type`` and ``dtype`` after they were checked.

    Attributes
    ----------
    kind : 'cuda', 'cpu', 'array', 'null' or 'call'
        Tensors on a CUDA device, tensors on the CPU, arrays (there is no torch), the batch as
        the indexer returned it, or whatever `function` makes of every array.
    device : str
        ``'cuda'`` (the current device), ``'cuda:1'``, or ``'cpu'``.
    function : callable or None
        Applied to every array where `kind` is ``'call'``.
    dtype : numpy.dtype or None
        Numeric arrays are cast to it, by numpy; None keeps each array's own type.
    torch_dtype : str or None
        A type that numpy lacks (``'bfloat16'``): torch casts to it, on the CPU.
    """

    kind: Kind
    device: str = "cpu"
    function: Callable[[Array], object] | None = None
    dtype: Dtype | None = None
    torch_dtype: str | None = None

    @property
    def use_cuda(self) -> bool:
        """Whether there are converters at all (asked for, until `resolve` has looked)."""
        return self.kind == "cuda"


def parse(out_type: object, dtype: object) -> Output:
    """Check the arguments ``out_type`` and ``dtype``, without importing torch.

    Parameters
    ----------
    out_type : str, None, torch.device or callable
        ``'cuda'``, ``'cuda:1'``, ``'cpu'``, ``'null'``, None (as ``'cpu'``), or a callable.
    dtype : str, type, numpy.dtype, torch.dtype or None
        A type of numbers; ``'bfloat16'`` too.

    Raises
    ------
    ValueError
        For a name or a type that is not known or cannot be used.
    TypeError
        For an object that is no such thing at all.
    """
    kind, device, function = _parse_out_type(out_type)
    cast, torch_dtype = _parse_dtype(dtype)
    return Output(kind, device, function, cast, torch_dtype)


def _parse_out_type(out_type: object) -> tuple[Kind, str, Callable[[Array], object] | None]:
    """Split ``out_type`` into kind, device and function."""
    if out_type is None:
        return "cpu", "cpu", None
    if isinstance(out_type, str):
        return _parse_name(out_type, out_type)
    # Before callables, because a torch.device can be called (as a decorator).
    if _is_torch(out_type, "device"):
        return _parse_name(re.sub(r"^cpu:\d+$", "cpu", str(out_type)), out_type)
    if callable(out_type):
        return "call", "cpu", out_type
    raise TypeError(f"out_type is {out_type!r} ({type(out_type).__name__}): give {OUT_TYPES}")


def _parse_name(name: str, out_type: object) -> tuple[Kind, str, None]:
    """Split the name of a device, or ``'null'``."""
    if name == "null":
        return "null", "cpu", None
    if name == "cpu":
        return "cpu", "cpu", None
    if match := re.fullmatch(r"cuda(:[0-9]+)?", name):
        return "cuda", f"cuda:{int(match[1][1:])}" if match[1] else "cuda", None
    raise ValueError(f"out_type is {out_type!r}, which is not known: give {OUT_TYPES}")


def _parse_dtype(dtype: object) -> tuple[Dtype | None, str | None]:
    """Split ``dtype`` into what numpy casts to and what only torch can cast to."""
    if dtype is None:
        return None, None
    name = str(dtype).removeprefix("torch.") if _is_torch(dtype, "dtype") else dtype
    if name == "bfloat16" or (name is not dtype and str(name).startswith("float8_")):
        return None, str(name)
    try:
        found = np.dtype(name)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(f"dtype is {dtype!r}, which numpy does not know: {_DTYPES}") from error
    if found.kind not in "biufc" or found.type in (np.longdouble, np.clongdouble):
        raise ValueError(f"dtype is {dtype!r}, which no tensor can have: {_DTYPES}")
    return np.dtype(found.type), None  # in native byte order


_DTYPES = "give a type of numbers such as 'float32', 'int64' or 'bfloat16', or None to keep types"


def _is_torch(value: object, name: str) -> bool:
    """Tell whether `value` is a ``torch.<name>``, without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == name


def for_test(output: Output, test_mode: str) -> Output:
    """Give the output of ``start_test(test_mode)``.

    Raises
    ------
    ValueError
        If `test_mode` is none of ``'default'`` (the same), ``'cpu'`` (CPU tensors) and
        ``'numpy'`` (what the indexer returned).
    """
    if test_mode == "default":
        return output
    if test_mode == "cpu":
        return output._replace(kind="cpu", device="cpu", function=None)
    if test_mode == "numpy":
        return output._replace(kind="null", device="cpu", function=None)
    raise ValueError(f"test_mode is {test_mode!r}: give one of {', '.join(map(repr, TEST_MODES))}")


def rehearse(output: Output) -> Output:
    """Give the CUDA path with the CPU as its device: tests run it where there is no CUDA."""
    return output._replace(kind="cuda", device="cpu", function=None)


def converter_kind(compat: bool | None, os_name: str) -> Literal["thread", "process"]:  # noqa: FBT001
    """Tell where CUDA converters run: CUDA memory cannot cross processes on Windows."""
    in_threads = os_name == "nt" if compat is None else compat
    return "thread" if in_threads else "process"


def default_converters(num_workers: int) -> int:
    """Give the number of converters that ``num_converters=None`` stands for."""
    return max(num_workers // 4, min(num_workers, 4))


def cast_dtype(output: Output) -> Dtype | None:
    """Give the type that workers cast numeric arrays to while they copy them; None: no cast."""
    return output.dtype if output.kind in ("cuda", "cpu", "array") else None


# -- what this machine has ----------------------------------------------------------------------


def resolve(output: Output) -> Output:
    """Replace what this machine lacks, and name the CUDA device; imports torch if it is needed.

    Without CUDA, ``'cuda'`` becomes the CPU; without torch, tensors become arrays of the same
    values. Each is said once in the log ``'cseq'``. CUDA is not initialised by this.

    Raises
    ------
    ValueError
        If there is CUDA, but no device of that number.
    """
    if output.kind not in ("cuda", "cpu"):
        return output
    torch = _find_torch()
    if torch is None:
        say_once("torch is not installed: batches are numpy arrays. For tensors: pip install torch")
        return output._replace(kind="array", device="cpu")
    if output.kind == "cpu" or output.device == "cpu":
        return output
    if not torch.cuda.is_available():
        say_once("CUDA is not available: out_type 'cuda' gives CPU tensors, and use_cuda is False")
        return output._replace(kind="cpu", device="cpu")
    return output._replace(device=_name_device(torch, output.device))


def _name_device(torch: ModuleType, device: str) -> str:
    """Give the device with its number, which threads and processes cannot tell by themselves."""
    if device == "cuda":
        # Asking for the current device initialises CUDA; before that, it can only be the first.
        return f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
    count = torch.cuda.device_count()
    if int(device.removeprefix("cuda:")) >= count:
        raise ValueError(
            f"out_type is {device!r}, but the CUDA devices here, {count} in number, are counted "
            f"from 0: give 'cuda', or a number below {count}"
        )
    return device


def _find_torch() -> ModuleType | None:
    """Import torch; None where it is not installed (a broken one raises)."""
    try:
        torch: ModuleType = imported("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return torch


@functools.cache
def say_once(message: str) -> None:
    """Log a message, once in the life of this process."""
    logger.warning(message)


# -- one array ----------------------------------------------------------------------------------


def _has_tensor(leaf: object) -> TypeGuard[Array]:
    """Tell whether a leaf is an array that a tensor can stand for; a masked one is more than it."""
    return type(leaf) is np.ndarray or (
        isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    )


@functools.lru_cache(256)
def _plan(dtype: Dtype, cast: Dtype | None) -> tuple[Dtype, TorchType] | None:
    """Tell what an array of `dtype` is cast to, for numpy and for torch.

    Numbers are cast to `cast`; all else keeps its type, in native byte order. None where torch has
    no such type (text, dates, records).
    """
    target = cast if cast is not None and castable(dtype) else dtype.newbyteorder("=")
    try:
        return target, torch_type(target)
    except TypeError:
        return None


def _from_numpy() -> Callable[[Array], Tensor]:
    """Give what lays a tensor on an array."""
    function: Callable[[Array], Tensor] = importlib.import_module("torch").from_numpy
    return function


def _usable(array: Array, target: Dtype) -> bool:
    """Tell whether a tensor can be laid on the array as it is.

    It must be writable, because a tensor cannot be marked read-only and a write into, say, a
    read-only mapped file kills the process; and contiguous, as in a slot, so that a batch has the
    same strides whichever pool it came through.
    """
    flags = array.flags
    return array.dtype == target and flags.behaved and flags.forc


def _copy(array: Array, into: Array) -> Array:
    """Copy and cast an array; the only way there is, in a worker or here."""
    np.copyto(into, array, casting="unsafe")
    return into


class _Host:
    """Arrays and CPU tensors in the types that an output asks for."""

    def __init__(self, output: Output) -> None:
        self.torch = torch = importlib.import_module("torch")
        self.from_numpy: Callable[[Array], Tensor] = torch.from_numpy
        self.cast = output.dtype
        self.late = getattr(torch, output.torch_dtype) if output.torch_dtype else None
        self.wanted = torch_type(output.dtype) if output.dtype is not None else self.late

    def leaf(self, leaf: object) -> object:
        """Convert a leaf of a batch; what is neither array nor CPU tensor is kept."""
        if _has_tensor(leaf):
            return self.array(leaf)
        return self.tensor(leaf) if isinstance(leaf, self.torch.Tensor) else leaf

    def array(self, array: Array) -> Array | Tensor:
        """Lay a tensor on the array's own memory if that is possible, else on a copy of it."""
        plan = _plan(array.dtype, self.cast)
        if plan is None:
            return array
        if not _usable(array, plan[0]):
            array = _copy(array, np.empty(array.shape, plan[0], "F" if array.flags.fnc else "C"))
        tensor = self.from_numpy(array)
        return tensor if self.late is None else self.tensor(tensor)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Cast a CPU tensor; complex and quantised ones keep their type, as complex arrays do."""
        if not self.casts(tensor):
            return tensor
        return tensor.to(self.wanted)

    def casts(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is to be cast."""
        return (
            self.wanted is not None
            and tensor.device.type == "cpu"
            and not (tensor.is_complex() or tensor.is_quantized)
        )


def explain_cast(batch: Batch, output: Output) -> str | None:
    """Say which arrays of a batch look like labels and are about to become floats; None: none do.

    Those are integer arrays beside other arrays, but for images: bytes in more than one dimension.
    """
    dtype = output.dtype
    if output.kind not in ("cpu", "cuda", "array") or dtype is None or dtype.kind != "f":
        return None
    arrays: list[Any] = []

    def leaf(value: object) -> object:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            arrays.append(value)
        return value

    map_leaves(leaf, batch)
    labels = []
    for array in arrays if len(arrays) > 1 else ():
        name = str(array.dtype).removeprefix("torch.")
        if name.startswith(("int", "uint")) and (name != "uint8" or len(array.shape) < 2):
            labels.append(f"{name} of shape {tuple(array.shape)}")
    if not labels:
        return None
    return (
        f"integer arrays of the first batch ({', '.join(labels)}) become {dtype} on their way to "
        f"the loop, as dtype={dtype.name!r} says: labels and indices need dtype=None, which keeps "
        "the type of each array"
    )


# -- at once ------------------------------------------------------------------------------------


class Converter:
    """Conversion at once, in the caller: inline, in a thread, or in the trainer after decoding.

    Parameters
    ----------
    output : Output
        A resolved one; torch is imported here if it asks for tensors.

    Attributes
    ----------
    convert : callable
        ``convert(batch) -> batch``: the same nesting, with its arrays converted. Tensors lie on
        the arrays' own memory where that is possible.
    """

    __slots__ = ("convert", "output")

    def __init__(self, output: Output) -> None:
        self.output = output
        self.convert: Convert = _MAKERS[output.kind](output)

    def leaf_for(self, dtype: Dtype | None) -> Convert | None:
        """Tell what `convert` does to arrays of a type, fresh ones, or (None) to CPU tensors.

        Returns
        -------
        callable or None
            To be applied to each of them; None if they stay as they are.
        """
        output = self.output
        if output.kind != "cpu":
            return self.convert
        if dtype is None:
            return None if output.dtype is None and output.torch_dtype is None else self.convert
        plan = _plan(dtype, output.dtype)
        if plan is None:
            return None
        ready = output.torch_dtype is None and plan[0] == dtype
        return _from_numpy() if ready else self.convert

    def close(self) -> None:
        """Do nothing: there is nothing under way."""


def _make_null(output: Output) -> Convert:  # noqa: ARG001
    """Make the identity."""
    return lambda batch: batch


def _make_call(output: Output) -> Convert:
    """Make what applies the user's function to every array."""
    function = output.function
    if function is None:
        raise TypeError("an Output of kind 'call' needs a function")
    return _on_arrays(function)


def _make_array(output: Output) -> Convert:
    """Make what casts arrays where there is no torch."""
    cast = output.dtype
    if cast is None:
        return _make_null(output)

    def function(array: Array) -> Array:
        numeric = castable(array.dtype)
        return array.astype(cast, order="A", copy=False) if numeric else array

    return _on_arrays(function)


def _on_arrays(function: Callable[[Array], object]) -> Convert:
    """Apply a function to every array of a batch."""

    def leaf(value: object) -> object:
        return function(value) if isinstance(value, np.ndarray) else value

    return lambda batch: map_leaves(leaf, batch)


def _make_cpu(output: Output) -> Convert:
    """Make what gives CPU tensors; an array that is ready costs little more than from_numpy."""
    host, ready = _Host(output), output.dtype
    from_numpy, array, leaf = host.from_numpy, host.array, host.leaf

    def convert(batch: Batch) -> Batch:
        if type(batch) is not np.ndarray:
            return map_leaves(leaf, batch)
        if batch.dtype is ready and batch.flags.carray:
            return from_numpy(batch)
        return array(batch)

    return convert


def _make_cuda(output: Output) -> Convert:
    """Make what gives tensors on the device when it returns: for test mode."""
    host, device = _Host(output), output.device

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


# -- on a stream --------------------------------------------------------------------------------


class Lane:
    """A queue of copies to a device, beside all else that it does.

    This one is for rehearsals: the CPU plays the device, and every copy is done at once.
    """

    # Whether memory that copies start from is to be page-locked.
    pins = False

    def active(self) -> AbstractContextManager[object]:
        """Send what is done in this context down this lane."""
        return contextlib.nullcontext()

    def can_fetch(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """Tell whether this CPU tensor is page-locked, so that the device can fetch it itself."""
        return True

    def send(self, tensor: Tensor) -> Tensor:
        """Begin to copy a CPU tensor to the device."""
        return tensor.clone()

    def record(self) -> Event:
        """Put a mark behind the copies that were begun."""
        return _Passed()

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the caller's further work on the device, but not the caller, wait for `event`."""

    def collect(self) -> None:
        """Free memory that other processes have had from this one."""


class CudaLane(Lane):
    """A CUDA stream."""

    pins = True

    def __init__(self, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def active(self) -> AbstractContextManager[object]:
        """Make it this thread's current stream, and its device the current one."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return context

    def can_fetch(self, tensor: Tensor) -> bool:
        """Ask CUDA, which knows torch's page-locked memory and that of `PageLocks`."""
        return bool(tensor.is_pinned())

    def send(self, tensor: Tensor) -> Tensor:
        """Copy without waiting."""
        return tensor.to(self._device, non_blocking=True)

    def record(self) -> Event:
        """Record an event; a host thread that waits for it sleeps rather than spins."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the current stream wait, and tell torch's allocator that it uses the tensors.

        Without the second, this lane's next copies would be given the memory of a tensor that
        the user has dropped, while the user's kernels still read it.
        """
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    def collect(self) -> None:
        """Ask torch to; also its file of reference counts, else it outlives a process like ours."""
        self._torch.cuda.ipc_collect()


class _Passed:
    """The mark of a lane on which everything is done at once."""

    def query(self) -> bool:
        """Tell that all is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


def open_lane(device: str) -> Lane:
    """Open a lane to a device; ``'cpu'`` opens a rehearsal."""
    return Lane() if device == "cpu" else CudaLane(device)


class _UnderWay:
    """Memory that a lane's copies still read, each piece with the event that ends its use."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Event, list[Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def hold(self, event: Event, tensors: list[Tensor]) -> None:
        """Keep tensors, and with them the arrays they lie on, until the event is passed."""
        if tensors:
            self._queue.append((event, tensors))

    def reap(self, *, wait: bool = False) -> None:
        """Let go of what is no longer read; `wait` for all of it."""
        while self._queue:
            if wait:
                self._queue[0][0].synchronize()
            elif not self._queue[0][0].query():
                return
            self._queue.popleft()


class Transfer:
    """A batch on its way to the device; only `receive` may use it."""

    __slots__ = ("batch", "event", "lane", "tensors")

    def __init__(self, batch: Batch, event: Event, tensors: list[Tensor], lane: Lane) -> None:
        self.batch = batch
        self.event = event
        self.tensors = tensors
        self.lane = lane


def receive(result: Transfer | Batch) -> Batch:
    """Take a batch over from a converter in a thread; anything but a `Transfer` is returned as is.

    The consumer's current stream waits for the copies; the host does not.
    """
    if type(result) is not Transfer:
        return result
    result.lane.join(result.event, result.tensors)
    return result.batch


class CudaConverter:
    """One converter: copies batches to a device on a stream of its own.

    Page-locked memory (see `PageLocks`) is copied from where it lies; everything else passes
    through page-locked memory of torch's pool. Belongs to one thread.

    Parameters
    ----------
    output : Output
        A resolved one with ``use_cuda``.
    lane : Lane, optional
        Instead of one opened to ``output.device``.
    """

    def __init__(self, output: Output, lane: Lane | None = None) -> None:
        self._host = _Host(output)
        self._lane = open_lane(output.device) if lane is None else lane
        self._under_way = _UnderWay()
        self._counts = Counts()

    def convert(self, batch: Batch) -> Transfer:
        """Begin to copy a batch; the memory it lies on is kept until that is done."""
        self.reap()
        sources: list[Tensor] = []
        tensors: list[Tensor] = []

        def leaf(value: object) -> object:
            return self._send(value, sources, tensors)

        with self._lane.active():
            try:
                sent = map_leaves(leaf, batch)
            finally:  # also after an error: the copies that were begun go on
                event = self._lane.record()
                self._under_way.hold(event, sources)
        return Transfer(sent, event, tensors, self._lane)

    def export(self, batch: Batch) -> Batch:
        """Convert and `pack` a batch, in a process: it may be overwritten when this returns."""
        transfer = self.convert(batch)
        transfer.event.synchronize()
        self.reap()
        # The consumer in the other process waits for this lane, where the copies were made.
        with self._lane.active():
            return pack(transfer.batch, self._counts)

    def reap(self, *, wait: bool = False) -> None:
        """Let go of memory whose copies are done; `wait` until all are.

        To be called when no ticket comes: else a converter with nothing to do would keep a slot.
        """
        self._under_way.reap(wait=wait)

    def close(self) -> None:
        """Wait until all copies are done; after the consumer's `Receiver.close`, in a process."""
        self.reap(wait=True)
        self._lane.collect()
        self.clean()

    def clean(self) -> None:
        """Remove the files of this process that torch has not: of batches that were not fetched."""
        self._counts.remove()

    def _send(self, leaf: object, sources: list[Tensor], tensors: list[Tensor]) -> object:
        """Send an array or a CPU tensor to the device; keep any other leaf."""
        tensor = self._lay(leaf) if _has_tensor(leaf) else leaf
        if not (isinstance(tensor, self._host.torch.Tensor) and tensor.device.type == "cpu"):
            return leaf
        source = self._page_lock(tensor.detach())
        sources.append(source)
        sent = self._lane.send(source)
        tensors.append(sent)
        return sent

    def _lay(self, array: Array) -> Array | Tensor:
        """Lay a tensor on the array, or cast the array into page-locked memory, in one pass."""
        plan = _plan(array.dtype, self._host.cast)
        if plan is None:
            return array
        if _usable(array, plan[0]):
            return self._host.from_numpy(array)
        # The memory order is the array's own, as in `_Host.array`.
        shape = array.T.shape if array.flags.fnc else array.shape
        staged = self._host.torch.empty(shape, dtype=plan[1], pin_memory=self._lane.pins)
        if array.flags.fnc:
            staged = staged.permute(*range(staged.dim())[::-1])
        _copy(array, staged.numpy())
        return staged

    def _page_lock(self, tensor: Tensor) -> Tensor:
        """Give a tensor of the wanted type that the device can fetch: this one, or a copy."""
        dtype = self._host.wanted if self._host.casts(tensor) else tensor.dtype
        if tensor.dtype == dtype and self._lane.can_fetch(tensor):
            return tensor
        if tensor.layout is not self._host.torch.strided:
            return self._host.tensor(tensor)
        staged = self._host.torch.empty_like(tensor, dtype=dtype, pin_memory=self._lane.pins)
        return staged.copy_(tensor)


# -- page-locked memory -------------------------------------------------------------------------


class PageLocks:
    """The mappings of the arena that this process has page-locked, so that CUDA copies from them.

    A mapping is kept, and so stays mapped, until it is unregistered: CUDA would go on to copy
    from the old pages of an address that is mapped anew.

    Parameters
    ----------
    device : str
        A CUDA device, such as ``'cuda:0'``.
    """

    # Page-locked for every context, not only for the one of the device that is current now.
    PORTABLE = 1

    def __init__(self, device: str) -> None:
        self._torch = importlib.import_module("torch")
        self._device = device
        self._locked: dict[int, Memory] = {}

    def register(self, memory: Memory) -> bool:
        """Page-lock a mapping, once; False if that fails, which costs speed and nothing else."""
        if memory.address in self._locked:
            return True
        status = self._call("cudaHostRegister", memory.address, memory.nbytes, self.PORTABLE)
        if status:
            say_once(
                f"CUDA could not page-lock shared memory (error {status}): batches are copied "
                "once more on their way to the device"
            )
            return False
        self._locked[memory.address] = memory
        return True

    def unregister(self, memory: Memory) -> None:
        """Unlock a mapping before it is dropped; the copies from it must be done."""
        if self._locked.pop(memory.address, None) is None:
            return
        status = self._call("cudaHostUnregister", memory.address)
        if status:
            logger.warning("CUDA could not unlock %d bytes (error %d)", memory.nbytes, status)

    def close(self) -> None:
        """Unlock all of it."""
        for memory in list(self._locked.values()):
            self.unregister(memory)

    def _call(self, name: str, *arguments: int) -> int:
        """Call a function of CUDA's runtime on our device; return its status, 0 for success."""
        with self._torch.cuda.device(self._device):
            status = int(getattr(self._torch.cuda.cudart(), name)(*arguments))
            if status:
                self._forget_error()
            return status

    def _forget_error(self) -> None:
        """Take back the error that a failed call leaves behind.

        The next kernel launch, perhaps the user's, would report it as its own; so launch one.
        """
        try:
            self._torch.ones(1, device=self._device)
        except RuntimeError as error:
            logger.debug("CUDA's error was taken back: %s", str(error))


# -- between processes --------------------------------------------------------------------------


class Handle:
    """A tensor in the CUDA memory of another process: a few hundred bytes to pickle.

    torch's own reference count keeps that memory while the process lives, until the handle was
    opened and the tensor dropped. So open every handle once, and clone what it gives at once.

    Attributes
    ----------
    rebuild, arguments : callable and tuple
        What torch says it takes.
    opened : bool
        Whether it was tried here, with or without success.
    """

    __slots__ = ("arguments", "opened", "rebuild")

    def __init__(self, rebuild: Callable[..., Tensor], arguments: tuple[object, ...]) -> None:
        self.rebuild = rebuild
        self.arguments = arguments
        self.opened = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the two parts."""
        return Handle, (self.rebuild, self.arguments)

    def open(self) -> Tensor:
        """Open the other process's memory.

        Raises
        ------
        Lost
            If that process has ended, and its memory with it.
        """
        self.opened = True
        try:
            return self.rebuild(*self.arguments)
        except Exception as error:
            raise Lost(f"a tensor of a converter process cannot be had: {error}") from error

    def counts(self) -> Iterator[str]:
        """Name torch's files of reference counts that this tensor is counted in."""
        yield from _counts_in(self.arguments)


def _counts_in(arguments: object) -> Iterator[str]:
    """Find the names among what torch says (a sparse tensor is several)."""
    if isinstance(arguments, bytes) and COUNTS.fullmatch(arguments):
        yield arguments.decode("ascii")
    elif isinstance(arguments, tuple):
        for argument in arguments:
            yield from _counts_in(argument)


# How torch names them: by process, at random, by number.
COUNTS = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
SHM = "/dev/shm"


class Counts:
    """Torch's files of reference counts, which a process that is killed leaves in /dev/shm.

    There is one for some ten thousand tensors. Whoever knows that its process is gone, or will
    never be asked again, removes it.
    """

    MANY = 16

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, handle: Handle) -> None:
        """Remember a handle's."""
        for name in handle.counts():
            if name not in self._names:
                if len(self._names) >= self.MANY:  # torch removes those that are used up
                    self._names = {n for n in self._names if os.path.exists(SHM + n)}
                self._names.add(name)

    def remove(self) -> None:
        """Remove those that are left."""
        for name in list(self._names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SHM + name)
        self._names.clear()


def pack(batch: Batch, counts: Counts) -> Batch:
    """Replace every CUDA tensor by a `Handle`; the current stream must be where it was made."""
    torch = importlib.import_module("torch")
    reductions = importlib.import_module("torch.multiprocessing.reductions")

    def leaf(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            handle = Handle(*reductions.reduce_tensor(value))
            counts.add(handle)
            return handle
        return value

    return map_leaves(leaf, batch)


class Receiver:
    """The consumer's side of converters in processes. Belongs to one thread.

    Every tensor is copied from the converter's memory to the consumer's, on the device, so that
    a batch that the user holds does not depend on another process.

    Parameters
    ----------
    output : Output
        A resolved one with ``use_cuda``.
    lane : Lane, optional
        Instead of one opened to ``output.device``.
    """

    def __init__(self, output: Output, lane: Lane | None = None) -> None:
        # A lane of its own, because torch, when it lets go of the other process's memory, waits on
        # the host for the current stream: here that is one short copy, and not the training step.
        self._lane = open_lane(output.device) if lane is None else lane
        self._under_way = _UnderWay()
        self._counts = Counts()

    def unpack(self, batch: Batch) -> Batch:
        """Replace every `Handle` by a tensor of this process.

        Raises
        ------
        Lost
            If the converter's process has ended: the batch must be converted again.
        """
        opened: list[Tensor] = []
        tensors: list[Tensor] = []

        def leaf(value: object) -> object:
            if type(value) is not Handle:
                return value
            self._counts.add(value)
            opened.append(value.open())
            tensors.append(opened[-1].clone())
            return tensors[-1]

        with self._lane.active():
            self._under_way.reap()
            try:
                batch = map_leaves(leaf, batch)
            finally:
                event = self._lane.record()
                self._under_way.hold(event, opened)
        self._lane.join(event, tensors)
        return batch

    def discard(self, batch: Batch) -> None:
        """Release what was not opened of a batch, or its converter would keep the memory."""

        def leaf(value: object) -> object:
            if type(value) is Handle and not value.opened:
                self._counts.add(value)
                try:
                    value.open()
                except Lost as error:  # its process has ended: there is nothing to release
                    logger.debug("discarded: %s", str(error))
            return value

        with self._lane.active():
            map_leaves(leaf, batch)

    def close(self) -> None:
        """Release all memory of other processes."""
        with self._lane.active():
            self._under_way.reap(wait=True)

    def clean(self) -> None:
        """Remove what killed converters have left in /dev/shm; all of them must be gone."""
        self._counts.remove()
