"""Stage 2: what out_type and dtype make of a batch, on the CPU and as if it were a device."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import subprocess
import sys
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import cseq
from cseq import codec, converter
from cseq.arena import Arena, Writer
from cseq.converter import (
    Converter,
    Counts,
    CudaConverter,
    Handle,
    Lane,
    Output,
    PageLocks,
    Receiver,
    cast_dtype,
    converter_kind,
    default_converters,
    for_test,
    pack,
    parse,
    receive,
    rehearse,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array: TypeAlias = np.ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")

FLOAT = parse("cpu", "float32")


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    """Let every test be the first to which something is said."""
    converter.say_once.cache_clear()
    yield
    converter.say_once.cache_clear()


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch impossible to import."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take CUDA away."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have two CUDA devices, not used yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("initialises CUDA"))


def same_bits(left: Any, right: Any) -> bool:
    """Compare tensors or arrays in type, shape, strides and every bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or (left.numel() and left.stride() != right.stride()):
            return False
        if left.dtype == torch.bfloat16:
            left, right = left.view(torch.int16), right.view(torch.int16)
        left, right = left.cpu().numpy(), right.cpu().numpy()
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return bool(same_kind and left.tobytes() == right.tobytes())


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out_type", "kind", "device"),
    [
        ("cuda", "cuda", "cuda"),
        ("cuda:1", "cuda", "cuda:1"),
        ("cuda:01", "cuda", "cuda:1"),
        ("cpu", "cpu", "cpu"),
        (None, "cpu", "cpu"),
        ("null", "null", "cpu"),
        (torch.device("cpu"), "cpu", "cpu"),
        (torch.device("cpu", 0), "cpu", "cpu"),
        (torch.device("cuda"), "cuda", "cuda"),
        (torch.device("cuda", 3), "cuda", "cuda:3"),
        (np.negative, "call", "cpu"),
        (torch.FloatTensor, "call", "cpu"),
    ],
)
def test_out_type(out_type: object, kind: str, device: str) -> None:
    """`out_type` is a device by name or by torch.device, 'null', None, or a callable."""
    output = parse(out_type, "float32")
    assert (output.kind, output.device) == (kind, device)
    assert output.use_cuda == (kind == "cuda")
    assert output.function is (out_type if kind == "call" else None)


@pytest.mark.parametrize(
    ("out_type", "error"),
    [
        ("gpu", ValueError),
        ("", ValueError),
        ("CUDA", ValueError),
        ("cuda:", ValueError),
        ("cuda:-1", ValueError),
        ("cuda:1 ", ValueError),
        ("cuda:1\n", ValueError),
        (torch.device("meta"), ValueError),
        (torch.float32, TypeError),
        (1, TypeError),
        (True, TypeError),
        (["cpu"], TypeError),
        (b"cpu", TypeError),
    ],
)
def test_bad_out_type(out_type: object, error: type[Exception]) -> None:
    """An unknown `out_type` is refused: the error has argument, value and remedy."""
    with pytest.raises(error, match=r"(?s)out_type is .*'cuda:1', 'cpu', 'null'") as caught:
        parse(out_type, "float32")
    assert repr(out_type) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "cast", "torch_dtype"),
    [
        ("float32", "float32", None),
        (np.dtype(">f8"), "float64", None),
        (np.float16, "float16", None),
        (float, "float64", None),
        (bool, "bool", None),
        ("uint8", "uint8", None),
        ("complex64", "complex64", None),
        (torch.int64, "int64", None),
        (torch.double, "float64", None),
        (torch.bfloat16, None, "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        (None, None, None),
    ],
)
def test_dtype(dtype: object, cast: str | None, torch_dtype: str | None) -> None:
    """`dtype` is a type of numbers in the words of Python, numpy or torch, or None."""
    output = parse("cpu", dtype)
    assert output.dtype == (None if cast is None else np.dtype(cast))
    assert output.torch_dtype == torch_dtype


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        ("float31", ValueError),
        ("", ValueError),
        ("(1,", ValueError),
        ("O", ValueError),
        (object, ValueError),
        (str, ValueError),
        ("S4", ValueError),
        ("datetime64[s]", ValueError),
        ("f4,f4", ValueError),
        (np.longdouble, ValueError),
        (torch.qint8, ValueError),
        (3, TypeError),
        (True, TypeError),
    ],
)
def test_bad_dtype(dtype: object, error: type[Exception]) -> None:
    """A `dtype` that no tensor of numbers can have is refused: argument, value and remedy."""
    with pytest.raises(error, match=r"dtype is .*'float32'.*None") as caught:
        parse("cpu", dtype)
    assert repr(dtype) in str(caught.value)


