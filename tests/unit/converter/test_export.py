"""Tensors that a converter process exports and the trainer fetches."""

from __future__ import annotations

import pickle
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from converting import FLOAT, SlowLane, same_bits

from cseq.converter.cuda import CudaConverter
from cseq.converter.export import Counts, Handle, Receiver, pack
from cseq.converter.output import rehearse

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


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
    """A batch that is given up is opened: so its converter learns that it may let go of it."""
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
