"""A batch that was laid into a slot and read again is the batch."""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from slots import writer_of

from cseq import codec
from cseq._memory import Block
from cseq._plan import REMEMBERED
from cseq.arena import Arena
from cseq.codec import Record, castable, decode, encode, map_leaves, used
from cseq.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLOAT32 = np.dtype(np.float32)


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Marked(collections.namedtuple("Marked", "x y")):  # noqa: PYI024 - has a __dict__
    """A named tuple with room for more."""

    note: str


@dataclass
class Sample:
    """A dataclass, which counts how often it was made."""

    image: Any
    label: Any = None
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be changed."""

    image: Any
    label: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    image: Any
    label: Any = None


@dataclass(slots=True)
class Loose:
    """A dataclass without a dictionary, and without defaults."""

    image: Any
    label: Any


@dataclass
class Keyed(dict[str, Any]):
    """A dataclass that is a dict as well."""

    image: Any = None


@dataclass
class Secretive:
    """A dataclass that says itself how it is pickled."""

    image: Any
    secret: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"image": self.image, "secret": "hidden"}


class Colour(Enum):
    """An enumeration."""

    RED = 1


class StrKey(str):
    """A text that is more than a text."""

    __slots__ = ()


class Plain:
    """Any object with an array."""

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.fixture(scope="module", params=["known", "surveyed"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with structures that the writer knows, and with none."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "surveyed":
            patch.setattr(Writer, "remember", lambda *_: None)
        yield request.param


def copied(batch: Any, cast: np.dtype[Any] | None = None) -> Any:
    """Send a batch through a slot of its own: what a second one of this structure becomes."""
    arena = Arena()
    writer = writer_of(arena)
    try:
        encode(batch, writer, cast)
        writer.used = 0
        record = encode(batch, writer, cast)  # first: it may get the writer another memory
        return decode(writer.memory, record)
    finally:
        writer.close()
        arena.close()


def sent(writer: Writer, batch: Any, cast: np.dtype[Any] | None = None) -> Any:
    """Send a batch through the slot at hand, from its beginning."""
    writer.used = 0
    record = encode(batch, writer, cast)
    assert used(record) == record.used == writer.used
    assert len(record) <= 6
    return decode(writer.memory, record)


def reread(writer: Writer, batch: Any, cast: np.dtype[Any] | None = None) -> Any:
    """Send a batch through the slot at hand, behind what lies there."""
    record = encode(batch, writer, cast)
    return decode(writer.memory, record)


def assert_same(a: Any, b: Any) -> None:
    """Compare types, structure, order and bits."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert_same_arrays(a, b)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert repr(a) == repr(b)  # not the bytes: a long double has some that mean nothing
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        assert_same(list(a.values()), list(b.values()))
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif dataclasses.is_dataclass(a):
        for name in [f.name for f in dataclasses.fields(a)]:
            assert_same(getattr(a, name), getattr(b, name))
    else:
        assert repr(a) == repr(b)  # tells -0.0 from 0.0, and takes NaN for equal


def assert_same_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    """Compare type, shape, order and bits."""
    assert a.dtype == b.dtype
    assert a.dtype.str == b.dtype.str
    assert a.shape == b.shape
    if a.dtype.names:  # there may be anything in the gaps between fields
        assert repr(a.tolist()) == repr(b.tolist())
    else:
        assert a.tobytes() == b.tobytes()
    assert b.flags.writeable
    assert b.flags.aligned
    contiguous = a.flags.c_contiguous or a.flags.f_contiguous
    assert b.flags.c_contiguous == (a.flags.c_contiguous or not contiguous) or not a.size
    assert b.flags.f_contiguous == a.flags.f_contiguous or not contiguous or not a.size


# -- what batches there are ---------------------------------------------------------------------

dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(),
    npst.datetime64_dtypes(),
    npst.timedelta64_dtypes(),
    npst.byte_string_dtypes(max_len=4),
    npst.unicode_string_dtypes(max_len=4),
    st.just(np.dtype([("a", ">i2"), ("b", "f4", (2,)), ("c", "S3")])),
    st.just(np.dtype([("a", "u1"), ("b", "f8")], align=True)),
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of all types, shapes and orders."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = draw(dtypes)
    data = os.urandom(dtype.itemsize * int(np.prod(shape)))
    if dtype.kind in "bU":  # not all bytes are such values
        data = b"\1" * len(data) if dtype.kind == "b" else bytes(len(data))
    array = (
        np.frombuffer(data, np.uint8).view(dtype).reshape(shape) if data else np.zeros(shape, dtype)
    )
    layout = draw(st.sampled_from(["C", "F", "strided", "transposed", "read-only"]))
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "strided":
        array = array[..., ::2] if array.ndim else array
    elif layout == "transposed":
        array = array.T
    elif layout == "C":
        array = array.copy()
    return array


WIDE = np.dtype(np.longdouble).itemsize > 8  # elsewhere it becomes a float64, see below

