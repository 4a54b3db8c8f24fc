"""Tensors of a small batch: what torch gets of the copied bytes, and when these are freed."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cseq.encoding import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.encoding.writer import Writer

torch = pytest.importorskip("torch", reason="tensors are torch's")

TYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (3, 1, 4, 1), (1,) * 20]
LARGE = 1 << 20  # bytes; more than anything else here allocates


def copied(writer: Writer, batch: Any) -> Any:
    """Send a batch through the slot; what is read are copies."""
    writer.used = 0
    record = codec.encode(batch, writer)  # first: it may get the writer another memory
    return codec.decode(writer.memory, record, lambda *_: None)


def described(tensor: Any) -> tuple[Any, ...]:
    """Return all that two tensors of the same data have in common."""
    return (
        type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.layout,
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.is_leaf,
        tensor.untyped_storage().resizable(), tensor.requires_grad, tensor.is_inference(),
        tensor.numpy().tobytes("A"), tensor.numpy().flags.writeable,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_a_batch(dtype: str, order: Any, writer: Writer) -> None:
    """Each is what `torch.from_numpy` makes of a copy, with a storage of its own size."""
    rng = np.random.default_rng(7)
    arrays = [np.asarray(rng.integers(0, 2, shape), dtype, order=order) for shape in SHAPES]
    batch = [torch.from_numpy(array.copy(order)) for array in arrays]
    for _ in range(3):
        got = copied(writer, batch)
        assert [described(tensor) for tensor in got] == [described(tensor) for tensor in batch]
        got[0].fill_(0)
        got[-1].fill_(1)
        assert np.array_equal(got[3].numpy(), arrays[3])


def test_tensors_in_inference_mode(writer: Writer) -> None:
    """There they are inference tensors, as those of arrays are."""
    with torch.inference_mode():
        assert copied(writer, [torch.zeros(3)])[0].is_inference()


@pytest.fixture
def traced() -> Iterator[Any]:
    """Count the bytes that are in use."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


def test_bytes_of_a_tensor_are_freed(traced: Any, writer: Writer) -> None:
    """They live until the last view is gone, in whichever thread that is."""
    record = codec.encode([torch.zeros(LARGE, dtype=torch.uint8)], writer)
    gc.collect()
    before = traced()
    views = [codec.decode(writer.memory, record, lambda *_: None)[0][5:].numpy()[1:]]
    assert traced() - before > LARGE
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert traced() - before < LARGE