def test_arguments_do_not_import_torch() -> None:
    """Checking the arguments imports no torch, nor does making what needs none."""
    script = (
        "import sys; from cseq.converter import *;"
        "[parse(o, d) for o in ('cuda:1', 'cpu', None) for d in ('float32', 'bfloat16', None)];"
        "c = Converter(resolve(parse('null', 'float32'))); c.convert([1]);"
        "c = Converter(resolve(parse(len, 'float32'))); c.convert([1]);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"False"]


def test_an_output_can_be_sent() -> None:
    """An output reaches another process as it is."""
    for out_type in ("cuda:1", "cpu", "null", np.negative):
        output = parse(out_type, "bfloat16")
        assert pickle.loads(pickle.dumps(output)) == output


def test_compat() -> None:
    """CUDA conversion is in threads where compat says so, and on Windows unless it says no."""
    assert converter_kind(None, "nt") == "thread"
    assert converter_kind(None, "posix") == "process"
    for name in ("nt", "posix"):
        assert converter_kind(True, name) == "thread"
        assert converter_kind(False, name) == "process"


def test_number_of_converters() -> None:
    """A quarter of the workers convert, but four do as long as there are as many workers."""
    assert [default_converters(n) for n in (1, 2, 3, 4, 5, 16, 19, 20, 64)] == [
        1, 2, 3, 4, 4, 4, 4, 5, 16,
    ]  # fmt: skip


def test_test_modes() -> None:
    """Test mode gives the same, CPU tensors, or what the indexer returned."""
    for out_type in ("cuda:1", "cpu", "null", np.negative):
        output = parse(out_type, "float64")
        assert for_test(output, "default") is output
        assert for_test(output, "cpu") == parse("cpu", "float64")
        assert for_test(output, "numpy").kind == "null"
    with pytest.raises(ValueError, match="test_mode is 'torch': give one of 'default', 'cpu'"):
        for_test(FLOAT, "torch")


def test_what_workers_cast_to() -> None:
    """Workers cast for tensors, and for arrays in the place of tensors; else nothing is cast."""
    assert cast_dtype(parse("cuda", "float16")) == np.float16
    assert cast_dtype(parse("cpu", "float16")) == np.float16
    assert cast_dtype(FLOAT._replace(kind="array")) == np.float32
    assert cast_dtype(parse("null", "float16")) is None
    assert cast_dtype(parse(np.negative, "float16")) is None
    assert cast_dtype(parse("cpu", "bfloat16")) is None
    assert cast_dtype(parse("cpu", None)) is None


# -- the machine --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("out_type", ["cuda", "cuda:7", "cpu", None])
def test_without_torch(out_type: object, caplog: pytest.LogCaptureFixture) -> None:
    """Without torch, what needs it gives arrays of the same values; this is said once."""
    with caplog.at_level(logging.INFO, "cseq"):
        outputs = [resolve(parse(out_type, "float32")) for _ in range(3)]
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "torch is not installed" in caplog.text
    assert not outputs[0].use_cuda
    text = np.array(["a", "b"])
    images, names = Converter(outputs[0]).convert((np.arange(3), text))
    assert same_bits(images, np.array([0, 1, 2], np.float32))
    assert names is text


@pytest.mark.usefixtures("no_torch")
def test_without_torch_none_keeps_arrays() -> None:
    """Without torch, arrays keep their type where tensors would have kept it."""
    array = np.arange(3)
    for dtype in (None, "bfloat16"):
        assert Converter(resolve(parse("cpu", dtype))).convert(array) is array


def test_a_broken_torch_is_no_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported because of something else is an error."""

    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'sympy', needed by {name}", name="sympy")

    monkeypatch.setattr("cseq.converter.imported", fail)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        resolve(FLOAT)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda(caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA, 'cuda' gives CPU tensors and use_cuda is False; this is said once."""
    with caplog.at_level(logging.INFO, "cseq"):
        for out_type in ("cuda", "cuda:7", torch.device("cuda", 1)):
            assert resolve(parse(out_type, "float32")) == FLOAT
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "CUDA is not available" in caplog.text


@pytest.mark.usefixtures("two_cards")
def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """'cuda' is the device that is current in the thread that starts; others must exist."""
    assert resolve(parse("cuda", None)).device == "cuda:0"
    assert resolve(parse("cuda:1", None)).device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    once = resolve(parse("cuda", None))
    assert once.use_cuda
    assert once.device == "cuda:1"
    assert resolve(once) == once
    with pytest.raises(ValueError, match=r"'cuda:2', but .* 2 in number, .* number below 2"):
        resolve(parse("cuda:2", None))


@pytest.mark.usefixtures("no_torch")
def test_what_needs_no_torch_is_left() -> None:
    """'null' and callables do not look for torch."""
    for out_type in ("null", np.negative):
        output = parse(out_type, None)
        assert resolve(output) is output


# -- one batch, at once -------------------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple in a batch."""

    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    """A dataclass in a batch."""

    image: Any
    name: Any


def lone(output: Output) -> Callable[[object], Any]:
    """Make the function that converts one batch."""
    return Converter(resolve(output)).convert


def test_null_is_the_identity() -> None:
    """'null' returns the very batch of the indexer."""
    for batch in (np.arange(3), (1, [np.arange(2)]), None, object()):
        assert lone(parse("null", "float32"))(batch) is batch


def test_a_callable_gets_every_array() -> None:
    """A callable is applied to every array as it is, and to nothing else."""
    batch: dict[str, Any] = {
        "a": np.arange(3),
        "b": [np.array("x"), "text", torch.ones(1)],
        "c": Pair(1, None),
    }
    seen = lone(parse(lambda array: (array.dtype, array.shape), "float32"))(batch)
    assert seen["a"] == (np.dtype(int), (3,))
    assert seen["b"][0] == (np.dtype("<U1"), ())
    assert seen["b"][1:] == batch["b"][1:]
    assert seen["c"] is batch["c"]


def test_nesting_is_kept() -> None:
    """Tensors take the place of arrays in any nesting; all other leaves are the same objects."""
    text, other = np.array(["a"]), object()
    batch: dict[str, Any] = {
        "pair": Pair(np.arange(2), [np.ones(1), "word"]),
        "sample": Sample(np.zeros((1, 1), np.uint8), b"name"),
        "rest": (None, 1, 2.5, text, other, np.float64(3)),
    }
    got = lone(FLOAT)(batch)
    assert type(got["pair"]) is Pair
    assert same_bits(got["pair"].left, torch.tensor([0.0, 1.0]))
    assert same_bits(got["pair"].right[0], torch.tensor([1.0]))
    assert got["pair"].right[1] == "word"
    assert type(got["sample"]) is Sample
    assert same_bits(got["sample"].image, torch.zeros(1, 1))
    assert got["sample"].name == b"name"
    assert all(new is old for new, old in zip(got["rest"], batch["rest"], strict=True))


def read_only(array: Array) -> Array:
    """Make an array read-only."""
    array.flags.writeable = False
    return array


RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "float32": RNG.random((3, 4), np.float32),
    "float64": RNG.random((3, 4)),
    "float16": RNG.random((3, 4)).astype(np.float16),
    "uint8": RNG.integers(0, 255, (3, 4), np.uint8),
    "uint64": RNG.integers(0, 2**64, (3, 4), np.uint64),
    "int64": RNG.integers(-(2**62), 2**62, (3, 4)),
    "bool": RNG.random((3, 4)) > 0.5,
    "complex128": RNG.random((3, 4)) + 1j,
    "longdouble": RNG.random((3, 4)).astype(np.longdouble),
    "big endian": RNG.random((3, 4)).astype(">f4"),
    "big endian integers": np.arange(12).astype(">i2"),
    "read-only": read_only(RNG.random((3, 4), np.float32)),
    "read-only of another type": read_only(RNG.random((3, 4))),
    "backwards": RNG.random((3, 4), np.float32)[::-1, ::-2],
    "repeated": np.broadcast_to(np.float32(1.5), (3, 4)),
    "columns": RNG.random((3, 4), np.float32)[:, 1:3],
    "Fortran": np.asfortranarray(RNG.random((3, 4, 5), np.float32)),
    "Fortran of another type": np.asfortranarray(RNG.random((3, 4, 5))),
    "transposed images": RNG.random((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2),
    "no dimensions": np.array(2.5),
    "no dimensions, ready": np.array(2.5, np.float32),
    "empty": np.empty((0, 3), np.float32),
    "empty of another type": np.empty((4, 0)),
    "field of packed records": np.zeros(4, "u1,f4")["f1"],
    "special": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-50, 1 / 3]),
}
UNTOUCHED: dict[str, Any] = {
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a", b"bc"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "objects": np.array([None, 1], object),
    "records": np.zeros(4, "u1,f4"),
    "masked": np.ma.array([1.0, 2.0], mask=[True, False]),
}