scalars = st.sampled_from(
    [np.float32(1.5), np.float64("nan"), np.bool_(True), np.int8(-3), np.uint64(2**63),
     np.complex64(1j), np.float16(-0.0), np.datetime64("2020-01-01", "D"),
     np.timedelta64(3, "us"), np.str_("text"), np.bytes_(b"bytes"),
     *([np.longdouble(1) / 3] if WIDE else [])]
)  # fmt: skip
leaves = st.one_of(
    arrays(), scalars, st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.none(), st.booleans(), st.complex_numbers(), st.just(b"x" * codec.LONG),
    st.just(Colour.RED), st.just(range(3)), st.just({1, 2}), st.just(slice(1, None)),
)  # fmt: skip
keys = st.one_of(
    st.text(max_size=3),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0.0, 1.0, (1, "a"), None]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of batches."""
    few = st.lists(inner, max_size=4)
    mapping = st.dictionaries(st.text(max_size=3), inner, max_size=4)
    return st.one_of(
        few,
        few.map(tuple),
        mapping,
        mapping.map(OrderedDict),
        mapping.map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys, inner, max_size=4),
        *(st.builds(kind, inner, inner) for kind in (Pair, Sample, Frozen, Slotted)),
    )


batches = st.recursive(leaves, containers, max_leaves=12)


# -- there and back -----------------------------------------------------------------------------


@given(batch=batches)
@example(batch=())
@example(batch={})
@example(batch=[[], ({},)])
@example(batch={1: np.zeros(1), "a": 2})
@example(batch=(np.zeros(3), [np.float32(1), b"x" * codec.LONG, "text"], np.ones((2, 2))))
def test_round_trip(batch: Any) -> None:
    """What is read equals what was written, types, order and bits, and can be written to."""
    assert_same(batch, copied(batch))


@given(sequence=st.lists(batches, min_size=2, max_size=5), data=st.data())
def test_batches_do_not_depend_on_each_other(sequence: list[Any], data: st.DataObject) -> None:
    """Batches of whatever structure can be written and read in any order."""
    arena = Arena()
    written = []
    for batch in sequence + sequence[:1]:
        writer = writer_of(arena)
        written.append((batch, writer, encode(batch, writer)))
    for batch, writer, record in data.draw(st.permutations(written)):
        assert_same(batch, decode(writer.memory, record))
        writer.close()
    arena.close()


@given(
    sequence=st.lists(
        st.tuples(arrays(), st.sampled_from([None, FLOAT32, np.dtype("f8")])), max_size=6
    )
)
def test_arrays_alone_one_after_another(
    sequence: list[tuple[np.ndarray[Any, Any], np.dtype[Any] | None]],
) -> None:
    """An array is written right whatever array, and whatever cast, came before it."""
    arena = Arena()
    writer = writer_of(arena)
    for array, cast in [pair for pair in sequence for _ in range(2)]:
        with np.errstate(all="ignore"):
            wanted = array.astype(cast) if cast is not None and castable(array.dtype) else array
            assert_same_arrays(wanted, sent(writer, array, cast))
    writer.close()
    arena.close()


def test_arrays_alone_of_one_shape_and_several_layouts(writer: Writer) -> None:
    """An array like the last one but for its layout is written right."""
    rows = np.arange(24.0).reshape(4, 6)
    wide = np.arange(96.0).reshape(8, 12)
    for cast in (None, FLOAT32):
        for array in (rows, np.asfortranarray(rows), rows, wide[::2, ::2], rows):
            wanted = array if cast is None else array.astype(cast)
            assert_same_arrays(wanted, sent(writer, array, cast))


def test_an_array_alone_in_a_smaller_slot(arena: Arena) -> None:
    """An array like the last one passes through a slot that is not yet as large."""
    array = np.arange(100_000)
    for writer in [writer_of(arena) for _ in range(2)]:
        for _ in range(2):
            assert_same_arrays(array, sent(writer, array))
        writer.close()


def test_batches_behind_one_another(writer: Writer) -> None:
    """Batches of one shape that are written into one slot do not overwrite each other."""
    written = [(value, encode([np.full(5, value)], writer)) for value in range(3)]
    for value, record in written:
        assert_same([np.full(5, value)], decode(writer.memory, record))


def test_a_structure_is_not_mistaken_for_an_equal_one(writer: Writer) -> None:
    """Keys that are equal but not the same (1, True, 1.0) stay apart from batch to batch."""
    a = np.arange(3.0)
    record = np.zeros(2, np.dtype((np.record, [("x", "i4")])))
    for batch in [{1: a}, {True: a}, {1.0: a}, {"1": a}, [a], (a,), {0.0: a}, {-0.0: a}]:
        assert_same(batch, sent(writer, batch))
    for batch in [(record.view(np.ndarray),), (np.zeros(2, [("x", "i4")]),)]:
        assert sent(writer, batch)[0].dtype.type is batch[0].dtype.type


@dataclass
class Box:
    """A dataclass of arrays."""

    x: Any
    y: Any


KNOWN = [
    np.arange(3), (np.arange(3), np.arange(2.0)), [], {"a": [np.arange(3), (np.ones(2),)], "b": {}},
    {f"key {number}": np.full((2, 3), number) for number in range(113)}, b"x" * codec.LONG,
    Pair(np.arange(3), [np.ones(2)]), Box(np.arange(3), Pair(1, np.ones(2))), 5, "text",
    [np.arange(3), 1, 2.5, "text", None, True, b"short", 1j, ["a", "b"], (1, 2)],
    OrderedDict(a=np.arange(2)), (np.float32(1.5), np.bool_(True)), np.arange(6).reshape(2, 3).T,
    [np.zeros(2, "M8[s]"), np.zeros(2, ">f4"), np.array(["abc"]), Colour.RED, [range(3), {1: 2}]],
]  # fmt: skip


NUMBERS = sorted({kind for kind in np.sctypeDict.values() if issubclass(kind, np.number)}, key=repr)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: np.dtype(kind).char)
def test_a_number_is_of_the_type_that_pickle_gives_it(kind: Any, writer: Writer) -> None:
    """Of two types that numpy holds equal (a long double, where it is a double), it is one."""
    unit = ("s",) if kind is np.timedelta64 else ()  # none is deprecated from numpy 2.5 on
    number = kind(7, *unit)
    assert_same(sent(writer, number), pickle.loads(pickle.dumps(number)))


@pytest.mark.parametrize("cast", [None, FLOAT32], ids=["as it is", "cast"])
@pytest.mark.parametrize("batch", KNOWN, ids=lambda batch: repr(batch)[:30])
def test_a_known_structure_is_not_surveyed(
    batch: Any, cast: Any, way: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the structure of the last is recognised, and read as one that is surveyed."""
    want, surveyed = sent(writer, batch, cast), []
    survey = codec.plan_for
    monkeypatch.setattr(codec, "plan_for", lambda *args: surveyed.append(1) or survey(*args))  # type: ignore[func-returns-value]
    assert_same(want, sent(writer, batch, cast))
    assert bool(surveyed) == (way == "surveyed")


@pytest.mark.parametrize(
    "batch",
    [{1: np.arange(3)}, defaultdict(list, a=np.arange(3)), [np.zeros(2, [("a", "i4")]), 1]],
    ids=repr,
)
def test_a_structure_that_cannot_be_recognised_is_made_once(
    batch: Any, way: str, writer: Writer
) -> None:
    """It is surveyed each time, but described only once."""
    assert_same(batch, sent(writer, batch))
    plans = writer.plans
    assert_same(batch, sent(writer, batch))
    assert writer.plans is plans
    assert len(plans) == (way == "known")


