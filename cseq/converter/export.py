"""Tensors in the CUDA memory of a converter process, fetched by the trainer."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from typing import TYPE_CHECKING

from cseq.converter.lane import Lane, UnderWay, open_lane
from cseq.encoding.codec import map_leaves
from cseq.encoding.transport import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cseq.converter import Batch, Tensor
    from cseq.converter.output import Output

logger = logging.getLogger("cseq")


class Handle:
    """A tensor in the CUDA memory of another process: a few hundred bytes to pickle.

    torch's own reference count keeps that memory while the process lives, until the handle was
    opened and the tensor dropped. So open every handle once, and clone its tensor at once.

    Attributes
    ----------
    rebuild, arguments : callable and tuple
        What ``torch.multiprocessing.reductions.reduce_tensor`` returns.
    opened : bool
        Whether `open` was called here, with or without success.
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
            raise Lost(f"a tensor of a converter process cannot be opened: {error}") from error


def _counts_in(arguments: object) -> Iterator[str]:
    """Find the names of torch's files in a handle's arguments (a sparse tensor is several)."""
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

    Each serves some ten thousand tensors. A file is removed when its process has ended, or is about
    to end.
    """

    MANY = 16

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, handle: Handle) -> None:
        """Remember the files of a handle."""
        for name in _counts_in(handle.arguments):
            if name not in self._names:
                if len(self._names) >= self.MANY:  # torch removes files that are used up
                    self._names = {n for n in self._names if os.path.exists(SHM + n)}
                self._names.add(name)

    def remove(self) -> None:
        """Remove the files that are left."""
        for name in list(self._names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SHM + name)
        self._names.clear()


def pack(batch: Batch, counts: Counts) -> Batch:
    """Replace every CUDA tensor by a `Handle`; the current stream must be that of its copy."""
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
        None: one to ``output.device``.
    """

    def __init__(self, output: Output, lane: Lane | None = None) -> None:
        # A lane of its own: when torch releases the other process's memory, the host waits for the
        # current stream, which here has one short copy to do, and not the training step.
        self._lane = open_lane(output.device) if lane is None else lane
        self._under_way = UnderWay()
        self._counts = Counts()

    def unpack(self, batch: Batch) -> Batch:
        """Replace every `Handle` by a tensor of this process.

        Raises
        ------
        Lost
            The converter's process has ended: the batch must be converted again.
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
        """Open and drop a batch's unopened handles, or the converter would keep the memory."""

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
        """Remove the files of killed converters in /dev/shm; all converters must have ended."""
        self._counts.remove()