def expected(array: Array, cast: Dtype | None) -> Array:
    """Say what numpy makes of an array: the reference."""
    dtype = array.dtype.newbyteorder("=")
    if cast is not None and dtype.kind != "c":
        dtype = cast
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return np.asarray(array.astype(dtype), order="F" if fortran else "C")


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", None])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_arrays(name: str, dtype: str | None) -> None:
    """An array becomes the tensor of what numpy casts it to, in C or in its Fortran order."""
    array = ARRAYS[name]
    before = array.tobytes()
    got = lone(parse("cpu", dtype))(array)
    if name == "longdouble" and dtype is None:
        assert got is array
        return
    assert isinstance(got, torch.Tensor)
    assert same_bits(got, torch.from_numpy(expected(array, parse("cpu", dtype).dtype)))
    got.fill_(1)
    if not array.flags.writeable:
        assert array.tobytes() == before


@pytest.mark.parametrize("name", UNTOUCHED)
def test_untouched_arrays(name: str) -> None:
    """Arrays of kinds that torch lacks are kept as they are."""
    for dtype in ("float32", None, "bfloat16"):
        assert lone(parse("cpu", dtype))(UNTOUCHED[name]) is UNTOUCHED[name]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", None])
def test_no_copy(order: Any, dtype: str | None) -> None:
    """An array that has the type already is not copied: the tensor lies on its memory."""
    array = np.zeros((3, 4), np.float32, order)
    tensor = lone(parse("cpu", dtype))(array)
    assert tensor.data_ptr() == array.ctypes.data
    tensor[1, 2] = 7
    assert array[1, 2] == 7


