"""Tensors of copied bytes: what torch gets, and when the bytes are freed."""

from __future__ import annotations

import pickle
import threading
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cseq import codec
from cseq._tensors import TensorMaker

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch", reason="tensors are torch's")

TYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (3, 1, 4, 1), (1,) * 20]
LARGE = 1 << 20  # bytes; more than anything else here allocates


def maker_of(dtype: Any) -> TensorMaker:
    """Return what makes tensors of a type."""
    maker = codec.tensor_maker(np.dtype(dtype))
    assert isinstance(maker, TensorMaker)
    return maker


@pytest.fixture
def traced() -> Iterator[Any]:
    """Count the bytes that are in use."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


def described(tensor: Any) -> tuple[Any, ...]:
    """Return all that two tensors of the same data have in common."""
    return (
        type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.layout,
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.is_leaf,
        tensor.untyped_storage().resizable(), tensor.requires_grad, tensor.is_inference(),
        tensor.numpy().tobytes("A"), tensor.numpy().flags.writeable,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_tensor_of_the_array(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    """It is what `torch.from_numpy` makes of a copy, in all that torch says of it."""
    values = np.random.default_rng(7).integers(0, 2, shape)
    array = np.asarray(values, np.dtype(dtype), order=order).copy(order)
    maker = maker_of(dtype)
    got = maker(maker.copy(array))
    assert described(got) == described(torch.from_numpy(array))
    assert described(maker(array)) == described(got)
    array.fill(1)
    assert got.numpy().tolist() == values.astype(dtype).tolist()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3), (4, 4, 4)])
def test_it_is_aligned_as_torchs_own(shape: tuple[int, ...], order: Any) -> None:
    """Its first byte is: 64 such tensors would hardly be so by chance."""
    maker, array = maker_of("f4"), np.zeros(shape, np.float32, order=order)
    tensors = [maker(maker.copy(array)) for _ in range(64)]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_in_inference_mode() -> None:
    """There it is an inference tensor, as that of an array is."""
    maker, array = maker_of("f4"), np.zeros(3, np.float32)
    with torch.inference_mode():
        assert maker(maker.copy(array)).is_inference()
        assert torch.from_numpy(array).is_inference()


def test_what_a_user_does_with_it() -> None:
    """It takes gradients, can be written to, and is pickled alone."""
    maker = maker_of("f4")
    tensor = maker(maker.copy(np.arange(3, dtype=np.float32)))
    tensor += 1
    tensor.requires_grad_()
    (tensor * tensor).sum().backward()
    assert tensor.grad.tolist() == [2, 4, 6]
    again = pickle.loads(pickle.dumps(tensor))
    assert (again.tolist(), again.untyped_storage().nbytes()) == ([1, 2, 3], 12)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.detach().resize_(99)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    """A tensor of nothing has the strides that torch gives it."""
    maker = maker_of("f4")
    got, want = maker(maker.copy(np.empty(shape, np.float32))), torch.empty(shape)
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_it_frees_its_bytes(traced: Any) -> None:
    """The bytes live until the last view is gone, in whichever thread that is."""
    maker, array = maker_of("u1"), np.zeros(LARGE, np.uint8)
    before = traced()
    views = [maker(maker.copy(array))[5:].numpy()[1:]]
    assert traced() - before > LARGE
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert traced() - before < LARGE


def test_bytes_without_a_tensor_are_freed(traced: Any) -> None:
    """So are those of a capsule that is dropped, or that torch refuses."""
    array = np.zeros(LARGE, np.uint8)
    before = traced()

    def refuse(capsule: object) -> Any:
        raise ValueError(str(capsule))

    maker = TensorMaker(torch.from_numpy, refuse, array.dtype)
    for _ in range(3):
        maker.copy(array)
        with pytest.raises(ValueError, match="dltensor"):
            maker(maker.copy(array))
    assert traced() - before < LARGE


def test_a_capsule_makes_one_tensor() -> None:
    """Its bytes have one owner."""
    maker = maker_of("f4")
    capsule = maker.copy(np.ones(3, np.float32))
    tensor = maker(capsule)
    with pytest.raises((RuntimeError, ValueError, BufferError)):
        maker(capsule)
    del capsule
    assert tensor.tolist() == [1, 1, 1]


def test_what_it_refuses() -> None:
    """No numbers, foreign byte order; arrays that are not contiguous, or of another size."""
    for dtype in ("S3", "M8[s]", "V8", ">f4", "O"):
        with pytest.raises(ValueError, match="no DLPack"):
            TensorMaker(torch.from_numpy, torch.from_numpy, np.dtype(dtype))
    for array in (np.zeros(6, np.float32)[::2], np.zeros(3)):
        with pytest.raises(ValueError, match="another size, or not contiguous"):
            maker_of("f4").copy(array)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let `tensor_maker` try anew, here and afterwards."""
    codec.tensor_maker.cache_clear()
    yield
    codec.tensor_maker.cache_clear()


def refuse_all(capsule: object) -> Any:
    """Take no type at all."""
    raise BufferError(str(capsule))


def mistake(_capsule: object) -> Any:
    """Take a type for another one."""
    return torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("function", [None, refuse_all, mistake])
def test_a_torch_that_lacks_it(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the function, or if it refuses or mistakes a type, arrays come between."""
    if function is None:
        monkeypatch.delattr(torch._C, "_from_dlpack")
    else:
        monkeypatch.setattr(torch._C, "_from_dlpack", function)
    assert codec.tensor_maker(np.dtype(np.float32)) is torch.from_numpy
