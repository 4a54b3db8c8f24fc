"""Tensors arrive unchanged in a batch."""

import sys

import codec_batches
import numpy as np
import pytest
from codec_batches import FLOAT32, Feature, Sample, copied, reread, sent

from cseq.encoding import _codec
from cseq.encoding.codec import decode, map_leaves

way = codec_batches.way


@pytest.fixture(scope="session")
def torch():
    """Return torch, if it is installed."""
    return pytest.importorskip("torch")


TYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"


@pytest.mark.parametrize("name", TYPES.split())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(torch, name, shape):
    """CPU tensors of all types arrive unchanged, even of types that numpy lacks."""
    tensor = torch.arange(6).to(getattr(torch, name))[: int(np.prod(shape))].reshape(shape)
    for read in (copied(tensor), copied([tensor, np.zeros(2), "text"])[0]):
        assert type(read) is torch.Tensor
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert torch.equal(read, tensor)


# torch 2.12 warns of this.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_of_other_layouts(torch):
    """Transposed, strided, conjugated and sparse tensors keep their values."""
    base = torch.arange(24.0).reshape(4, 6)
    conjugated = torch.tensor([1 + 2j, 3j]).conj()
    batch = [base.T, base[::2, ::3], conjugated, conjugated.imag, base.to_sparse()]
    batch.append(base.expand(2, 4, 6))
    for tensor, read in zip(batch, copied(batch), strict=True):
        assert read.layout == tensor.layout
        assert torch.equal(read.to_dense(), tensor.to_dense())
    assert copied(base.T).stride() == base.T.stride()


def test_strides_of_tensors(torch, writer):
    """The order of axes is kept, even if only axes of one element show it; others become rows."""
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    one = torch.rand(2, 1, 4, 5).to(memory_format=torch.channels_last)
    mask = torch.rand(1, 10, 1, 10).expand(5, 10, 8, 10)
    brain = images.bfloat16()
    assert one.is_contiguous()
    for made in (tuple, lambda batch: Sample(batch[:2], batch[2:])):
        for cast in (None, np.dtype("f8"), FLOAT32):
            writer.room.used = 0
            batch = [images, mask, one, brain]
            read = reread(writer, made(batch), cast)
            read = read if isinstance(read, tuple) else read.image + read.label
            for sent_one, got in zip(batch, read, strict=True):
                is_row = sent_one is mask and made is tuple
                assert got.stride() == ((800, 80, 10, 1) if is_row else sent_one.stride())
                assert torch.equal(got, sent_one.to(got.dtype))


def test_tensors_keep_whether_they_require_gradients(torch):
    """A tensor that requires gradients arrives as a leaf that does; its graph stays behind."""
    leaf = torch.ones(3, requires_grad=True)
    read = copied([leaf, leaf * 2, leaf.detach()])
    assert [tensor.requires_grad for tensor in read] == [True, True, False]
    assert all(tensor.is_leaf for tensor in read)
    read[0].sum().backward()
    assert read[0].grad.tolist() == [1, 1, 1]
    assert type(copied(torch.nn.Parameter(leaf.detach()))) is torch.nn.Parameter


def test_tensors_in_objects_lie_in_the_slot(torch, writer):
    """For any object, the bytes of arrays and tensors are not pickled, and are read in place."""
    base = torch.arange(30_000.0)
    sparse = torch.zeros(3000).index_fill(0, torch.arange(0, 3000, 2), 1.0).to_sparse()
    feature = Feature(
        base=base, again=base, part=base[100:200], parameter=torch.nn.Parameter(base + 1),
        half=base.to(torch.bfloat16), turned=base.view(100, 300).T, sparse=sparse,
        array=np.arange(5000), small=torch.ones(3), none=torch.ones(0, 2), text="text",
    )  # fmt: skip
    for batch in (feature, [feature, np.zeros(2)], {"x": torch.ones(2), "f": feature}):
        writer.room.used = 0
        record = writer.encoder.encode(batch)
        assert record[3] < 5000
        read = decode(writer.room.memory, record)
        got = read if batch is feature else read[0] if type(read) is list else read["f"]
        assert type(got) is Feature
        assert list(got) == list(feature)
        start = writer.room.memory.address
        for name in ("base", "parameter", "half", "turned"):
            value, sent = got[name], feature[name]
            assert type(value) is type(sent)
            assert (value.dtype, value.stride()) == (sent.dtype, sent.stride())
            assert torch.equal(value, sent)
            assert value.requires_grad == sent.requires_grad
            assert start <= value.data_ptr() < start + writer.room.used
        assert start <= got["array"].ctypes.data < start + writer.room.used
        assert np.array_equal(got["array"], feature["array"])
        assert torch.equal(got["sparse"].to_dense(), sparse.to_dense())
        assert (got["small"].tolist(), got["none"].shape) == ([1, 1, 1], (0, 2))
        # One object stays one; a part has its own memory.
        assert got["again"] is got["base"]
        got["base"][150] = -1
        assert got["part"][50] == 150
        got["array"][0] = -1
        got["small"][0] = -1
        assert base[150] == 150


def test_what_lies_in_the_slot_is_not_copied_for_an_object(torch, writer):
    """It covers arrays, tensors, and parts of them that do not overlap."""
    x = writer.room.empty((50, 30), np.float32)
    x[:] = 7
    y = writer.room.empty(500, np.int64)
    feature = Feature(x=torch.from_numpy(x), first=y[:250], last=y[250:])
    before = writer.room.used
    read = decode(writer.room.memory, writer.encoder.encode(feature))
    assert writer.room.used - before < 1500
    assert read["x"].data_ptr() == x.ctypes.data
    assert read["last"].ctypes.data == y.ctypes.data + 2000
    overlapping = decode(writer.room.memory, writer.encoder.encode(Feature(all=y, part=y[10:300])))
    assert not np.shares_memory(overlapping["all"], overlapping["part"])


