"""Copies batches to a device asynchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cseq.converter.export import pack, remove_counts
from cseq.converter.host import Host, is_array
from cseq.converter.lane import Lane
from cseq.encoding.codec import map_leaves
from cseq.encoding.survey import torch_type

if TYPE_CHECKING:
    from cseq.converter import Array, Batch, Dtype, Event, Tensor
    from cseq.converter.output import Output


class Transfer(NamedTuple):
    """A batch that is being copied to the device. Pass it to `receive`."""

    batch: Batch
    event: Event
    tensors: list[Tensor]
    lane: Lane


def receive(result: Transfer | Batch) -> Batch:
    """If given a `Transfer`, return the batch it holds; return anything else unchanged."""
    if type(result) is not Transfer:
        return result
    result.lane.join(result.event, result.tensors)
    return result.batch


class CudaConverter:
    """Copies batches to a device on a separate stream, in one thread.

    Memory that is not page-locked is first copied to a page-locked buffer. `output` must be the
    result of `resolve`.
    """

    def __init__(self, output: Output) -> None:
        self._host = Host(output)
        self._lane = Lane(output.device)

    def convert(self, batch: Batch) -> Transfer:
        """Start copying a batch. Its memory is kept alive until the copy is complete."""
        self.reap()
        sources: list[Tensor] = []
        tensors: list[Tensor] = []

        def leaf(value: object) -> object:
            return self._send(value, sources, tensors)

        with self._lane.active():
            try:
                sent = map_leaves(leaf, batch)
            finally:
                event = self._lane.record(sources)
        return Transfer(sent, event, tensors, self._lane)

    def export(self, batch: Batch) -> bytes:
        """Convert and pickle a batch in a converter process. `batch` may then be overwritten."""
        transfer = self.convert(batch)
        transfer.event.synchronize()
        self.reap()
        # Use the lane that copied the batch, because the receiving process waits for that lane.
        with self._lane.active():
            return pack(transfer.batch)

    def reap(self, *, wait: bool = False) -> None:
        """Release memory that has been copied. If `wait` is set, wait for all copies first.

        Idle converters must call this too. Otherwise, they would hold on to their slots.
        """
        self._lane.reap(wait=wait)

    def close(self) -> None:
        """Wait for all copies. With converter processes, close the trainer's `Imports` first."""
        self.reap(wait=True)
        self._lane.collect()
        remove_counts()

    def _send(self, leaf: object, sources: list[Tensor], tensors: list[Tensor]) -> object:
        tensor = self._host.lay(leaf, self._make) if is_array(leaf) else leaf
        if not (isinstance(tensor, self._host.torch.Tensor) and tensor.device.type == "cpu"):
            return leaf
        source = self._page_lock(tensor.detach())
        sources.append(source)
        sent = self._lane.send(source)
        tensors.append(sent)
        return sent

    def _make(self, shape: tuple[int, ...], dtype: Dtype) -> Array:
        make, pins = self._host.torch.empty, self._lane.pins
        made: Array = make(shape, dtype=torch_type(dtype), pin_memory=pins).numpy()
        return made

    def _page_lock(self, tensor: Tensor) -> Tensor:
        """Return the tensor, cast and page-locked as needed. Sparse tensors are only cast."""
        dtype = self._host.wanted if self._host.casts(tensor) else tensor.dtype
        if tensor.dtype == dtype and self._lane.can_fetch(tensor):
            return tensor
        if tensor.layout is not self._host.torch.strided:
            return self._host.tensor(tensor)
        make, pins = self._host.torch.empty_like, self._lane.pins
        staged: Tensor = make(tensor, dtype=dtype, pin_memory=pins)
        return staged.copy_(tensor)