A, B = np.arange(3), np.ones(2)


@pytest.mark.parametrize(
    "others",
    [
        [(A, B), [A, B], Pair(A, B), (A, B, B), (A,), ((A, B),), (B, A), (A, 1)],
        [{"a": A, "b": B}, {"b": A, "a": B}, {"a": A}, {"a": A, "b": B, "c": A}, {"a": A, 1: B}],
        [OrderedDict(a=A, b=B), {"a": A, "b": B}, OrderedDict(b=A, a=B), defaultdict(list, a=A)],
        [[A, 1], [A, "1"], [A, [1]], [A, [1, B]], [A, (1,)], [A, B], [A, [[1]]], [A, True]],
        [[A, b"x"], [A, b"x" * codec.LONG], [A, b"y" * 2 * codec.LONG], [A, None]],
        [Sample(A, B), Sample(A), Sample(B, A), Sample(A, [B]), Frozen(A, B), Slotted(A, B)],
        [[np.float32(1), A], [np.float64(1), A], [np.array(1.0), A], [1.0, A]],
        [A[::2], A.astype(">i8"), A.astype("i4"), A[None], A[:0], A.view("M8[s]"), A.view("M8[D]")],
        [{"a": A}, {StrKey("a"): A}, {"a": B}],
    ],
    ids=lambda others: repr(others[0])[:30],
)
def test_a_structure_that_resembles_a_known_one(others: list[Any], writer: Writer) -> None:
    """Whatever is known, a batch of another structure is read as what it is."""
    for batch in others:
        for known in others:
            assert_same(known, sent(writer, known))
            assert_same(batch, sent(writer, batch))


def test_shapes_may_change_from_batch_to_batch(writer: Writer) -> None:
    """Batches of one structure and many shapes are read right, and are one to the reader."""
    known = set(codec.reader.plans)
    for size in range(2 * REMEMBERED):
        batch = {"shapes": np.full((size, 2), size), "n": size, "y": np.arange(size, dtype="u1")}
        assert_same(batch, sent(writer, batch))
    assert len(codec.reader.plans.keys() - known) == 1


def test_structures_may_change_from_batch_to_batch(writer: Writer) -> None:
    """Any number of structures can be read, and only some of them are remembered."""
    for number in range(2 * REMEMBERED):
        batch = {f"key {number}": np.arange(number)}
        assert_same(batch, sent(writer, batch))
        assert len(codec.reader.plans) <= REMEMBERED


def test_arrays_are_aligned(writer: Writer) -> None:
    """Every array begins at a multiple of 64 bytes."""
    batch = [np.arange(n, dtype="u1") for n in range(1, 9)]
    for array in sent(writer, batch):
        assert array.ctypes.data % 64 == 0


def test_a_read_batch_keeps_the_memory(writer: Writer) -> None:
    """Arrays of a batch keep the memory they lie in alive."""
    record = encode({"a": np.arange(5), "b": np.arange(6)}, writer)
    block = Block(record.used)
    block.copy_from(writer.memory)
    batch = decode(block, record)
    del block
    assert batch["a"].tolist() == [0, 1, 2, 3, 4]


def test_records_are_checked(writer: Writer) -> None:
    """A record that points outside the memory is an error."""
    record = encode(np.arange(5), writer)
    with pytest.raises(IndexError):
        decode(Block(record.used - 1), record)
    with pytest.raises(IndexError):
        decode(Block(0), record)
    for number in range(4):
        for word in (-1, 2**20, 2**63, 2**64, 2**70):
            with pytest.raises(IndexError, match="outside"):
                decode(writer.memory, [word if k == number else record[k] for k in range(4)])


SOME = st.integers(-9, 200)