def test_a_part_of_a_large_tensor_travels_alone(torch, writer):
    """It holds in any object, and in lists of tensors."""
    large = torch.arange(100_000.0)
    for part in (large[5:9], large.to(torch.bfloat16)[5:9], large.requires_grad_()[5:9]):
        for batch in (Sample(part), {0: part}, [part, "text"], Feature(x=part)):
            record = writer.encoder.encode(batch)
            assert sum(record[1:]) < 2000
            assert sum(record) - writer.room.used == 0
            read = decode(writer.room.memory, record)
            leaves = []
            map_leaves(leaves.append, dict(read) if type(read) is Feature else read)
            tensor = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            assert torch.equal(tensor, part)
            assert (tensor.dtype, tensor.requires_grad) == (part.dtype, part.requires_grad)
            assert tensor.untyped_storage().nbytes() == part.nbytes


def test_tensors_of_types_that_numpy_lacks_are_recognised(torch, way, writer, monkeypatch):
    """A batch of them is surveyed once, and differs from one of tensors of their bits."""
    half = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    bits = torch.arange(6, dtype=torch.int16).view(2, 3)
    for batch in ([half], [bits], [half]):
        assert torch.equal(sent(writer, batch)[0], batch[0])
    surveyed = []
    survey = _codec.plan_for
    monkeypatch.setattr(_codec, "plan_for", lambda *args: surveyed.append(1) or survey(*args))  # type: ignore[func-returns-value]
    for batch in ([half.T], [bits], [half]):
        read = sent(writer, batch)[0]
        assert read.dtype == batch[0].dtype
        assert torch.equal(read, batch[0])
    # The survey is of the transposed tensor.
    assert len(surveyed) == (3 if way == "surveyed" else 1)


# torch warns of quantised and nested tensors, and of storages.
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_in_objects(torch, monkeypatch):
    """Quantised, nested and conjugated tensors, and storages, arrive unchanged in objects."""
    # pickle searches all modules for an object without one, and RETURNN's lazy ones then import
    # more.
    lazy = [name for name, m in sys.modules.items() if type(m).__module__.startswith("returnn")]
    for name in lazy:
        monkeypatch.delitem(sys.modules, name)
    base = torch.arange(2000.0)
    feature = Feature(
        quantised=torch.quantize_per_tensor(base, 8.0, 0, torch.quint8),
        nested=torch.nested.nested_tensor([base[:500], base[:40]]),
        conjugated=base.to(torch.complex64).conj(),
        storage=base.untyped_storage(),
        typed=torch.FloatStorage([1.0] * 500),
    )
    got = copied(feature)
    assert torch.equal(got["quantised"].int_repr(), feature["quantised"].int_repr())
    for one, other in zip(got["nested"].unbind(), feature["nested"].unbind(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(got["conjugated"], feature["conjugated"])
    assert got["storage"].tolist() == feature["storage"].tolist()
    assert type(got["typed"]) is type(feature["typed"])
    assert got["typed"].tolist() == [1.0] * 500


def test_tensors_are_cast(torch):
    """Tensors of numbers are cast like torch casts them; complex ones are not."""
    batch = [torch.arange(3), torch.tensor([True]), torch.ones(2, dtype=torch.bfloat16)]
    batch.append(torch.ones(1) * 1j)
    read = copied(batch, FLOAT32)
    assert [tensor.dtype for tensor in read] == [torch.float32] * 3 + [torch.complex64]
    assert [tensor.tolist() for tensor in read] == [tensor.tolist() for tensor in batch]


def test_cuda_tensors_travel_by_handle(torch, writer, monkeypatch):
    """Those in objects do, too, and none goes through the host."""
    sent = []

    def reduce_tensor(tensor):
        sent.append(tensor)
        return torch.full, ((2,), int(tensor[0]))

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor[0] > 0))
    on_device, on_host = torch.arange(1, 4), torch.arange(3)
    nested = ["text", (on_device, {"y": on_device})]
    for batch in (on_device, {"x": on_device}, nested, (on_host, [on_device])):
        sent.clear()
        got = decode(writer.room.memory, writer.encoder.encode(batch))
        assert len(sent) == 1
        assert repr(got) == repr(batch).replace("tensor([1, 2, 3])", "tensor([1, 1])")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors(torch, grad):
    """Tensors of tensors of unequal size keep their type, next to other tensors."""
    parts = [torch.ones(2), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(parts, requires_grad=grad)
    for got in (copied(nested), copied({"x": torch.ones(2), "nested": nested})["nested"]):
        assert got.is_nested
        assert got.layout == nested.layout
        assert got.requires_grad == grad
        assert all(map(torch.equal, got.unbind(), parts))


@pytest.mark.parametrize("nbytes", [0, 12, 100_000])
def test_storages(torch, nbytes):
    """Torch's storages keep their type, and are writable."""
    storage = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8).untyped_storage()
    beside = copied({"x": torch.ones(2), "s": storage, "text": "a"})["s"]
    for got in (copied(storage), copied([storage])[0], beside):
        assert type(got) is torch.UntypedStorage
        assert got.tolist() == storage.tolist()
        got.fill_(3)
        assert set(got.tolist()) <= {3}
    assert 3 not in storage.tolist()[:3]
