"""Transfer of batches from the CUDA memory of converter processes to the trainer.

A converter pickles a batch with torch's reductions, which replace each device tensor with a handle
to its memory. torch's reference count keeps the memory alive until the handle has been opened and
the tensor dropped. Each pickle is therefore read only once, and its tensors are cloned immediately.
"""

from __future__ import annotations

import glob
import importlib
import logging
import os
import pickle
from typing import TYPE_CHECKING, Any

from cseq.converter.lane import Lane
from cseq.encoding import codec
from cseq.encoding._codec import Decoder
from cseq.encoding.codec import map_leaves
from cseq.encoding.pickling import dumps
from cseq.encoding.transport import SlotReader
from cseq.stage import BATCH, CONVERTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq._core import Ring
    from cseq.converter import Batch, Convert, Tensor
    from cseq.converter.output import Output
    from cseq.encoding.transport import Fields, LeafFor
    from cseq.memory.arena import Arena

logger = logging.getLogger("cseq")


class Lost(RuntimeError):
    """Raised when a batch can no longer be fetched from a converter process."""


class Exported:
    """A wrapper whose pickle is a call that opens the tensor's memory in another process."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        return opened, reductions.reduce_tensor(self.tensor)


def opened(rebuild: Callable[..., Tensor], arguments: tuple[object, ...]) -> Tensor:
    """Open another process's memory. Raise `Lost` if this fails, for example after an exit."""
    try:
        return rebuild(*arguments)
    except Exception as error:
        raise Lost(f"a tensor of a converter process cannot be opened: {error}") from error


def pack(batch: Batch) -> bytes:
    """Pickle a batch. The current stream must be the one that copied the batch."""
    torch = importlib.import_module("torch")

    def leaf(value: Any) -> object:
        is_there = isinstance(value, torch.Tensor) and value.is_cuda
        return Exported(value) if is_there else value

    return dumps(map_leaves(leaf, batch))


def remove_counts() -> None:
    """Remove the reference-count files that torch leaves behind for unfetched batches."""
    for path in glob.glob(f"/dev/shm/torch_{os.getpid()}_*"):
        os.unlink(path)


class Imports(SlotReader):
    """The trainer side of the slots that converter processes write to, for use by one thread.

    The device copies every tensor from the converter's memory to the trainer's, so the user's batch
    does not depend on another process.

    The slot still holds the indexer's batch, and the cell still holds that batch's record. If the
    converted batch is lost or an exception interrupts the fetch, `decode` converts the indexer's
    batch itself and increments `lost`. The output must be resolved and must use CUDA.
    """

    def __init__(self, arena: Arena, ring: Ring, output: Output, convert: Convert) -> None:
        super().__init__(arena)
        self._ring = ring
        self._convert = convert
        self._torch = importlib.import_module("torch")
        # When torch releases another process's memory, the host waits for the current stream. With
        # a separate lane, the host waits for one short copy instead of the training step.
        self._lane = Lane(output.device)
        # Each cell's token at the time its pickle was last read.
        self._read = [0] * ring.capacity
        self.lost = 0

    def decoder(self, *, convert: Convert | None, leaf_for: LeafFor | None) -> Decoder:
        """Create a decoder. The decoder also frees the slots."""
        return Decoder(slots=self.arena.slots, convert=convert, leaf_for=leaf_for)

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Batch:
        """Fetch the batch, or convert it in this process if the converted batch is lost.

        Only the error's text is logged, because a reference to the error would keep the slot busy.
        """
        try:
            return self._fetch(cell, slot, capacity, record)
        except Lost as error:
            reason = str(error)
        epoch, number, _ = self._ring.ticket(cell)
        logger.warning("epoch %d, batch %d is converted again: %s", epoch, number, reason)
        _, _, slot, capacity, record, _ = self._ring.left_in(cell)
        memory = self.arena.lend(slot, sum(record), capacity)
        batch = self._convert(codec.decode(memory, record))
        self.lost += 1
        return batch

    def _fetch(self, cell: int, slot: int, capacity: int, record: Fields) -> Batch:
        """Copy the batch into this process's memory."""
        theirs: list[Tensor] = []
        ours: list[Tensor] = []

        def leaf(value: object) -> object:
            if not isinstance(value, self._torch.Tensor):
                return value
            theirs.append(value)
            ours.append(value.clone())
            return ours[-1]

        with self._lane.active():
            self._lane.reap()
            try:
                batch = map_leaves(leaf, self._open(cell, slot, capacity, record))
            finally:
                event = self._lane.record(theirs)
        self._lane.join(event, ours)
        return batch

    def _open(self, cell: int, slot: int, capacity: int, record: Fields) -> Batch:
        """Unpickle a converter's batch. Raise `Lost` if the pickle has already been read."""
        packed: Any = super().decode(cell, slot, capacity, record)
        token = self._ring.token(cell)
        if self._read[cell] == token:
            raise Lost("an exception was raised while it was fetched")
        self._read[cell] = token
        return pickle.loads(packed)

    def cancel(self, cell: int) -> None:
        """Return a cancelled batch's memory to its converter, unless the converter has exited."""
        stage, status, slot, capacity, _, record = self._ring.left_in(cell)
        if stage == CONVERTER and status == BATCH:
            with self._lane.active():
                try:
                    self._open(cell, slot, capacity, record)
                except Lost as error:
                    logger.debug("discarded: %s", str(error))

    def close(self) -> None:
        """Release all memory that belongs to other processes."""
        with self._lane.active():
            self._lane.reap(wait=True)