def test_the_array_lives_as_long_as_its_tensor() -> None:
    """A tensor, and any view of it, keeps the array under it, and with it the array's slot."""

    class Leased(np.ndarray):
        pass

    array = np.zeros(8, np.float32).view(Leased)
    gone = weakref.ref(array)
    view = lone(FLOAT)([array])[0][2:4].view(1, 2).numpy()
    del array
    assert gone() is not None
    del view
    assert gone() is None


def through_a_slot(batch: Any, cast: Dtype | None) -> Any:
    """Send a batch the way it comes from a worker process."""
    arena = Arena()
    slot = arena.acquire()
    writer = Writer(arena.segment.fd, arena.segment.width)
    writer.begin(slot, arena.capacity(slot))
    record = codec.encode(batch, writer, cast)
    memory = arena.lend(slot, record.used, writer.capacity)
    writer.close()
    arena.close()
    return codec.decode(memory, record)


@pytest.mark.parametrize("name", [*ARRAYS, *UNTOUCHED])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16", None])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_in_processes_as_at_once(name: str, dtype: str | None) -> None:
    """A batch that came through a slot becomes the same as one that did not, strides and all."""
    output = resolve(parse("cpu", dtype))
    convert, array = Converter(output).convert, (ARRAYS | UNTOUCHED)[name]
    for batch in (array, [array, "leaf"]):
        here, there = convert(batch), convert(through_a_slot(batch, cast_dtype(output)))
        if isinstance(batch, list):
            assert here[1] == there[1]
            here, there = here[0], there[0]
        if isinstance(here, torch.Tensor):
            assert same_bits(here, there)
        else:
            np.testing.assert_array_equal(here, there)
            assert (type(here), here.dtype) == (type(there), there.dtype)


def test_tensors_in_processes_as_at_once() -> None:
    """A tensor that came through a slot becomes the same as one that did not."""
    for dtype in ("float32", "int16", "bfloat16", None):
        output = resolve(parse("cpu", dtype))
        convert = Converter(output).convert
        for tensor in (torch.rand(3, 4), torch.arange(4), torch.rand(2) * 1j, torch.ones(0).half()):
            assert same_bits(convert(tensor), convert(through_a_slot(tensor, cast_dtype(output))))


