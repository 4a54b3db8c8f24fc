"""A batch that was written to a slot and read again is the same batch."""

import pickle
from collections import OrderedDict, defaultdict

import codec_batches
import numpy as np
import pytest
from codec_batches import (
    FLOAT32,
    RESEMBLING,
    Colour,
    Frozen,
    Pair,
    Plain,
    Sample,
    Slotted,
    StrKey,
    assert_same,
    batches,
    copied,
    reread,
    sent,
)
from hypothesis import example, given
from hypothesis import strategies as st
from slots import writer_of

from cseq._memory import Block, copy_of
from cseq.encoding import _codec, codec
from cseq.encoding._plan import LONG
from cseq.encoding.codec import decode, map_leaves
from cseq.memory.arena import Arena

way = codec_batches.way
# A reader remembers this number of structures.
MOST_PLANS = 64


@given(batch=batches)
@example(batch=())
@example(batch={})
@example(batch=[[], ({},)])
@example(batch={1: np.zeros(1), "a": 2})
@example(batch=(np.zeros(3), [np.float32(1), b"x" * LONG, "text"], np.ones((2, 2))))
def test_round_trip(batch):
    """The batch that is read equals the written one in types, order and bits, and is writable."""
    assert_same(batch, copied(batch))


@given(sequence=st.lists(batches, min_size=2, max_size=5), data=st.data())
def test_batches_do_not_depend_on_each_other(sequence, data):
    """Batches of any structure can be written and read in any order."""
    arena = Arena()
    written = []
    for batch in sequence + sequence[:1]:
        writer = writer_of(arena)
        written.append((batch, writer, writer.encoder.encode(batch)))
    for batch, writer, record in data.draw(st.permutations(written)):
        assert_same(batch, decode(writer.room.memory, record))
        writer.room.close()
    arena.close()


KNOWN = [
    np.arange(3), (np.arange(3), np.arange(2.0)), [], {"a": [np.arange(3), (np.ones(2),)], "b": {}},
    {f"key {number}": np.full((2, 3), number) for number in range(113)}, b"x" * LONG,
    Pair(np.arange(3), [np.ones(2)]), Frozen(np.arange(3), Pair(1, np.ones(2))), 5, "text",
    [np.arange(3), 1, 2.5, "text", None, True, b"short", 1j, ["a", "b"], (1, 2)],
    OrderedDict(a=np.arange(2)), (np.float32(1.5), np.bool_(True)), np.arange(6).reshape(2, 3).T,
    [np.zeros(2, "M8[s]"), np.zeros(2, ">f4"), np.array(["abc"]), Colour.RED, [range(3), {1: 2}]],
    [np.arange(3), [{"parts": [{"box": [[1.5], 2]}, {"box": [[(1j,)]]}]}]],
]  # fmt: skip


NUMBERS = sorted({kind for kind in np.sctypeDict.values() if issubclass(kind, np.number)}, key=repr)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: np.dtype(kind).char)
def test_a_number_keeps_its_type(kind, writer):
    """A number keeps its type, even if numpy takes the type as equal to another one."""
    # A timedelta64 without a unit is deprecated from numpy 2.5 on.
    unit = ("s",) if kind is np.timedelta64 else ()
    number = kind(7, *unit)
    assert_same(sent(writer, number), number)


@pytest.mark.parametrize("cast", [None, FLOAT32], ids=["as it is", "cast"])
@pytest.mark.parametrize("batch", KNOWN, ids=lambda batch: repr(batch)[:30])
def test_a_known_structure_is_not_surveyed(batch, cast, way, writer, monkeypatch):
    """A batch with the last structure is recognised, and read like a surveyed one."""
    want, surveyed = sent(writer, batch, cast), []
    survey = _codec.plan_for
    monkeypatch.setattr(_codec, "plan_for", lambda *args: surveyed.append(1) or survey(*args))  # type: ignore[func-returns-value]
    assert_same(want, sent(writer, batch, cast))
    assert bool(surveyed) == (way == "surveyed")


@pytest.mark.parametrize(
    "batch",
    [{1: np.arange(3)}, defaultdict(list, a=np.arange(3)), [np.zeros(2, [("a", "i4")]), 1]],
    ids=repr,
)
def test_a_structure_that_cannot_be_recognised_is_made_once(batch, way, writer):
    """It is surveyed each time, but described once."""
    assert_same(batch, sent(writer, batch))
    plans = [*writer.encoder.plans]
    assert_same(batch, sent(writer, batch))
    assert writer.encoder.plans == plans
    assert len(plans) == (way == "known")


A, B = np.arange(3), np.ones(2)


@pytest.mark.parametrize(
    "others",
    [
        [(A, B), [A, B], Pair(A, B), (A, B, B), (A,), ((A, B),), (B, A), (A, 1)],
        [{"a": A, "b": B}, {"b": A, "a": B}, {"a": A}, {"a": A, "b": B, "c": A}, {"a": A, 1: B}],
        [OrderedDict(a=A, b=B), {"a": A, "b": B}, OrderedDict(b=A, a=B), defaultdict(list, a=A)],
        [[A, 1], [A, "1"], [A, [1]], [A, [1, B]], [A, (1,)], [A, B], [A, [[1]]], [A, True]],
        [[A, b"x"], [A, b"x" * LONG], [A, b"y" * 2 * LONG], [A, None]],
        [Sample(A, B), Sample(A), Sample(B, A), Sample(A, [B]), Frozen(A, B), Slotted(A, B)],
        [[np.float32(1), A], [np.float64(1), A], [np.array(1.0), A], [1.0, A]],
        [A[::2], A.astype(">i8"), A.astype("i4"), A[None], A[:0], A.view("M8[s]"), A.view("M8[D]")],
        [{"a": A}, {StrKey("a"): A}, {"a": B}],
        [np.zeros(2, kind) for kind in RESEMBLING],
        [Plain(np.zeros(2, kind)) for kind in RESEMBLING],
    ],
    ids=lambda others: repr(others[0])[:30],
)
def test_a_structure_that_resembles_a_known_one(others, writer):
    """Whatever structures are known, a batch of another one is read correctly."""
    for batch in others:
        for known in others:
            assert_same(known, sent(writer, known))
            assert_same(batch, sent(writer, batch))


