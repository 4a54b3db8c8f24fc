"""Batches that the codec carries, and the comparisons that tell whether they arrived unchanged."""

import collections
import dataclasses
import itertools
import os
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from slots import writer_of

from cseq.encoding import _codec
from cseq.encoding._plan import LONG
from cseq.encoding.codec import decode
from cseq.encoding.survey import castable, plan_for
from cseq.memory.arena import Arena

FLOAT32 = np.dtype(np.float32)


class Pair(NamedTuple):
    first: Any
    second: Any


class Marked(collections.namedtuple("Marked", "x y")):  # noqa: PYI024 - has a __dict__
    note: str


@dataclass
class Sample:
    image: Any
    label: Any = None
    made: int = field(default=0, init=False)

    def __post_init__(self):
        self.made += 1


@dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    image: Any
    label: Any = None


@dataclass(slots=True)
class Loose:
    image: Any
    label: Any


@dataclass
class Keyed(dict[str, Any]):
    image: Any = None


@dataclass
class Secretive:
    image: Any
    secret: Any = None

    def __getstate__(self):
        return {"image": self.image, "secret": "hidden"}


class Colour(Enum):
    RED = 1


class StrKey(str):
    __slots__ = ()


class Plain:
    def __init__(self, array):
        self.array = array


def forgetting(batch, encoder):
    """Survey a batch, and forget its plan."""
    surveyed = plan_for(batch, encoder)
    encoder.plans.clear()
    return surveyed


@pytest.fixture(scope="module", params=["known", "surveyed"], autouse=True)
def way(request):
    """Run every test both with structures that the writer knows and with new ones."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "surveyed":
            patch.setattr(_codec, "plan_for", forgetting)
        yield request.param


def encode(batch, writer, cast=None):
    """Write a batch, cast; a writer whose cast changes forgets its plans."""
    if writer.encoder.cast is not cast:
        writer.encoder.cast = cast
        writer.encoder.plans.clear()
    return writer.encoder.encode(batch)


def copied(batch, cast=None):
    """Send a batch through a slot of its own, as the second one of its structure."""
    arena = Arena()
    writer = writer_of(arena)
    try:
        encode(batch, writer, cast)
        # The first write may give the writer another memory.
        writer.room.used = 0
        record = encode(batch, writer, cast)
        return decode(writer.room.memory, record)
    finally:
        writer.room.close()
        arena.close()


def sent(writer, batch, cast=None):
    """Send a batch through the slot at hand, from the slot's beginning."""
    writer.room.used = 0
    record = encode(batch, writer, cast)
    assert sum(record) == writer.room.used
    assert len(record) == 4
    return decode(writer.room.memory, record)


def reread(writer, batch, cast=None):
    """Send a batch through the slot at hand, behind what the slot already holds."""
    record = encode(batch, writer, cast)
    return decode(writer.room.memory, record)


def assert_same(a, b):
    """Compare types, structure, order and bits."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert_same_arrays(a, b)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        # A long double has bytes without meaning, so the bytes are not compared.
        assert repr(a) == repr(b)
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        assert_same(list(a.values()), list(b.values()))
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Plain):
        assert_same(a.array, b.array)
    elif dataclasses.is_dataclass(a):
        for name in [f.name for f in dataclasses.fields(a)]:
            assert_same(getattr(a, name), getattr(b, name))
    else:
        # `repr` tells -0.0 from 0.0 and takes NaN as equal to NaN.
        assert repr(a) == repr(b)


def assert_same_arrays(a, b, cast=None):
    """Compare type, shape, strides and bits with an original array, which may have been cast."""
    axes = axes_behind(a)
    if cast is not None and castable(a.dtype):
        a = a.astype(cast)
    laid = np.empty([a.shape[axis] for axis in axes], a.dtype).transpose(np.argsort(axes))
    assert all_of(a.dtype) == all_of(b.dtype)
    assert a.shape == b.shape
    if a.dtype.names:
        # The gaps between fields may hold anything.
        assert repr(a.tolist()) == repr(b.tolist())
    else:
        assert a.tobytes() == b.tobytes()
    assert b.flags.writeable
    assert b.flags.aligned
    assert not a.size or long_axes(b.shape, b.strides) == long_axes(b.shape, laid.strides)


def all_of(dtype):
    """List everything that makes up a type, including what `==` ignores."""
    fields = [
        (name, *map(repr, rest), all_of(of)) for name, (of, *rest) in (dtype.fields or {}).items()
    ]
    kind = None if dtype.subdtype is None else all_of(dtype.base)
    metadata = dict(dtype.metadata or {})
    return dtype.char, dtype.str, dtype.shape, dtype.isalignedstruct, metadata, fields, kind


def axes_behind(array):
    """Return the order of an array's axes in a slot: its own if it has no gaps, or rows."""
    for axes in itertools.permutations(range(array.ndim)):
        turned = array.transpose(axes)
        rows = np.empty(turned.shape, array.dtype)
        if long_axes(rows.shape, rows.strides) == long_axes(turned.shape, turned.strides):
            return axes
    return tuple(range(array.ndim))