@given(
    words=st.dictionaries(st.integers(0, 6), st.integers(-(2**63), 2**63 - 1) | SOME),
    record=st.dictionaries(st.integers(2, 3), st.integers(-(2**70), 2**70) | SOME),
    copied=st.booleans(),
)
def test_a_layout_that_lies_does_not_leave_the_memory(
    words: dict[int, int],
    record: dict[int, int],
    copied: bool,
) -> None:
    """Whatever the numbers say, arrays lie in the memory, or it is an error."""
    arena = Arena()
    writer = writer_of(arena)
    true = encode([np.arange(4), np.ones((2, 3)), np.ones(()).T], writer)
    block = Block(true.used)
    block.copy_from(writer.memory)
    writer.close()
    arena.close()
    numbers = block.view(true.offset + true.structure, np.dtype("i8"), (true.layout // 8,))
    assert numbers.tolist() == [0, 4, 64, 2, 3, 128]
    for at, word in words.items():
        if at < len(numbers):
            numbers[at] = word
    said = [record.get(number, word) for number, word in enumerate(true)]
    try:
        arrays = codec.reader.decode(block, said, copied)
    except (IndexError, ValueError, EOFError, pickle.UnpicklingError):
        return
    start = block.address
    for array in arrays:
        at = array.ctypes.data - start
        assert copied or 0 <= at <= at + array.nbytes <= true.offset
        array.sum()


def test_a_record_may_have_more_words(writer: Writer) -> None:
    """A record is read from the first words of a cell."""
    record = encode([np.arange(5), 1], writer)
    assert_same([np.arange(5), 1], decode(writer.memory, (*record, 7, 7)))
    assert used((*record, 7, 7)) == record.used


def test_a_failed_batch_leaves_no_trace(writer: Writer) -> None:
    """After a batch that cannot be written, the next one is right."""
    good = [np.arange(3), "text"]
    assert_same(good, sent(writer, good))
    with pytest.raises(TypeError):
        encode([np.arange(3), threading.Lock()], writer)
    assert_same(good, sent(writer, good))


def test_threads_share_the_codec(arena: Arena) -> None:
    """Batches of several shapes can be written and read in several threads at once."""
    wrong = []

    def work(number: int) -> None:
        writer = writer_of(arena)
        for turn in range(200):
            batch = {"a": np.full(number + turn % 3, number), "b": [turn, np.arange(number)]}
            try:
                assert_same(batch, sent(writer, batch))
                assert_same(batch["a"], sent(writer, batch["a"]))
            except AssertionError as error:
                wrong.append(error)
        writer.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- leaves -------------------------------------------------------------------------------------


def test_large_batches_grow_the_slot(writer: Writer) -> None:
    """A batch far larger than all before passes."""
    for size in (10, 100_000, 3_000_000, 10):
        batch = [np.arange(size, dtype="f8"), "x" * size, bytes(size)]
        assert_same(batch, sent(writer, batch))
    assert writer.capacity > 3_000_000 * 10


def test_containers_keep_their_type_and_order() -> None:
    """Dictionaries keep their order, their type and their default."""
    a = np.arange(2)
    assert_same({"b": a, "a": a}, copied({"b": a, "a": a}))
    assert_same(OrderedDict(b=a, a=1), copied(OrderedDict(b=a, a=1)))
    made = copied(defaultdict(list, {"b": a}))
    assert made["new"] == []


def test_dataclasses_are_not_made_again() -> None:
    """Neither `__init__` nor `__post_init__` runs once more; fields and attributes are kept."""
    sample = Sample(np.arange(3))
    sample.extra = np.arange(4)  # type: ignore[attr-defined]
    read = copied(sample)
    assert read.made == 1
    assert_same(np.arange(4), read.extra)


def test_dataclasses_that_are_more_go_by_pickle() -> None:
    """A dataclass that is a dict, or says how it is pickled, is pickled."""
    keyed = Keyed(np.arange(3))
    keyed["a"] = np.arange(2)
    read = copied(keyed)
    assert_same(dict(keyed), dict(read))
    assert_same(keyed.image, read.image)
    assert copied(Secretive(np.arange(3), "x")).secret == "hidden"


def test_dataclasses_may_lack_fields() -> None:
    """A field that was deleted, or never set, is not there after the journey either."""
    sample = Sample(np.arange(3))
    del sample.made
    assert "made" not in vars(copied(sample))
    empty = object.__new__(Loose)
    empty.image = np.arange(3)
    read = copied([empty, np.arange(2)])[0]
    assert_same(empty.image, read.image)
    assert not hasattr(read, "label")


def test_named_tuples_with_attributes_go_by_pickle() -> None:
    """Attributes of a named tuple besides its fields are kept."""
    marked = Marked(np.arange(3), 1)
    assert_same(marked, copied(marked))
    marked.note = "kept"
    assert copied(marked).note == "kept"


def test_named_tuples_of_a_known_structure_keep_attributes(writer: Writer) -> None:
    """Also where one without them came before."""
    for _ in range(2):
        marked = Marked(np.arange(3), 1)
        assert vars(sent(writer, marked)) == {}
        marked.note = "kept"
        assert sent(writer, marked).note == "kept"


def test_leaves_of_objects_are_cast_where_they_are_converted(writer: Writer) -> None:
    """Those of dataclasses and of any dicts, in the worker; those of other classes are not."""
    large, small = np.arange(9000).reshape(9, 1000), np.arange(4)[::2]
    for make in (Sample, Slotted, lambda *pair: {0: pair}, lambda *pair: OrderedDict(a=pair)):
        batch = make(large.T, [small, "text"])
        read, leaves = sent(writer, batch, FLOAT32), []
        map_leaves(leaves.append, read)
        arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        assert type(read) is type(batch)
        assert_same_arrays(large.T.astype("f4", order="A"), arrays[0])
        assert_same_arrays(small.astype("f4"), arrays[1])
    assert_same_arrays(large, sent(writer, Plain(large), FLOAT32).array)
    assert_same_arrays(large, sent(writer, Feature(x=large), FLOAT32)["x"])


def test_an_array_twice_in_an_object_is_one() -> None:
    """As in any pickle."""
    large = np.arange(1000)
    read = copied(Sample(large, [large]))
    assert read.image is read.label[0]


def test_other_arrays_go_by_pickle() -> None:
    """Arrays of objects and subclasses of array arrive as what they are."""
    objects = np.array([1, "a", None], dtype=object)
    assert copied([objects])[0].tolist() == [1, "a", None]
    mixed = np.array([(1, "a")], dtype=[("n", "i4"), ("o", object)])
    assert copied((mixed, np.zeros(3)))[0].tolist() == [(1, "a")]
    masked = np.ma.masked_array(np.arange(3), [False, True, False])
    assert copied({"m": masked})["m"].mask.tolist() == [False, True, False]
    record = np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]).view(np.recarray)
    read = copied([record, 1])[0]
    assert type(read) is np.recarray
    assert read.a.tolist() == [1]


