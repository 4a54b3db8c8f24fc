"""Batches that a converter process exports and the trainer fetches."""

import sys
import weakref

import numpy as np
import pytest
import rehearsal
from converting import FLOAT, SlowLane, converter, same_bits
from exports import Receiver, Theirs

from cseq.converter.export import pack
from cseq.encoding.pickling import dumps

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


STORE = {}


def fetch(key):
    """Stand in for opening memory of another process."""
    return STORE[key][:]


def receiver(lane=None):
    """Make the trainer's end."""
    with rehearsal.on(lane or rehearsal.CpuLane()):
        return Receiver(rehearsal.rehearse(FLOAT))


@pytest.fixture
def store():
    """Return the memory of the other process."""
    yield STORE
    STORE.clear()


def test_what_is_on_the_cpu_is_pickled():
    """It covers tensors on the CPU, arrays and everything else."""
    exported = converter().export([torch.ones(2), np.ones(1), "text"])
    one, two, text = receiver().unpack(exported)
    assert same_bits(one, torch.ones(2))
    assert same_bits(two, torch.ones(1))
    assert text == "text"


def test_a_tensor_on_the_device_is_pickled_by_torchs_reduction(store, monkeypatch):
    """The pickle opens the tensor's memory, for any size."""
    store["x"] = torch.arange(1000)

    class Device(torch.Tensor):
        is_cuda = True

    reductions = pytest.importorskip("torch.multiprocessing.reductions")
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (fetch, ("x",)))
    packed = pack([torch.zeros(1000).as_subclass(Device)])
    assert len(packed) < 300
    assert same_bits(receiver().unpack(packed)[0], torch.arange(1000))


def test_a_received_batch_is_the_consumers_own(store):
    """A received tensor is in the consumer's memory, in the same memory order."""
    store |= {"x": torch.rand(3, 4).T, "y": torch.arange(3)}
    before = store["x"].clone()
    batch = receiver().unpack(dumps({"x": Theirs(fetch, "x"), "z": [1, Theirs(fetch, "y")]}))
    for tensor in store.values():
        tensor.zero_()
    assert same_bits(batch["x"], before)
    assert batch["z"][0] == 1
    assert same_bits(batch["z"][1], torch.arange(3))


def test_memory_of_the_other_process_is_let_go(store, monkeypatch):
    """The other process's memory is released when the copy is done, on the receiver's own lane."""
    gone = []

    class Opened(torch.Tensor):
        """A tensor from the other process."""

        def clone(self):
            return self.as_subclass(torch.Tensor).clone()

    def fetched(key):
        opened = store[key][:].as_subclass(Opened)
        gone.append(weakref.ref(opened, lambda _: inside.append(lane.inside)))
        return opened

    # A pickle looks for this name.
    fetched.__qualname__ = "fetch"
    monkeypatch.setattr(sys.modules[__name__], "fetch", fetched)
    inside = []
    lane = SlowLane()
    received = receiver(lane)
    store["x"] = torch.arange(3)
    packed = dumps([Theirs(fetched, "x")])
    first = received.unpack(packed)
    received.unpack(packed)
    assert [ref() is None for ref in gone] == [False, False]
    assert lane.journal[0][:2] == ("join", lane.marks[0])
    assert lane.journal[0][2][0] is first[0]
    lane.marks[0].passed = True
    received.unpack(dumps([]))
    assert [ref() is None for ref in gone] == [True, False]
    received.close()
    assert [ref() is None for ref in gone] == [True, True]
    assert inside == [True, True]