def long_axes(shape, strides):
    """List the strides of the axes with more than one element; other strides have no meaning."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


# -- the batches --------------------------------------------------------------------------------

MARKED = np.dtype("i4", metadata={"enum": {"cat": 1}})
# Types that numpy takes as equal to one another, or to a common type.
RESEMBLING = [
    np.dtype(kind)
    for kind in (
        "i4", MARKED, np.dtype("i4", metadata={"enum": {"dog": 1}}), "q", "Q", ">q", "g", "G",
        [("a", "i4")], [("a", MARKED)], [("a", "i4", (2,))], [("a", MARKED, (2,))],
        np.dtype([("a", "i4")], metadata={"of": "a"}), np.dtype([("a", "i4")], align=True),
    )
]  # fmt: skip

dtypes = st.one_of(
    npst.boolean_dtypes(), npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"), npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(), npst.datetime64_dtypes(), npst.timedelta64_dtypes(),
    npst.byte_string_dtypes(max_len=4), npst.unicode_string_dtypes(max_len=4),
    st.just(np.dtype([("a", ">i2"), ("b", "f4", (2,)), ("c", "S3")])),
    st.just(np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    st.sampled_from(RESEMBLING),
)  # fmt: skip


LAYOUTS = {
    "C": np.copy,
    "F": np.asfortranarray,
    "strided": lambda array: array[..., ::2] if array.ndim else array,
    "transposed": np.transpose,
    "repeated": lambda array: np.broadcast_to(array, (3, *array.shape)),
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "axis": lambda array: array[:1, None] if array.ndim else array,
    "read-only": lambda array: array,
}


@st.composite
def arrays(draw):
    """Return arrays of all types, shapes and orders."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = draw(dtypes)
    data = os.urandom(dtype.itemsize * int(np.prod(shape)))
    if dtype.kind in "bU":
        # Not every byte string is a value of these types.
        data = b"\1" * len(data) if dtype.kind == "b" else bytes(len(data))
    array = (
        np.frombuffer(data, np.uint8).view(dtype).reshape(shape) if data else np.zeros(shape, dtype)
    )
    return LAYOUTS[draw(st.sampled_from([*LAYOUTS]))](array)


scalars = st.sampled_from(
    [np.float32(1.5), np.float64("nan"), np.bool_(True), np.int8(-3), np.uint64(2**63),
     np.complex64(1j), np.float16(-0.0), np.datetime64("2020-01-01", "D"),
     np.timedelta64(3, "us"), np.str_("text"), np.bytes_(b"bytes"),
     np.longdouble(1) / 3, np.longlong(3), np.ulonglong(3)]
)  # fmt: skip
leaves = st.one_of(
    arrays(), scalars, st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.none(), st.booleans(), st.complex_numbers(), st.just(b"x" * LONG),
    st.just(Colour.RED), st.just(range(3)), st.just({1, 2}), st.just(slice(1, None)),
)  # fmt: skip
odd_keys = st.sampled_from([0.0, 1.0, (1, "a"), None])
keys = st.one_of(st.text(max_size=3), st.integers(0, 2), st.booleans(), odd_keys)


def containers(inner):
    """Return containers of batches."""
    few = st.lists(inner, max_size=4)
    mapping = st.dictionaries(st.text(max_size=3), inner, max_size=4)
    lists = mapping.map(lambda items: defaultdict(list, items))
    others = [st.builds(kind, inner, inner) for kind in (Pair, Sample, Frozen, Slotted)]
    others.append(st.dictionaries(keys, inner, max_size=4))
    return st.one_of(few, few.map(tuple), mapping, mapping.map(OrderedDict), lists, *others)


batches = st.recursive(leaves, containers, max_leaves=12)


class Feature(collections.UserDict[str, Any]):
    """An object with any content."""
