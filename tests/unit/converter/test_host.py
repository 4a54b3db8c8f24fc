"""Immediate conversion: arrays and CPU tensors, in the caller."""

import weakref

import numpy as np
import pytest
from codec_batches import axes_behind
from converting import ARRAYS, FLOAT, UNTOUCHED, converter, lone, same_bits
from slots import writer_of
from travelling import Pair, Record

from cseq.converter.cuda import receive
from cseq.converter.host import Converter
from cseq.converter.output import cast_dtype, parse, resolve
from cseq.encoding import codec
from cseq.memory.arena import Arena

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


def test_a_callable_gets_every_array():
    """A callable is applied to every array, unchanged, and to nothing else."""
    batch = {"a": np.arange(3), "b": [np.array("x"), "text", torch.ones(1)], "c": Pair(1, None)}
    seen = lone(parse(lambda array: (array.dtype, array.shape), "float32"))(batch)
    assert seen["a"] == (np.dtype(int), (3,))
    assert seen["b"] == [(np.dtype("<U1"), ()), *batch["b"][1:]]
    assert seen["c"] is batch["c"]


def test_nesting_is_kept():
    """Tensors replace arrays in any nesting; all other leaves are the same objects."""
    rest = None, 1, 2.5, np.array(["a"]), object(), np.float64(3), b"name"
    record = Record((np.zeros((1, 1), np.uint8), *rest))
    pair = lone(FLOAT)({"pair": Pair(np.arange(2), [np.ones(1), record])})["pair"]
    ones, record = pair.right
    assert (type(pair), type(record)) == (Pair, Record)
    assert same_bits(pair.left, torch.tensor([0.0, 1.0]))
    assert same_bits(ones, torch.tensor([1.0]))
    assert same_bits(record.value[0], torch.zeros(1, 1))
    assert all(new is old for new, old in zip(record.value[1:], rest, strict=True))


def expected(array, cast):
    """Return what numpy makes of an array: the reference."""
    dtype = array.dtype.newbyteorder("=")
    if cast is not None and dtype.kind != "c":
        dtype = cast
    axes = axes_behind(array)
    made = np.empty([array.shape[axis] for axis in axes], dtype).transpose(np.argsort(axes))
    made[...] = array.astype(dtype)
    return made


def through_a_slot(batch, cast):
    """Send a batch along the path from a worker process."""
    arena = Arena()
    writer = writer_of(arena)
    writer.encoder.cast = cast
    record = writer.encoder.encode(batch)
    memory = arena.lend(writer.room.slot, sum(record), writer.room.capacity)
    return codec.decode(memory, record)


@pytest.mark.parametrize("name", [*ARRAYS, *UNTOUCHED])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16", None])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast:RuntimeWarning")
def test_arrays(name, dtype):
    """Numpy's cast says what an array becomes directly, by a slot and by a lane, if torch can."""
    array, output = (ARRAYS | UNTOUCHED)[name], parse("cpu", dtype)
    before = array.tobytes()
    here = lone(output)(array)
    there, leaf = lone(output)(through_a_slot([array, "leaf"], cast_dtype(output)))
    (sent,) = receive(converter(parse("cuda", dtype)).convert([array]))
    assert leaf == "leaf"
    if name in UNTOUCHED or not isinstance(here, torch.Tensor):
        assert here is sent is array
        np.testing.assert_array_equal(here, there)
        assert (type(here), here.dtype) == (type(there), there.dtype)
        assert name in UNTOUCHED or name == "longdouble"
        return
    assert same_bits(here, there)
    assert same_bits(sent, here)
    assert not array.size or sent.data_ptr() != array.ctypes.data
    if dtype != "bfloat16":
        want = expected(array, output.dtype)
        assert same_bits(here, torch.from_numpy(want.view(want.dtype.str)))
    here.fill_(1)
    assert array.flags.writeable or array.tobytes() == before


@pytest.mark.parametrize("name", [*ARRAYS, *UNTOUCHED])
@pytest.mark.parametrize("dtype", ["uint8", None])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_leaves_are_converted_one_by_one_to_the_same(name, dtype):
    """`leaf_for` of a type converts a fresh array to what `convert` gives."""
    made = Converter(resolve(parse("cpu", dtype)))
    array = through_a_slot((ARRAYS | UNTOUCHED)[name], cast_dtype(made.output))
    function = made.leaf_for(array.dtype) if type(array) is np.ndarray else made.convert
    got, want = array if function is None else function(array), made.convert(array)
    assert type(got) is type(want)
    assert got is want or same_bits(got, want)


def test_texts_of_any_length_stay_arrays():
    """An array of NumPy's `StringDType`, which has no byte orders, is kept."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy is older than StringDType")
    texts = np.array(["abc", "d" * 40], np.dtypes.StringDType())
    for dtype in ("float32", None, "bfloat16"):
        assert lone(parse("cpu", dtype))(texts) is texts
        assert receive(converter(parse("cuda", dtype)).convert(texts)) is texts
        assert Converter(parse("cpu", dtype)).leaf_for(texts.dtype) is None


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", None])
def test_no_copy(order, dtype):
    """An array of the right type is not copied: the tensor shares its memory."""
    array = np.zeros((3, 4), np.float32, order)
    tensor = lone(parse("cpu", dtype))(array)
    assert tensor.data_ptr() == array.ctypes.data
    tensor[1, 2] = 7
    assert array[1, 2] == 7


def test_the_array_lives_as_long_as_its_tensor():
    """A tensor, and each of its views, keeps the array below and thus the array's slot."""

    class Leased(np.ndarray):
        pass

    array = np.zeros(8, np.float32).view(Leased)
    gone = weakref.ref(array)
    view = lone(FLOAT)([array])[0][2:4].view(1, 2).numpy()
    del array
    assert gone() is not None
    del view
    assert gone() is None


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors():
    """CPU tensors of numbers are cast; complex, quantised and other devices' tensors are kept."""
    convert = lone(FLOAT)
    for tensor in (torch.arange(3), torch.ones(2, dtype=torch.float64), torch.tensor([True])):
        assert same_bits(convert(tensor), tensor.to(torch.float32))
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    elsewhere = torch.ones(2, dtype=torch.float64, device="meta")
    for tensor in (torch.ones(2), torch.ones(2) * 1j, quantised, elsewhere):
        assert convert(tensor) is tensor
    assert lone(parse("cpu", None))(tensor) is tensor


def test_bfloat16():
    """Torch casts to this type, which numpy lacks, both from arrays and from tensors."""
    convert = lone(parse("cpu", torch.bfloat16))
    values = np.array([1, 1 / 3, np.nan, -0.0, 3e38])
    assert same_bits(convert(values), torch.from_numpy(values).to(torch.bfloat16))
    assert same_bits(convert(torch.arange(300)), torch.arange(300).to(torch.bfloat16))
    assert convert(np.ones(2) * 1j).dtype == torch.complex128
