"""Objects, dataclasses and pickles arrive unchanged in a batch, or an error says why not."""

import copyreg
import threading
from collections import OrderedDict
from fractions import Fraction

import codec_batches
import numpy as np
import pytest
from codec_batches import (
    FLOAT32,
    Feature,
    Keyed,
    Loose,
    Marked,
    Pair,
    Plain,
    Sample,
    Secretive,
    Slotted,
    assert_same,
    assert_same_arrays,
    copied,
    sent,
)

from cseq.converter.host import Converter
from cseq.converter.output import Output
from cseq.encoding import codec
from cseq.encoding.codec import map_leaves
from cseq.encoding.pickling import UnpicklableError

way = codec_batches.way


def test_dataclasses_are_not_made_again():
    """Neither `__init__` nor `__post_init__` runs again; fields and attributes are kept."""
    sample = Sample(np.arange(3))
    sample.extra = np.arange(4)  # type: ignore[attr-defined]
    read = copied(sample)
    assert read.made == 1
    assert_same(np.arange(4), read.extra)
    # A deleted field is absent after the journey, too, as is one that was never set.
    del sample.made
    assert "made" not in vars(copied(sample))
    empty = object.__new__(Loose)
    empty.image = np.arange(3)
    read = copied([empty, np.arange(2)])[0]
    assert_same(empty.image, read.image)
    assert not hasattr(read, "label")


def test_dataclasses_that_are_more_go_by_pickle():
    """A dataclass that is also a dict, or that defines its pickling, is pickled."""
    keyed = Keyed(np.arange(3))
    keyed["a"] = np.arange(2)
    read = copied(keyed)
    assert_same(dict(keyed), dict(read))
    assert_same(keyed.image, read.image)
    assert copied(Secretive(np.arange(3), "x")).secret == "hidden"


def test_named_tuples_of_a_known_structure_keep_attributes(writer):
    """It holds even after one without attributes."""
    for _ in range(2):
        marked = Marked(np.arange(3), 1)
        assert vars(sent(writer, marked)) == {}
        marked.note = "kept"
        assert sent(writer, marked).note == "kept"


def test_leaves_of_objects_are_cast_where_they_are_converted(writer):
    """The trainer casts them in dataclasses and dicts of any kind, but not in other classes."""
    large, small = np.arange(9000).reshape(9, 1000), np.arange(4)[::2]
    convert = Converter(Output("array", dtype=FLOAT32)).convert
    for make in (Sample, Slotted, lambda *pair: {0: pair}, lambda *pair: OrderedDict(a=pair)):
        batch = make(large.T, [small, "text"])
        read, leaves = convert(sent(writer, batch, FLOAT32)), []
        map_leaves(leaves.append, read)
        arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        assert type(read) is type(batch)
        assert_same_arrays(large.T.astype("f4", order="A"), arrays[0])
        assert_same_arrays(small.astype("f4"), arrays[1])
    assert_same_arrays(large, convert(sent(writer, Plain(large), FLOAT32)).array)
    assert_same_arrays(large, convert(sent(writer, Feature(x=large), FLOAT32))["x"])


def test_a_reducer_that_is_registered_later_is_used(monkeypatch):
    """So is a reducer that replaces it; none is used once it is unregistered."""
    assert copied([Fraction(1, 3)]) == [Fraction(1, 3)]
    for value in (7, 8):
        monkeypatch.setitem(copyreg.dispatch_table, Fraction, lambda _, to=value: (Fraction, (to,)))
        assert copied([Fraction(1, 3)]) == [value]
    monkeypatch.delitem(copyreg.dispatch_table, Fraction)
    assert copied([Fraction(1, 3)]) == [Fraction(1, 3)]


def test_other_arrays_go_by_pickle():
    """Arrays of objects, and subclasses of array, keep their type."""
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


def test_buffers_of_pickles_lie_in_the_slot(writer):
    """A large array inside an object is read in place; a small one is not worth it."""
    large, small = np.arange(1000), np.arange(5)
    odd = np.arange(1001, dtype=np.uint32).view(np.uint8)[1:]
    read = sent(writer, [Plain(odd), Plain(large), Plain(small), np.arange(3)])
    start = writer.room.memory.address
    for number, array in enumerate([odd, large]):
        lies = read[number].array
        assert_same(array, lies)
        assert start <= lies.ctypes.data < start + writer.room.used
        assert lies.ctypes.data % 64 == 0
    assert_same(small, read[2].array)


class Stubborn:
    def __reduce__(self):
        raise ValueError("no")


BAD = [
    threading.Lock(), (i for i in [1]), Stubborn(), memoryview(b"abc"), {}.keys(), {}.values(),
    OrderedDict(a=1).items(),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=type)
@pytest.mark.parametrize(
    "make",
    [
        lambda bad: bad,
        lambda bad: {"x": (np.zeros(2), [1, {2: bad}])},
        lambda bad: Pair(np.zeros(3), Sample(np.zeros(2), bad)),
        lambda bad: [Plain(bad)],
    ],
)
def test_what_cannot_be_pickled_is_refused(bad, make):
    """The error says what a batch may contain."""
    with pytest.raises(UnpicklableError, match=r"^batch: .*\. Return arrays, tensors"):
        copied(make(bad))


def test_an_open_file_cannot_be_in_a_batch():
    """Neither a text file nor a binary file arrives as another object."""
    for mode in ("r", "rb"):
        with open(__file__, mode) as file, pytest.raises(UnpicklableError, match=r"^batch: "):
            copied({"log": file, "x": np.zeros(2)})


def test_a_batch_that_contains_itself():
    """It arrives unchanged; where leaves are converted, it is an error, not a crash."""
    endless = [np.zeros(3)]
    endless.append({"again": endless, "number": 7})
    read = copied(endless)
    assert len(read) == 2
    assert read[1]["again"] is read
    assert read[1]["number"] == 7
    assert_same(read[0], endless[0])
    with pytest.raises(ValueError, match="contains itself"):
        map_leaves(lambda leaf: leaf, endless)


def test_deep_batches():
    """Containers may be nested more deeply than they are opened."""
    batch = np.zeros(3)
    for _ in range(codec.MAX_DEPTH):
        batch = [batch]
    assert_same(batch, copied(batch))
    assert_same(batch, copied(batch, np.dtype("f8")))
    batch = [batch, (np.arange(4000), "a")]
    assert_same(batch, copied(batch))
    assert_same(batch, copied(batch, np.dtype("f4")))


def test_what_is_twice_in_a_batch():
    """Arrays, and containers of them, become two objects; pickled objects stay one."""
    arrays, texts = [np.zeros(3)], ["a"]
    read = copied([arrays, arrays, arrays[0], texts, {"x": (np.ones(2), texts)}])
    assert read[0] is not read[1]
    assert not np.shares_memory(read[0][0], read[1][0])
    assert not np.shares_memory(read[0][0], read[2])
    assert read[3] is read[4]["x"][1]