def test_shapes_may_change_from_batch_to_batch(way, writer):
    """Batches of one structure and many shapes are read correctly, as a single structure."""
    structures = set()
    for size in range(2 * MOST_PLANS):
        batch = {way: np.full((size, 2), size), "n": size, "y": np.arange(size, dtype="u1")}
        record = writer.encoder.encode(batch)
        assert_same(batch, decode(writer.room.memory, record))
        structures.add(bytes(writer.room.memory)[record[0] :][: record[1]])
        writer.room.used = 0
    assert len(structures) == 1


def test_records_are_checked(writer):
    """A record that points outside the memory is an error."""
    record = writer.encoder.encode(np.arange(5))
    for size in (sum(record) - 1, 0):
        with pytest.raises(IndexError):
            decode(Block(size), record)
    for number in range(4):
        for word in (-1, 2**20, 2**63, 2**64, 2**70):
            with pytest.raises(IndexError, match="outside"):
                decode(writer.room.memory, [word if k == number else record[k] for k in range(4)])


SOME = st.integers(-9, 200)


@given(
    words=st.dictionaries(st.integers(0, 11), st.integers(-(2**63), 2**63 - 1) | SOME),
    record=st.dictionaries(st.integers(2, 3), st.integers(-(2**70), 2**70) | SOME),
    lend=st.sampled_from([None, lambda *_: None]),
)
def test_a_layout_that_lies_does_not_leave_the_memory(words, record, lend):
    """For any numbers, arrays lie in the memory, or there is an error."""
    arena = Arena()
    writer = writer_of(arena)
    spread = np.broadcast_to(np.arange(3.0), (2, 3))
    true = writer.encoder.encode([np.arange(4), spread, np.ones(()).T])
    block = copy_of(writer.room.memory, sum(true))
    writer.room.close()
    arena.close()
    numbers = block.view(sum(true[:2]), np.dtype("i8"), (true[2] // 8,))
    assert numbers.tolist() == [0, 32, 4, 64, 48, 2, 3, 128, 8]
    for at, word in words.items():
        if at < len(numbers):
            numbers[at] = word
    said = [record.get(number, word) for number, word in enumerate(true)]
    try:
        arrays = codec.decode(block, said, lend)
    except (IndexError, ValueError, EOFError, pickle.UnpicklingError):
        return
    start = block.address
    for array in arrays:
        if lend is None:
            last = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
            at = array.ctypes.data - start
            assert 0 <= at <= true[0]
            assert not array.size or at + array.itemsize + last <= true[0]
        if array.size < 10**6:
            # An element may be in any number of places.
            array.sum()


def test_parts_of_arrays_in_the_slot(writer):
    """Contiguous parts stay in place; others are copied, as is what overlaps an earlier part."""
    x = writer.room.empty((10, 4), np.int32)
    x[:] = np.arange(40).reshape(10, 4)
    batch = (x[2:5], x[7].view(np.uint8), x[5:7], x[:, 1], x[3:3], x, x[4:6], x.T)
    read = reread(writer, batch)
    assert_same(batch, read)
    for number in (0, 1, 2):
        assert read[number].ctypes.data == batch[number].ctypes.data
    for number in (3, 5, 6, 7):
        assert not np.shares_memory(read[number], x)


def test_arrays_in_the_slot_are_found_after_it_grew(writer):
    """Arrays made before the slot grew, on the old mapping, are not copied either."""
    arrays = [writer.room.empty(2**shift, np.uint8) for shift in (10, 16, 20, 22)]
    for number, array in enumerate(arrays):
        array[:] = number
    before = writer.room.used
    record = writer.encoder.encode(arrays)
    assert writer.room.used - before < 1000
    for number, array in enumerate(decode(writer.room.memory, record)):
        assert (array == number).all()


def test_a_stage_appends_to_what_another_wrote(writer):
    """Data read from the slot and passed on is not copied; new data comes after it."""
    first = writer.encoder.encode([np.arange(1000), np.arange(3.0)])
    writer.room.select(writer.room.slot, writer.room.capacity, sum(first))
    batch = decode(writer.room.loan(), first)
    batch[1] = batch[1] * 2
    second = writer.encoder.encode(batch)
    assert sum(second) - sum(first) < 1000
    assert_same([np.arange(1000), np.arange(3.0) * 2], decode(writer.room.memory, second))
    assert_same([np.arange(1000), np.arange(3.0)], decode(writer.room.memory, first))


def test_map_leaves():
    """The function's results replace the leaves, in containers of the same types."""
    batch = {
        "list": [1, 2], "tuple": (3,), "pair": Pair(4, [5]), "sample": Sample(6, 7),
        "frozen": Slotted(8), "ordered": OrderedDict(a=9), 10: defaultdict(None, a=11),
    }  # fmt: skip
    seen = []
    read = map_leaves(lambda leaf: seen.append(leaf) or str(leaf), batch)  # type: ignore[func-returns-value]
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