@pytest.mark.skipif(not hasattr(np, "dtypes"), reason="this numpy has no StringDType")
def test_arrays_of_texts_without_a_length() -> None:
    """Arrays of numpy's StringDType, whose elements lie elsewhere, arrive whole."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this numpy has no StringDType")
    texts = np.array(["a", "b" * 100], dtype=np.dtypes.StringDType())
    assert copied([texts, np.arange(2)])[0].tolist() == texts.tolist()


def test_memory_mapped_files_arrive_as_arrays(tmp_path: Path) -> None:
    """A piece of a memory-mapped file is an array like any other."""
    mapped = np.memmap(tmp_path / "data", "i4", "w+", shape=(4, 3))
    mapped[:] = 7
    read = copied({"x": mapped[1:3]}, FLOAT32)["x"]
    assert_same(np.full((2, 3), 7, FLOAT32), read)


def test_buffers_of_pickles_lie_in_the_slot(writer: Writer) -> None:
    """A large array inside an object is read where it lies, and a small one is not worth it."""
    large, small = np.arange(1000), np.arange(5)
    odd = np.arange(1001, dtype=np.uint32).view(np.uint8)[1:]
    read = sent(writer, [Plain(odd), Plain(large), Plain(small), np.arange(3)])
    start = writer.memory.address
    for number, array in enumerate([odd, large]):
        lies = read[number].array
        assert_same(array, lies)
        assert start <= lies.ctypes.data < start + writer.used
        assert lies.ctypes.data % 64 == 0
    assert_same(small, read[2].array)


def test_read_only_buffers_stay_so() -> None:
    """An array inside an object that could not be written to cannot be written to."""
    array = np.arange(1000)
    array.flags.writeable = False
    assert not copied(Plain(array)).array.flags.writeable


@pytest.mark.parametrize("size", [0, 1, 100, 10_000])
def test_a_bytearray_alone_lies_as_it_is(writer: Writer, size: int) -> None:
    """Its bytes are all that is laid down for it, and it comes out as what it was."""
    writer.place(5)
    data = bytearray(range(256)) * (size // 256 + 1)
    del data[size:]
    record = encode(data, writer)
    assert record == (64, 0, 0, size)
    read = decode(writer.memory, record)
    assert type(read) is bytearray
    assert read == data
    read.append(1)


def test_long_bytes_are_not_pickled(writer: Writer) -> None:
    """Long bytes are copied once each way."""
    data = os.urandom(codec.LONG)
    record = encode([data], writer)
    assert record.structure + record.layout + record.objects < 200
    assert bytes(memoryview(writer.memory)[: len(data)]) == data


def test_an_object_in_two_places_stays_one() -> None:
    """Objects that go by pickle keep their identity within a batch; arrays become two."""
    thing, array = Plain(1), np.arange(3)
    read = copied([thing, (thing, array), array])
    assert read[0] is read[1][0]
    assert read[1][1] is not read[2]
    assert not np.shares_memory(read[1][1], read[2])


def test_not_one_more_reference_is_kept() -> None:
    """The codec holds on to nothing of a batch."""
    array = np.arange(3)
    before = sys.getrefcount(array)
    copied({"a": array, "b": [array, Plain(array)]})
    assert sys.getrefcount(array) == before


# -- into the slot without a copy ---------------------------------------------------------------


def test_arrays_in_the_slot_are_not_copied(writer: Writer) -> None:
    """A batch that was built in the slot stays where it is."""
    x = writer.empty((1000, 3), np.float32)
    x[:] = 5
    y = writer.empty(4, np.int64, fortran=True)
    y[:] = 6
    before = writer.used
    record = encode({"x": x, "y": y}, writer)
    assert writer.used - before < 1000
    read = decode(writer.memory, record)
    assert_same({"x": x, "y": y}, read)
    assert read["x"].ctypes.data == x.ctypes.data
    x[0, 0] = 9
    assert read["x"][0, 0] == 9


def test_an_array_in_the_slot_alone(writer: Writer) -> None:
    """An array that is the whole batch is not copied either."""
    for _ in range(3):
        writer.used = 0
        x = writer.empty((100, 3), np.uint8)
        x[:] = 5
        read = reread(writer, x)
        assert read.ctypes.data == x.ctypes.data
        assert_same(np.full((100, 3), 5, np.uint8), read)


def test_parts_of_arrays_in_the_slot(writer: Writer) -> None:
    """Contiguous parts stay where they are; others are copied, and what overlaps the former."""
    x = writer.empty((10, 4), np.int32)
    x[:] = np.arange(40).reshape(10, 4)
    batch = (x[2:5], x[7].view(np.uint8), x[5:7], x[:, 1], x[3:3], x, x[4:6], x.T)
    read = reread(writer, batch)
    assert_same(batch, read)
    for number in (0, 1, 2):
        assert read[number].ctypes.data == batch[number].ctypes.data
    for number in (3, 5, 6, 7):
        assert not np.shares_memory(read[number], x)


def test_arrays_in_the_slot_are_found_after_it_grew(writer: Writer) -> None:
    """Arrays made before the slot grew, on the old mapping, are not copied either."""
    arrays = [writer.empty(2**shift, np.uint8) for shift in (10, 16, 20, 22)]
    for number, array in enumerate(arrays):
        array[:] = number
    before = writer.used
    record = encode(arrays, writer)
    assert writer.used - before < 1000
    for number, array in enumerate(decode(writer.memory, record)):
        assert (array == number).all()


def test_an_array_in_the_slot_of_another_type_is_cast(writer: Writer) -> None:
    """A cast is a copy; an array of the wanted type stays where it is."""
    x, y = writer.empty(5, np.uint8), writer.empty(5, np.float32)
    x[:] = y[:] = 3
    read = reread(writer, [x, y], FLOAT32)
    assert_same([np.full(5, 3, FLOAT32)] * 2, read)
    assert read[1].ctypes.data == y.ctypes.data


def test_a_stage_appends_to_what_another_wrote(writer: Writer) -> None:
    """What was read from the slot and is passed on is not copied; what is new goes behind it."""
    first = encode([np.arange(1000), np.arange(3.0)], writer)
    writer.select(writer.slot, writer.capacity)
    writer.resume(first.used)
    batch = decode(writer.loan(), first)
    batch[1] = batch[1] * 2
    second = encode(batch, writer)
    assert second.used - first.used < 1000
    assert_same([np.arange(1000), np.arange(3.0) * 2], decode(writer.memory, second))
    assert_same([np.arange(1000), np.arange(3.0)], decode(writer.memory, first))


# -- casts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i8", "u1", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_are_cast(dtype: str, order: Any) -> None:
    """Arrays of numbers arrive as `astype` would make them, in their order."""
    values = [[0, 1, 2], [3, 4, 5]]
    batch = {
        kind: np.array(values, kind, order=order) for kind in ("?", "i1", ">u2", "f2", ">f8", "g")
    }
    read = copied(batch, np.dtype(dtype))
    for kind, array in read.items():
        assert_same_arrays(batch[kind].astype(dtype), array)
        assert array.dtype == np.dtype(dtype)


def test_other_leaves_are_not_cast() -> None:
    """Complex numbers, dates, texts, structures, scalars and bytes keep their type."""
    batch = [
        np.ones(2, "c8"), np.zeros(2, "M8[s]"), np.array(["a"]), np.zeros(2, [("a", "i4")]),
        np.int64(3), 3, b"x" * codec.LONG,
    ]  # fmt: skip
    assert_same(batch, copied(batch, FLOAT32))


def test_a_strided_array_is_cast_to_row_major() -> None:
    """Arrays that are not contiguous are cast and arrive row by row."""
    array = np.arange(24).reshape(4, 6)[::2, ::3]
    assert_same(array.astype("f4"), copied([array], FLOAT32)[0])


def test_no_cast_is_told_from_a_cast_to_float64(writer: Writer) -> None:
    """The same batch with and without a cast, one after the other, comes out different."""
    for _ in range(2):
        for cast in (None, np.dtype("f8")):
            for batch in ([np.arange(3)], np.arange(3)):
                read = sent(writer, batch, cast)
                assert (read[0] if isinstance(batch, list) else read).dtype == (
                    cast or np.dtype(int)
                )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("?", True), ("i4", True), ("u8", True), ("f2", True), ("c8", False), ("M8[s]", False),
     ("O", False), ("S3", False), ("U3", False), ([("a", "i4")], False)],
)  # fmt: skip
def test_castable(dtype: Any, expected: bool) -> None:
    """Bool, int, uint and float are numbers that are cast."""
    assert castable(np.dtype(dtype)) is expected


# -- what cannot be written ---------------------------------------------------------------------


class Stubborn:
    """Raises when it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize("bad", [threading.Lock(), (i for i in [1]), Stubborn()], ids=type)
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda bad: bad, "batch: "),
        (lambda bad: {"meta": [1, bad]}, "batch['meta'][1]: "),
        (lambda bad: {"x": (np.zeros(2), [1, {2: bad}])}, "batch['x'][1][1][2]: "),
        (lambda bad: Pair(np.zeros(3), Sample(np.zeros(2), bad)), "batch.second.label: "),
        (lambda bad: [Plain(bad)], "batch[0].array: "),
    ],
)  # fmt: skip
def test_what_cannot_be_pickled_is_named(bad: Any, make: Any, path: str) -> None:
    """The error says where in the batch the culprit is."""
    with pytest.raises(TypeError) as error:
        copied(make(bad))
    assert str(error.value).startswith(path)