@given(
    npst.arrays(
        st.one_of(npst.floating_dtypes(), npst.integer_dtypes(), npst.boolean_dtypes()),
        npst.array_shapes(min_dims=0, min_side=0, max_side=5),
    ),
    st.sampled_from(["float16", "float32", "float64", "int32", "bool"]),
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_cast_here_or_in_a_worker(array: Array, dtype: str) -> None:
    """A batch has the same bits, whether a worker cast it into a slot or the converter did."""
    convert = lone(parse("cpu", dtype))
    slot = np.empty(array.shape, dtype)
    np.copyto(slot, array, casting="unsafe")
    assert same_bits(convert(array), convert(slot))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors() -> None:
    """CPU tensors of numbers are cast; complex, quantised and other devices' ones are kept."""
    convert = lone(FLOAT)
    for tensor in (torch.arange(3), torch.ones(2, dtype=torch.float64), torch.tensor([True])):
        assert same_bits(convert(tensor), tensor.to(torch.float32))
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    elsewhere = torch.ones(2, dtype=torch.float64, device="meta")
    for tensor in (torch.ones(2), torch.ones(2) * 1j, quantised, elsewhere):
        assert convert(tensor) is tensor
    assert lone(parse("cpu", None))(tensor) is tensor


def test_bfloat16() -> None:
    """A type that numpy lacks is cast to by torch, arrays and tensors alike."""
    convert = lone(parse("cpu", torch.bfloat16))
    values = np.array([1, 1 / 3, np.nan, -0.0, 3e38])
    assert same_bits(convert(values), torch.from_numpy(values).to(torch.bfloat16))
    assert same_bits(convert(torch.arange(300)), torch.arange(300).to(torch.bfloat16))
    assert convert(np.ones(2) * 1j).dtype == torch.complex128


# -- on a lane ----------------------------------------------------------------------------------


class Mark:
    """An event of which the test says when it is passed."""

    def __init__(self, journal: list[Any]) -> None:
        self.passed = False
        self.journal = journal

    def query(self) -> bool:
        """Tell what the test said."""
        return self.passed

    def synchronize(self) -> None:
        """Note the wait, and pass."""
        self.journal.append("wait on the host")
        self.passed = True


class SlowLane(Lane):
    """A device that takes its time, and writes down what it is asked to do."""

    def __init__(self) -> None:
        self.journal: list[Any] = []
        self.marks: list[Mark] = []
        self.inside = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Note who is inside."""
        self.inside = True
        yield
        self.inside = False

    def send(self, tensor: Any) -> Any:
        """Copy."""
        assert self.inside
        self.journal.append(tensor.data_ptr())
        return super().send(tensor)

    def record(self) -> Mark:
        """Make a mark that is not passed."""
        assert self.inside
        self.marks.append(Mark(self.journal))
        return self.marks[-1]

    def join(self, event: Any, tensors: list[Any]) -> None:
        """Note it."""
        assert not self.inside
        self.journal.append(("join", event, tensors))

    def collect(self) -> None:
        """Note it."""
        self.journal.append("collect")


class Source(np.ndarray):
    """An array that can be watched."""


def watched(size: int) -> tuple[Array, weakref.ref[Array]]:
    """Make an array in page-locked memory, so to speak, and watch it."""
    array = np.arange(size, dtype=np.float32).view(Source)
    return array, weakref.ref(array)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16", None])
@pytest.mark.parametrize("name", [*ARRAYS, *UNTOUCHED])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_lane_gives_the_same(name: str, dtype: str | None) -> None:
    """A converter with a lane gives what conversion at once gives, on memory of its own."""
    array = (ARRAYS | UNTOUCHED)[name]
    output = parse("cuda", dtype)
    at_once = lone(for_test(output, "cpu"))(array)
    got = receive(CudaConverter(rehearse(output)).convert([array]))[0]
    if at_once is array:
        assert got is array
        return
    assert same_bits(got, at_once)
    assert not array.size or got.data_ptr() != array.ctypes.data


def test_tensors_on_a_lane() -> None:
    """CPU tensors travel as arrays do, in their own memory order; the indexer's are not touched."""
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.eye(3, dtype=torch.float64).to_sparse()
    batch = {"a": images, "b": torch.arange(4)[::2], "c": torch.ones(2, requires_grad=True)}
    batch |= {"d": torch.ones(2, device="meta"), "e": "text", "f": sparse}
    got: Any = receive(CudaConverter(rehearse(FLOAT)).convert(batch))
    assert same_bits(got["a"], images)
    assert got["a"].data_ptr() != images.data_ptr()
    assert same_bits(got["b"], torch.tensor([0.0, 2.0]))
    assert same_bits(got["c"], torch.ones(2))
    assert not got["c"].requires_grad
    assert got["d"] is batch["d"]
    assert got["e"] == "text"
    assert got["f"].dtype == torch.float32
    assert torch.equal(got["f"].to_dense(), torch.eye(3))


def test_what_the_device_can_fetch_is_not_copied_before() -> None:
    """An array in page-locked memory, of the right type, is copied from where it lies."""
    lane = SlowLane()
    array = np.zeros((3, 4), np.float32)
    CudaConverter(rehearse(FLOAT), lane).convert(array)
    assert lane.journal == [array.ctypes.data]


def test_what_the_device_cannot_fetch_is_staged() -> None:
    """An array in ordinary memory passes through page-locked memory."""

    class Ordinary(SlowLane):
        def can_fetch(self, tensor: Any) -> bool:
            return False

    lane = Ordinary()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    result: Any = CudaConverter(rehearse(FLOAT), lane).convert(array)
    assert lane.journal != [array.ctypes.data]
    assert same_bits(result.batch, torch.from_numpy(array))


def test_memory_is_kept_until_it_was_copied() -> None:
    """What a copy reads is kept until the copy is done, also when the batch is thrown away."""
    lane = SlowLane()
    cuda = CudaConverter(rehearse(FLOAT), lane)
    first, first_gone = watched(3)
    second, second_gone = watched(4)
    cuda.convert([first])
    cuda.convert([second])
    del first, second
    lane.marks[1].passed = True
    cuda.reap()
    assert first_gone() is not None  # in the order of the lane: the first is not done
    lane.marks[0].passed = True
    cuda.convert("nothing to send")
    assert first_gone() is None
    assert second_gone() is None
    assert "wait on the host" not in lane.journal


def test_memory_is_kept_after_an_error() -> None:
    """An error in the middle of a batch does not let go of what is being copied."""

    class Full(SlowLane):
        def send(self, tensor: Any) -> Any:
            if len(tensor) == 4:
                raise RuntimeError("out of memory")
            return super().send(tensor)

    lane = Full()
    cuda = CudaConverter(rehearse(FLOAT), lane)
    first, first_gone = watched(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda.convert([first, np.zeros(4, np.float32)])
    del first
    assert first_gone() is not None
    cuda.close()
    assert first_gone() is None


def test_a_pause_waits_for_the_copies() -> None:
    """Before it pauses, and when it closes, a converter waits and keeps nothing."""
    for stop in (lambda cuda: cuda.reap(wait=True), CudaConverter.close):
        lane = SlowLane()
        cuda = CudaConverter(rehearse(FLOAT), lane)
        array, gone = watched(3)
        cuda.convert(array)
        del array
        stop(cuda)
        assert gone() is None
        assert "wait on the host" in lane.journal


def test_the_consumer_waits_on_the_device() -> None:
    """The consumer joins the lane with every tensor of the batch, and does not wait itself."""
    lane = SlowLane()
    batch = {"a": np.arange(2), "b": [np.ones(1), 1]}
    transfer = CudaConverter(rehearse(FLOAT), lane).convert(batch)
    lane.journal.clear()
    got: Any = receive(transfer)
    assert len(lane.journal) == 1
    verb, event, tensors = lane.journal[0]
    assert (verb, event) == ("join", lane.marks[0])
    assert [id(tensor) for tensor in tensors] == [id(got["a"]), id(got["b"][0])]


def test_other_results_are_received_as_they_are() -> None:
    """What is no transfer is a batch already."""
    for batch in (np.arange(3), (1, 2), None):
        assert receive(batch) is batch


def test_a_cuda_lane_asks_torch_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer's stream waits for the event, and every tensor is recorded on that stream."""
    journal: list[Any] = []

    class Stream:
        def __init__(self, device: object = None) -> None:
            self.device = device

        def wait_event(self, event: object) -> None:
            journal.append(("wait", self.device, event))

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            journal.append(("record", stream.device))

    class Tensor:
        def record_stream(self, stream: Stream) -> None:
            journal.append(("use", stream.device))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(("current", device)))
    lane = converter.CudaLane("cuda:1")
    event = lane.record()
    lane.join(event, [Tensor(), Tensor()])
    device = torch.device("cuda:1")
    use = ("use", ("current", device))
    assert journal == [("record", device), ("wait", ("current", device), event), use, use]
    assert lane.pins


# -- page-locked memory -------------------------------------------------------------------------


class Runtime:
    """CUDA's runtime, as far as it page-locks memory."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Lock."""
        assert flags == 1
        if address in self.locked:
            return 712
        if not self.status:
            self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unlock."""
        if not self.status:
            del self.locked[address]
        return self.status


class Bytes:
    """Some mapped memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Take the place of CUDA's runtime."""
    fake = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    return fake


def test_memory_is_page_locked_once(runtime: Runtime) -> None:
    """A mapping is page-locked once, and unlocked when it is given up or all is closed."""
    locks = PageLocks("cuda:0")
    first: Any = Bytes(4096, 8192)
    second: Any = Bytes(65536, 4096)
    assert locks.register(first)
    assert locks.register(first)
    assert locks.register(second)
    assert runtime.locked == {4096: 8192, 65536: 4096}
    locks.unregister(first)
    locks.unregister(first)
    assert runtime.locked == {65536: 4096}
    locks.close()
    locks.close()
    assert runtime.locked == {}


def test_page_locked_memory_stays_mapped(runtime: Runtime) -> None:
    """A page-locked mapping is kept until it is unlocked."""
    memory: Any = Bytes(4096, 4096)
    gone = weakref.ref(memory)
    locks = PageLocks("cuda:0")
    locks.register(memory)
    del memory
    assert gone() is not None
    assert runtime.locked
    locks.close()
    assert gone() is None


def test_page_locking_may_fail(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that CUDA cannot page-lock is used all the same; said once, and no error is left."""
    left = []

    def ones(*shape: int, device: str) -> None:
        left.append((shape, device))
        raise RuntimeError("the error that was left behind")

    monkeypatch.setattr(torch, "ones", ones)
    runtime.status = 2
    locks = PageLocks("cuda:1")
    memory: Any = Bytes(4096, 4096)
    assert not locks.register(memory)
    assert not locks.register(memory)
    locks.close()
    assert left == [((1,), "cuda:1")] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "error 2" in caplog.text


# -- between processes --------------------------------------------------------------------------

STORE: dict[str, Any] = {}


def fetch(key: str) -> Any:
    """Open what another process has, so to speak."""
    if key not in STORE:
        raise RuntimeError(f"{key} is gone")
    return STORE[key][:]


@pytest.fixture
def store() -> Iterator[dict[str, Any]]:
    """Give the memory of the other process."""
    STORE.clear()
    yield STORE
    STORE.clear()


def test_packing_leaves_cpu_tensors() -> None:
    """Without CUDA tensors, a batch is packed as it is: the codec takes CPU tensors as they are."""
    batch = {"a": torch.ones(2), "b": [np.ones(1), "text"]}
    assert pack(batch, Counts()) is batch
    exported: Any = CudaConverter(rehearse(FLOAT)).export(batch)
    assert same_bits(exported["a"], torch.ones(2))
    assert same_bits(exported["b"][0], torch.ones(1))
    assert Receiver(rehearse(FLOAT)).unpack(exported) is exported


def test_exporting_waits_for_the_copies() -> None:
    """In a process the memory of a batch may be overwritten when it has been exported."""
    lane = SlowLane()
    cuda = CudaConverter(rehearse(FLOAT), lane)
    array, gone = watched(3)
    cuda.export([array])
    del array
    assert gone() is None
    assert lane.journal[-1] == "wait on the host"


def test_a_handle_is_small_and_can_be_sent(store: dict[str, Any]) -> None:
    """A handle is pickled as two words, whatever the size of its tensor."""
    store["x"] = torch.arange(1000)
    sent = pickle.dumps(Handle(fetch, ("x",)))
    assert len(sent) < 200
    assert same_bits(pickle.loads(sent).open(), torch.arange(1000))


def test_a_received_batch_is_the_consumers_own(store: dict[str, Any]) -> None:
    """A received tensor lies in memory of the consumer's process, in the same memory order."""
    store["x"] = torch.rand(3, 4).T
    store["y"] = torch.arange(3)
    before = store["x"].clone()
    receiver = Receiver(rehearse(FLOAT))
    batch: Any = receiver.unpack({"x": Handle(fetch, ("x",)), "z": [1, Handle(fetch, ("y",))]})
    store["x"].zero_()
    store["y"].zero_()
    assert same_bits(batch["x"], before)
    assert batch["z"][0] == 1
    assert same_bits(batch["z"][1], torch.arange(3))


def test_memory_of_the_other_process_is_let_go(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process's memory is let go when the copy is done, on the receiver's own lane."""
    gone: list[weakref.ref[Any]] = []

    class Opened:
        """A tensor of the other process."""

        def __init__(self, key: str) -> None:
            self.key = key
            gone.append(weakref.ref(self, lambda _: inside.append(lane.inside)))

        def clone(self) -> Any:
            return store[self.key].clone()

    monkeypatch.setattr(sys.modules[__name__], "fetch", Opened)
    inside: list[bool] = []
    lane = SlowLane()
    receiver = Receiver(rehearse(FLOAT), lane)
    store["x"] = torch.arange(3)
    first: Any = receiver.unpack([Handle(fetch, ("x",))])
    receiver.unpack([Handle(fetch, ("x",))])
    assert [ref() is None for ref in gone] == [False, False]
    assert lane.journal[0][:2] == ("join", lane.marks[0])
    assert lane.journal[0][2][0] is first[0]
    lane.marks[0].passed = True
    receiver.unpack([])
    assert [ref() is None for ref in gone] == [True, False]
    receiver.close()
    assert [ref() is None for ref in gone] == [True, True]
    assert inside == [True, True]


def test_a_lost_converter_is_an_error(store: dict[str, Any]) -> None:
    """A batch whose converter's process has ended cannot be received."""
    store["x"] = torch.arange(3)
    receiver = Receiver(rehearse(FLOAT))
    with pytest.raises(RuntimeError, match="gone"):
        receiver.unpack([Handle(fetch, ("x",)), Handle(fetch, ("lost",))])
    assert same_bits(receiver.unpack(Handle(fetch, ("x",))), torch.arange(3))


def test_a_given_up_batch_is_opened_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that nobody will see is opened, which is how its converter learns to let it go."""
    keys = []

    def note(key: str) -> Any:
        keys.append(key)
        if key == "lost":
            raise RuntimeError("gone")
        return object()

    monkeypatch.setattr(sys.modules[__name__], "fetch", note)
    batch = {"a": Handle(fetch, ("lost",)), "b": [Handle(fetch, ("x",)), 3]}
    Receiver(rehearse(FLOAT)).discard(batch)
    assert keys == ["lost", "x"]


def test_closing_collects() -> None:
    """A converter that closes asks torch to let go of what consumers have taken."""
    lane = SlowLane()
    CudaConverter(rehearse(FLOAT), lane).close()
    assert lane.journal == ["collect"]


def test_rehearsal_at_once() -> None:
    """Test mode of the rehearsed CUDA path gives the same tensors at once."""
    output = rehearse(parse("cuda", "float32"))
    assert resolve(output) is output
    assert same_bits(lone(output)([np.arange(3)])[0], torch.tensor([0.0, 1.0, 2.0]))


# -- whole managers -----------------------------------------------------------------------------


def make_worker() -> type:
    """Make a worker that is sent by value, so that workers need not import this file, and torch."""

    class Mixed:
        """Makes large arrays, arrays in the slot, and leaves that are not converted."""

        def __getitem__(self, indices: Any) -> Any:
            noise = cseq.rng().random((len(indices), 3, 50, 50))
            image = cseq.empty((len(indices), 7), np.uint8)
            image[...] = indices[:, None] % 251
            return {"arrays": [noise, image, indices], "names": [str(i) for i in indices]}

    return Mixed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
@pytest.mark.parametrize(
    ("kind", "compat"), [("MTSequence", None), ("MPSequence", True), ("MPSequence", False)]
)
def test_converters_without_a_device(
    kind: str, compat: bool | None, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converters in threads and in processes give what test mode gives; here, on the CPU."""
    monkeypatch.setattr(converter, "resolve", rehearse)
    made = []
    monkeypatch.setattr(
        "cseq.pools.thread.CudaConverter",
        lambda output: made.append(CudaConverter(output)) or made[-1],  # type: ignore[func-returns-value]
    )
    options: Any = {"batch_size": 16, "num_workers": 2, "num_converters": 1, "dtype": dtype}
    streams = []
    for parallel in (True, False):
        manager = getattr(cseq, kind)(make_worker(), 100, seed=3, out_type="cuda", **options)
        assert manager.use_cuda
        with manager.start(compat) if parallel else manager.start_test() as running:
            streams.append([batch for _ in range(2) for batch in running])
    assert len(made) == (compat is not False)  # in this process, or in another
    assert len(streams[0]) == 14
    for one, other in zip(*streams, strict=True):
        assert all(map(same_bits, one["arrays"], other["arrays"]))
        assert one["names"] == other["names"]
