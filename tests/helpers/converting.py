"""Batches for the tests of conversion, and a slow device."""

import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import rehearsal
from codec_batches import long_axes

from cseq.converter.cuda import CudaConverter
from cseq.converter.host import Converter
from cseq.converter.output import parse, resolve

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")

FLOAT = parse("cpu", "float32")


def same_bits(left, right):
    """Return whether tensors or arrays have the same type, shape, strides and bits."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        strides = [long_axes(each.shape, each.stride()) for each in (left, right)]
        if left.dtype != right.dtype or (left.numel() and strides[0] != strides[1]):
            return False
        if left.dtype == torch.bfloat16:
            left, right = left.view(torch.int16), right.view(torch.int16)
        left, right = left.cpu().numpy(), right.cpu().numpy()
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return bool(same_kind and left.tobytes() == right.tobytes())


def lone(output):
    """Return the function that converts one batch."""
    return Converter(resolve(output)).convert


def read_only(array):
    """Make an array read-only."""
    array.flags.writeable = False
    return array


# fmt: off
RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.random((3, 4), np.float32), "float64": RNG.random((3, 4)),
    "float16": RNG.random((3, 4)).astype(np.float16),
    "uint8": RNG.integers(0, 255, (3, 4), np.uint8),
    "uint64": RNG.integers(0, 2**64, (3, 4), np.uint64),
    "int64": RNG.integers(-(2**62), 2**62, (3, 4)),
    "bool": RNG.random((3, 4)) > 0.5, "complex128": RNG.random((3, 4)) + 1j,
    "longdouble": RNG.random((3, 4)).astype(np.longdouble),
    "unsigned long long": RNG.integers(0, 2**64, (3, 4), np.uint64).astype(np.ulonglong),
    "big endian": RNG.random((3, 4)).astype(">f4"),
    "big endian integers": np.arange(12).astype(">i2"),
    "read-only": read_only(RNG.random((3, 4), np.float32)),
    "read-only of another type": read_only(RNG.random((3, 4))),
    "backwards": RNG.random((3, 4), np.float32)[::-1, ::-2],
    "repeated": np.broadcast_to(np.float32(1.5), (3, 4)),
    "repeated and of another type": np.broadcast_to(RNG.random((2, 1, 4)), (3, 2, 5, 4)),
    "one row, backwards": RNG.random((1, 4), np.float32)[::-1],
    "columns": RNG.random((3, 4), np.float32)[:, 1:3],
    "Fortran": np.asfortranarray(RNG.random((3, 4, 5), np.float32)),
    "Fortran of another type": np.asfortranarray(RNG.random((3, 4, 5))),
    "transposed images": RNG.random((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2),
    "no dimensions": np.array(2.5), "no dimensions, ready": np.array(2.5, np.float32),
    "empty": np.empty((0, 3), np.float32), "empty of another type": np.empty((4, 0)),
    "field of packed records": np.zeros(4, "u1,f4")["f1"],
    "special": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-50, 1 / 3]),
}
UNTOUCHED = {
    "text": np.array(["a", "bc"]), "bytes": np.array([b"a", b"bc"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"), "objects": np.array([None, 1], object),
    "records": np.zeros(4, "u1,f4"), "masked": np.ma.array([1.0, 2.0], mask=[True, False]),
}
# fmt: on


class Mark:
    """An event that the test passes."""

    def __init__(self, journal):
        self.passed, self.journal = False, journal

    def query(self):
        return self.passed

    def synchronize(self):
        """Record the wait, and pass."""
        self.journal.append("wait on the host")
        self.passed = True


class SlowLane(rehearsal.CpuLane):
    """A slow device that records what it is asked to do."""

    def __init__(self):
        super().__init__()
        self.journal, self.marks, self.inside = [], [], False

    @contextmanager
    def active(self):
        self.inside = True
        yield
        self.inside = False

    def send(self, tensor):
        assert self.inside
        self.journal.append(tensor.data_ptr())
        return super().send(tensor)

    def event(self):
        """Make a mark that has not passed."""
        assert self.inside
        self.marks.append(Mark(self.journal))
        return self.marks[-1]

    def join(self, event, tensors):
        assert not self.inside
        self.journal.append(("join", event, tensors))

    def collect(self):
        self.journal.append("collect")


def converter(output=FLOAT, lane=None):
    """Make a converter to the CPU that uses a lane."""
    with rehearsal.on(lane or rehearsal.CpuLane()):
        return CudaConverter(rehearsal.rehearse(output))


class Source(np.ndarray):
    """An array that can be watched."""


def watched(size):
    """Make an array in memory that plays page-locked memory, and watch it."""
    array = np.arange(size, dtype=np.float32).view(Source)
    return array, weakref.ref(array)