def test_a_batch_that_contains_itself() -> None:
    """It arrives as it was; where leaves are to be cast or converted it is an error, no crash."""
    endless: list[Any] = [np.zeros(3)]
    endless.append({"again": endless, "number": 7})
    read = copied(endless)
    assert len(read) == 2
    assert read[1]["again"] is read
    assert read[1]["number"] == 7
    assert_same(read[0], endless[0])
    with pytest.raises(ValueError, match="contains itself"):
        copied(endless, np.dtype("f4"))
    with pytest.raises(ValueError, match="contains itself"):
        map_leaves(lambda leaf: leaf, endless)


def test_deep_batches() -> None:
    """Containers can be inside one another more often than they are opened."""
    batch: Any = np.zeros(3)
    for _ in range(codec.MAX_DEPTH):
        batch = [batch]
    assert_same(batch, copied(batch))
    assert_same(batch, copied(batch, np.dtype("f8")))
    batch = [batch, (np.arange(4000), "a")]
    assert_same(batch, copied(batch))
    with pytest.raises(ValueError, match="contains itself"):
        copied(batch, np.dtype("f4"))


def test_what_is_twice_in_a_batch() -> None:
    """Containers of arrays, and arrays, are then two; what is pickled stays one."""
    arrays, texts = [np.zeros(3)], ["a"]
    read = copied([arrays, arrays, arrays[0], texts, {"x": (np.ones(2), texts)}])
    assert read[0] is not read[1]
    assert not np.shares_memory(read[0][0], read[1][0])
    assert not np.shares_memory(read[0][0], read[2])
    assert read[3] is read[4]["x"][1]


SCRIPT = """
import os, subprocess, sys
from dataclasses import dataclass
from typing import NamedTuple
import cloudpickle, numpy as np
from cseq.arena import Arena
from cseq.codec import decode

class Pair(NamedTuple):
    first: object
    second: object

@dataclass
class Sample:
    image: object

class Other:
    pass

def make():
    class Local(Other):
        pass
    return Pair(np.arange(3), [Sample(np.arange(4)), Sample(5), Other(), lambda: 6]), Local()

WORKER = '''
import pickle, sys
from cseq.writer import Writer
from cseq.codec import encode
fd, width, slot, capacity = map(int, sys.argv[1:])
writer = Writer(fd, width)
writer.select(slot, capacity)
print(*encode(pickle.load(sys.stdin.buffer)(), writer), writer.capacity)
'''

arena = Arena()
slot = arena.slots.take()
arena.request(slot)
fd = arena.segment.fd
args = map(str, (fd, arena.segment.width, slot, arena.capacity(slot)))
command = [sys.executable, "-c", WORKER, *args]
done = subprocess.run(
    command, input=cloudpickle.dumps(make), stdout=subprocess.PIPE, pass_fds=[fd], check=True
)
*record, capacity = map(int, done.stdout.split())
(pair, local) = decode(arena.lend(slot, sum(record), capacity), record)
assert type(pair) is Pair and type(pair.second[0]) is Sample and type(pair.second[1]) is Sample
assert pair.first.tolist() == [0, 1, 2] and pair.second[0].image.tolist() == [0, 1, 2, 3]
assert type(pair.second[2]) is Other and pair.second[3]() == 6
assert isinstance(local, Other) and type(local).__name__ == "Local"
arena.close()
print("right")
"""


@pytest.mark.needs("POSIX")
def test_classes_of_a_script_come_back_as_themselves(tmp_path: Path) -> None:
    """A worker that got a script's classes by value sends instances that are the script's own."""
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (done.stdout, done.stderr) == ("right\n", "")


