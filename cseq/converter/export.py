"""Transfers batches from the CUDA memory of converter processes to the trainer.

torch pickles a device tensor as a handle, and keeps its memory until the receiver has opened the
handle and dropped the tensor. So each pickle is read only once, and its tensors are cloned.
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
    """Raised if a batch can no longer be fetched from a converter process."""


class Exported:
    """Wraps a tensor so that unpickling it calls `opened`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        return opened, reductions.reduce_tensor(self.tensor)


def opened(rebuild: Callable[..., Tensor], arguments: tuple[object, ...]) -> Tensor:
    """Open a tensor in another process's memory. Raise `Lost` if this fails."""
    try:
        return rebuild(*arguments)
    except Exception as error:
        raise Lost(f"a tensor from a converter process could not be opened: {error}") from error


def pack(batch: Batch) -> bytes:
    """Pickle a batch. The current stream must be the one that copied it."""
    torch = importlib.import_module("torch")

    def leaf(value: Any) -> object:
        is_there = isinstance(value, torch.Tensor) and value.is_cuda
        return Exported(value) if is_there else value

    return dumps(map_leaves(leaf, batch))


def remove_counts() -> None:
    """Remove the reference count files that torch leaves behind."""
    for path in glob.glob(f"/dev/shm/torch_{os.getpid()}_*"):
        os.unlink(path)


class Imports(SlotReader):
    """The trainer's reader for slots that converter processes write to. Use it in one thread only.

    All tensors are copied to the trainer's memory.

    If a converted batch is lost or cannot be fetched, `decode` increments `lost` and converts the
    indexer's batch, which is still in a slot. `output` must be resolved and must use CUDA.
    """

    def __init__(self, arena: Arena, ring: Ring, output: Output, convert: Convert) -> None:
        super().__init__(arena)
        self._ring = ring
        self._convert = convert
        self._torch = importlib.import_module("torch")
        # When torch releases another process's memory, it makes the host wait for the current
        # stream. Using a separate lane keeps this wait short.
        self._lane = Lane(output.device)
        # The token that each cell had when its pickle was last read.
        self._read = [0] * ring.capacity
        self.lost = 0

    def decoder(self, *, convert: Convert | None, leaf_for: LeafFor | None) -> Decoder:
        """Create a decoder that only frees slots, and leaves the decoding to `decode`."""
        return Decoder(slots=self.arena.slots, convert=convert, leaf_for=leaf_for)

    def decode(self, cell: int, slot: int, capacity: int, record: Fields) -> Batch:
        """Fetch a converted batch. If it is lost, convert the indexer's batch in this process.

        Only the error's text is logged, because the error itself would keep the slot in use.
        """
        try:
            return self._fetch(cell, slot, capacity, record)
        except Lost as error:
            reason = str(error)
        epoch, number, _ = self._ring.ticket(cell)
        logger.warning("epoch %d, batch %d is being converted again: %s", epoch, number, reason)
        _, _, slot, capacity, record, _ = self._ring.left_in(cell)
        memory = self.arena.lend(slot, sum(record), capacity)
        batch = self._convert(codec.decode(memory, record))
        self.lost += 1
        return batch

    def _fetch(self, cell: int, slot: int, capacity: int, record: Fields) -> Batch:
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
        """Unpickle a batch. Raise `Lost` on a second attempt."""
        packed: Any = super().decode(cell, slot, capacity, record)
        token = self._ring.token(cell)
        if self._read[cell] == token:
            raise Lost("an exception interrupted its transfer")
        self._read[cell] = token
        return pickle.loads(packed)

    def cancel(self, cell: int) -> None:
        """Release a cancelled batch's memory if the converter that made it is still running."""
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
