"""The kinds of pool that the contract holds for, and the comparison of batches."""

import os
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
from indexers import Indices1

import cseq
from cseq.processes.launcher import start_methods


@dataclass(frozen=True)
class Kind:
    name: str
    start_method: str | None = None

    @property
    def processes(self):
        return self.start_method is not None

    @property
    def parallel(self):
        return self.name != "inline"

    def make(self, worker, dset_size, num_workers=2, **options):
        """Make a manager, which is of this kind of pool if `start` starts it."""
        options = {"out_type": "null", "seed": 42, "num_workers": num_workers} | options
        if self.processes:
            options["start_method"] = self.start_method
            return cseq.MPSequence(worker, dset_size, **options)
        return cseq.MTSequence(worker, dset_size, **options)

    def begin(self, manager):
        return manager.start() if self.parallel else manager.start_test()

    def start(self, worker, dset_size, num_workers=2, **options):
        return self.begin(self.make(worker, dset_size, num_workers, **options))


# Replaces the quickest start method.
CHOSEN = os.environ.get("CSEQ_TESTS_START")
INLINE, THREAD = Kind("inline"), Kind("thread")
PROCESSES = [Kind(method, method) for method in start_methods()]
FIRST_PROCESS = PROCESSES[0]
PARALLEL = [THREAD, *PROCESSES]
KINDS = [INLINE, *PARALLEL]
# Kinds for tests in which the start method does not matter.
FEW = [INLINE, THREAD, FIRST_PROCESS]
# The cheapest kind of processes: they cost a tenth of spawned ones. What happens once workers run
# (order, rings, slots, leases) is the same code for all start methods.
QUICKEST = next(kind for kind in PROCESSES[::-1] if CHOSEN in (kind.name, None))
QUICK = [INLINE, THREAD, QUICKEST]


def by_name(kind):
    """Return the kind's name, for the name of a test."""
    return kind.name


def stream(kind, worker, dset_size, *, epochs=1, **options):
    """Return all batches of some epochs."""
    with kind.start(worker, dset_size, **options) as manager:
        return [batch for _ in range(epochs) for batch in manager]


def expected(worker, dset_size, *, epochs=1, **options):
    """Return what test mode makes of the same arguments."""
    return stream(INLINE, worker, dset_size, epochs=epochs, **options)


def bits_of(array):
    """Return an array's bytes, so that NaN equals NaN."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same(one, other):
    """Fail unless two batches have the same structure, types, shapes and bits."""
    assert type(one) is type(other)
    if type(one).__name__ == "Tensor":
        one, other = (tensor.contiguous().numpy() for tensor in (one, other))
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flags.writeable == other.flags.writeable
        if one.dtype.hasobject:
            assert one.tolist() == other.tolist()
        else:
            assert np.array_equal(bits_of(one), bits_of(other))
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.generic):
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


every_class = pytest.mark.parametrize("make", [cseq.MSequence, cseq.MPSequence, cseq.MTSequence])


def make_small(**options):
    """Make a manager that costs nothing to start."""
    return cseq.MTSequence(Indices1, 10, **({"out_type": "null", "num_workers": 1} | options))