def environment() -> dict[str, str]:
    """Let a script import this very package."""
    paths = [path for path in sys.path if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_nothing_is_imported_for_arrays() -> None:
    """Neither torch nor cloudpickle is imported for a batch that has no need of it."""
    code = """
import sys
import numpy as np
from cseq.arena import Arena
from cseq.writer import Writer
from cseq.codec import decode, encode
arena = Arena()
writer = Writer(arena.segment.fd, arena.segment.width)
slot = arena.slots.take()
writer.select(slot, arena.request(slot))
record = encode({"a": np.zeros(3), "b": ["c", 1, np.float32(1)]}, writer)
decode(writer.memory, record)
print(*{"torch", "cloudpickle"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "\n"


# -- leaves one by one --------------------------------------------------------------------------


@given(batch=batches)
def test_map_leaves_keeps_what_does_not_change(batch: Any) -> None:
    """A function that changes nothing gives the very same batch."""
    assert map_leaves(lambda leaf: leaf, batch) is batch


def test_map_leaves() -> None:
    """The function's results take the leaves' places, in containers of the same types."""
    batch = {
        "list": [1, 2], "tuple": (3,), "pair": Pair(4, [5]), "sample": Sample(6, 7),
        "frozen": Slotted(8), "ordered": OrderedDict(a=9), 10: defaultdict(None, a=11),
    }  # fmt: skip
    seen: list[Any] = []

    def function(leaf: Any) -> Any:
        seen.append(leaf)
        return str(leaf)

    read = map_leaves(function, batch)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 1, 8, None, 9, 11]
    assert_same(
        {
            "list": ["1", "2"], "tuple": ("3",), "pair": Pair("4", ["5"]),
            "sample": read["sample"], "frozen": Slotted("8", "None"),
            "ordered": OrderedDict(a="9"), 10: defaultdict(None, a="11"),
        },
        read,
    )  # fmt: skip
    assert vars(read["sample"]) == {"image": "6", "label": "7", "made": "1"}
    assert batch["list"] == [1, 2]


def test_map_leaves_of_one_leaf() -> None:
    """A batch that is a leaf is given to the function."""
    array = np.zeros(3)
    assert map_leaves(lambda leaf: (leaf,), array)[0] is array


# -- tensors ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch, if it is installed."""
    return pytest.importorskip("torch")


TYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"


@pytest.mark.parametrize("name", TYPES.split())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(torch: Any, name: str, shape: tuple[int, ...]) -> None:
    """CPU tensors of all types arrive as they were, also those that numpy lacks."""
    tensor = torch.arange(6).to(getattr(torch, name))[: int(np.prod(shape))].reshape(shape)
    for batch in (tensor, [tensor, np.zeros(2), "text"]):
        read = copied(batch)
        read = read[0] if isinstance(batch, list) else read
        assert type(read) is torch.Tensor
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert torch.equal(read, tensor)


def test_small_floats(torch: Any) -> None:
    """Types of one byte arrive bit for bit."""
    tensor = torch.arange(5).to(torch.float8_e4m3fn)
    read = copied((tensor,))[0]
    assert read.dtype == tensor.dtype
    assert read.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.12
def test_tensors_of_other_layouts(torch: Any) -> None:
    """Transposed, strided, conjugated and sparse tensors have the values they had."""
    base = torch.arange(24.0).reshape(4, 6)
    conjugated = torch.tensor([1 + 2j, 3j]).conj()
    batch = [
        base.T,
        base[::2, ::3],
        conjugated,
        conjugated.imag,
        base.to_sparse(),
        base.expand(2, 4, 6),
    ]
    for tensor, read in zip(batch, copied(batch), strict=True):
        assert read.layout == tensor.layout
        assert torch.equal(read.to_dense(), tensor.to_dense())
    assert copied(base.T).stride() == base.T.stride()


def test_tensors_keep_whether_they_require_gradients(torch: Any) -> None:
    """A tensor arrives as a leaf that requires gradients if it did; its graph stays behind."""
    leaf = torch.ones(3, requires_grad=True)
    read = copied([leaf, leaf * 2, leaf.detach()])
    assert [tensor.requires_grad for tensor in read] == [True, True, False]
    assert all(tensor.is_leaf for tensor in read)
    read[0].sum().backward()
    assert read[0].grad.tolist() == [1, 1, 1]
    assert type(copied(torch.nn.Parameter(leaf.detach()))) is torch.nn.Parameter


def test_tensors_lie_in_the_slot(torch: Any, writer: Writer) -> None:
    """A tensor is read where it lies, and one on an array in the slot is not copied."""
    x = writer.empty((100, 3), np.float32)
    x[:] = 1
    tensor = torch.from_numpy(x)
    read = reread(writer, [tensor, torch.zeros(3)])
    assert read[0].data_ptr() == x.ctypes.data
    start = writer.memory.address
    assert start <= read[1].data_ptr() < start + writer.used
    read[1][0] = 5


class Feature(collections.UserDict[str, Any]):
    """An object of a class, with anything in it."""


def test_tensors_in_objects_lie_in_the_slot(torch: Any, writer: Writer) -> None:
    """Of any object, the bytes of arrays and tensors are not pickled, and are read in place."""
    base = torch.arange(30_000.0)
    sparse = torch.zeros(3000).index_fill(0, torch.arange(0, 3000, 2), 1.0).to_sparse()
    feature = Feature(
        base=base,
        again=base,
        part=base[100:200],
        parameter=torch.nn.Parameter(base + 1),
        half=base.to(torch.bfloat16),
        turned=base.view(100, 300).T,
        sparse=sparse,
        array=np.arange(5000),
        small=torch.ones(3),
        none=torch.ones(0, 2),
        text="text",
    )
    for batch in (feature, [feature, np.zeros(2)], {"x": torch.ones(2), "f": feature}):
        writer.used = 0
        record = encode(batch, writer)
        assert record.objects < 5000
        read: Any = decode(writer.memory, record)
        got = read if batch is feature else read[0] if type(read) is list else read["f"]
        assert type(got) is Feature
        assert list(got) == list(feature)
        start = writer.memory.address
        for name in ("base", "parameter", "half", "turned", "part"):
            value, sent = got[name], feature[name]
            assert type(value) is type(sent)
            assert (value.dtype, value.stride()) == (sent.dtype, sent.stride())
            assert torch.equal(value, sent)
            assert value.requires_grad == sent.requires_grad
            assert start <= value.data_ptr() < start + writer.used
        assert start <= got["array"].ctypes.data < start + writer.used
        assert np.array_equal(got["array"], feature["array"])
        assert torch.equal(got["sparse"].to_dense(), sparse.to_dense())
        assert (got["small"].tolist(), got["none"].shape) == ([1, 1, 1], (0, 2))
        # What is one stays one, and what shares memory shares it.
        assert got["again"] is got["base"]
        got["base"][150] = -1
        assert got["part"][50] == -1
        got["array"][0] = -1
        got["small"][0] = -1
        assert base[150] == 150


def test_what_lies_in_the_slot_is_not_copied_for_an_object(torch: Any, writer: Writer) -> None:
    """Arrays, tensors, and parts of them that do not overlap."""
    x = writer.empty((50, 30), np.float32)
    x[:] = 7
    y = writer.empty(500, np.int64)
    feature = Feature(x=torch.from_numpy(x), first=y[:250], last=y[250:])
    before = writer.used
    read: Any = decode(writer.memory, encode(feature, writer))
    assert writer.used - before < 1500
    assert read["x"].data_ptr() == x.ctypes.data
    assert read["last"].ctypes.data == y.ctypes.data + 2000
    overlapping = decode(writer.memory, encode(Feature(all=y, part=y[10:300]), writer))
    assert not np.shares_memory(overlapping["all"], overlapping["part"])


def test_a_part_of_a_large_tensor_travels_alone(torch: Any, writer: Writer) -> None:
    """In what is opened; of any other object, the whole storage does."""
    large = torch.arange(100_000.0)
    for part in (large[5:9], large.to(torch.bfloat16)[5:9], large.requires_grad_()[5:9]):
        for batch in (Sample(part), {0: part}, [part, "text"]):
            record = encode(batch, writer)
            assert record.structure + record.layout + record.objects < 2000
            assert record.used - writer.used == 0
            read, leaves = decode(writer.memory, record), []
            map_leaves(leaves.append, read)
            tensor = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            assert torch.equal(tensor, part)
            assert (tensor.dtype, tensor.requires_grad) == (part.dtype, part.requires_grad)
            assert tensor.untyped_storage().nbytes() == part.nbytes


def test_tensors_of_types_that_numpy_lacks_are_recognised(
    torch: Any, way: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of them is surveyed once, and told from one of their bits."""
    half = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    bits = torch.arange(6, dtype=torch.int16).view(2, 3)
    for batch in ([half], [bits], [half]):
        assert torch.equal(sent(writer, batch)[0], batch[0])
    surveyed: list[Any] = []
    survey = codec.plan_for
    monkeypatch.setattr(codec, "plan_for", lambda *args: surveyed.append(1) or survey(*args))  # type: ignore[func-returns-value]
    for batch in ([half.T], [bits], [half]):
        read = sent(writer, batch)[0]
        assert read.dtype == batch[0].dtype
        assert torch.equal(read, batch[0])
    assert len(surveyed) == (3 if way == "surveyed" else 1)  # of the transposed one


@pytest.mark.filterwarnings("ignore")  # torch's, of quantised and nested tensors and of storages
def test_odd_tensors_in_objects(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised, nested and conjugated tensors, and storages, arrive in objects as they were."""
    # pickle looks for what names no module in all of them; RETURNN's lazy ones import more then.
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


def test_tensors_in_objects_of_a_local_class(torch: Any, writer: Writer) -> None:
    """Also where the class goes by value."""

    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    record = encode(Local(torch.arange(20_000.0)), writer)
    assert record.objects < 10_000
    got: Any = decode(writer.memory, record)
    assert torch.equal(got.x, torch.arange(20_000.0))


def test_tensors_are_cast(torch: Any) -> None:
    """Tensors of numbers are cast as torch does it; complex ones are not."""
    batch = [
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(1) * 1j,
    ]
    read = copied(batch, FLOAT32)
    assert [tensor.dtype for tensor in read] == [torch.float32] * 3 + [torch.complex64]
    assert [tensor.tolist() for tensor in read] == [tensor.tolist() for tensor in batch]


def test_record_is_plain_integers(writer: Writer) -> None:
    """A record is at most six unsigned 64-bit integers."""
    record = encode([np.arange(4), "text"], writer)
    assert isinstance(record, Record)
    assert all(type(word) is int and 0 <= word < 2**64 for word in record)


PROTOTYPE = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


def test_cuda_tensors_alone_travel_by_handle(
    torch: Any, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in containers without arrays, which would be pickled whole: by way of the host."""
    sent: list[Any] = []

    def reduce_tensor(tensor: Any) -> Any:
        sent.append(tensor)
        return torch.full, ((2,), int(tensor[0]))

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor[0] > 0))
    on_device, on_host = torch.arange(1, 4), torch.arange(3)
    for batch in (
        on_device,
        {"x": on_device},
        ["text", (on_device, {"y": on_device})],
        (on_host, [on_device]),
    ):
        sent.clear()
        got = decode(writer.memory, encode(batch, writer))
        leaves: list[Any] = []
        map_leaves(leaves.append, batch)
        assert len(sent) == sum(leaf is on_device for leaf in leaves)
        assert repr(got) == repr(batch).replace("tensor([1, 2, 3])", "tensor([1, 1])")


@PROTOTYPE
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors(torch: Any, grad: bool) -> None:
    """Tensors of tensors of unequal size arrive as such, beside others."""
    parts = [torch.ones(2), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(parts, requires_grad=grad)
    for batch in (nested, {"x": torch.ones(2), "nested": nested}):
        read = copied(batch)
        got = read if batch is nested else read["nested"]
        assert got.is_nested
        assert got.layout == nested.layout
        assert got.requires_grad == grad
        assert all(map(torch.equal, got.unbind(), parts))


@PROTOTYPE
def test_a_nested_tensor_where_there_was_a_tensor(torch: Any, writer: Writer) -> None:
    """A structure that the writer knows is told from it."""
    assert torch.equal(sent(writer, [torch.ones(2)])[0], torch.ones(2))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert sent(writer, [nested])[0].is_nested
    assert torch.equal(sent(writer, [torch.ones(2)])[0], torch.ones(2))


@pytest.mark.parametrize("nbytes", [0, 12, 100_000])
def test_storages(torch: Any, nbytes: int) -> None:
    """Those of torch arrive as such, and can be written to."""
    storage = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8).untyped_storage()
    for batch in (storage, [storage], {"x": torch.ones(2), "s": storage, "text": "a"}):
        read = copied(batch)
        got = read["s"] if isinstance(read, dict) else read[0] if isinstance(read, list) else read
        assert type(got) is torch.UntypedStorage
        assert got.tolist() == storage.tolist()
        got.fill_(3)
        assert set(got.tolist()) <= {3}
    assert 3 not in storage.tolist()[:3]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_of_numbers(torch: Any) -> None:
    """Those of a type, too."""
    storage = torch.FloatStorage([1.0, 2.0])
    read = copied([storage, torch.ones(2)])[0]
    assert type(read) is type(storage)
    assert read.dtype == storage.dtype
    assert read.tolist() == storage.tolist()
