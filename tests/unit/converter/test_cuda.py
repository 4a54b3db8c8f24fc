"""Conversion on a lane, with the CPU as the device, alone and in managers."""

import json

import numpy as np
import pytest
import rehearsal
from converting import SlowLane, converter, same_bits, watched

import cseq
from cseq.converter.cuda import receive

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


def test_tensors_on_a_lane():
    """CPU tensors travel like arrays, in their own memory order; the indexer's stay unchanged."""
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.eye(3, dtype=torch.float64).to_sparse()
    batch = {"a": images, "b": torch.arange(4)[::2], "c": torch.ones(2, requires_grad=True)}
    batch |= {"d": torch.ones(2, device="meta"), "e": "text", "f": sparse}
    got = receive(converter().convert(batch))
    for name, want in (("a", images), ("b", torch.tensor([0.0, 2.0])), ("c", torch.ones(2))):
        assert same_bits(got[name], want)
    assert got["a"].data_ptr() != images.data_ptr()
    assert not got["c"].requires_grad
    assert (got["d"] is batch["d"], got["e"], got["f"].dtype) == (True, "text", torch.float32)
    assert torch.equal(got["f"].to_dense(), torch.eye(3))


class Ordinary(SlowLane):
    """The device of ordinary memory, which it cannot fetch from."""

    def can_fetch(self, tensor):
        return False


@pytest.mark.parametrize("kind", [SlowLane, Ordinary])
def test_what_the_device_cannot_fetch_is_staged(kind):
    """An array in ordinary memory passes through page-locked memory; others are not copied."""
    lane = kind()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = converter(lane=lane).convert(array)
    assert (lane.journal == [array.ctypes.data]) == (kind is SlowLane)
    assert same_bits(result.batch, torch.from_numpy(array))


def test_memory_is_kept_until_it_was_copied():
    """What a copy reads is kept until the copy is done, even if the batch is dropped."""
    lane = SlowLane()
    cuda = converter(lane=lane)
    first, first_gone = watched(3)
    second, second_gone = watched(4)
    cuda.convert([first])
    cuda.convert([second])
    del first, second
    lane.marks[1].passed = True
    cuda.reap()
    # The lane's order counts: the first copy is not done.
    assert first_gone() is not None
    lane.marks[0].passed = True
    cuda.convert("nothing to send")
    assert first_gone() is None
    assert second_gone() is None
    assert "wait on the host" not in lane.journal


def test_memory_is_kept_after_an_error():
    """An error in the middle of a batch does not release what is being copied."""

    class Full(SlowLane):
        def send(self, tensor):
            if len(tensor) == 4:
                raise RuntimeError("out of memory")
            return super().send(tensor)

    lane = Full()
    cuda = converter(lane=lane)
    first, first_gone = watched(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda.convert([first, np.zeros(4, np.float32)])
    del first
    assert first_gone() is not None
    cuda.close()
    assert first_gone() is None


@pytest.mark.parametrize("how", ["pause", "close", "export"])
def test_a_pause_waits_for_the_copies(how):
    """When it pauses, closes or has exported a batch, a converter waits and releases everything."""
    lane = SlowLane()
    cuda = converter(lane=lane)
    array, gone = watched(3)
    if how == "export":
        cuda.export([array])
    else:
        cuda.convert(array)
    del array
    if how == "pause":
        cuda.reap(wait=True)
    if how == "close":
        cuda.close()
    assert gone() is None
    # A converter that closes makes torch release what consumers have taken.
    assert lane.journal[1:] == ["wait on the host", "collect"][: 1 + (how == "close")]


def test_the_consumer_waits_on_the_device():
    """The consumer joins the lane with every tensor of a transfer, and does not itself wait."""
    lane = SlowLane()
    batch = {"a": np.arange(2), "b": [np.ones(1), 1]}
    transfer = converter(lane=lane).convert(batch)
    lane.journal.clear()
    got = receive(transfer)
    [(verb, event, tensors)] = lane.journal
    assert (verb, event) == ("join", lane.marks[0])
    assert [id(tensor) for tensor in tensors] == [id(got["a"]), id(got["b"][0])]
    # What is no transfer is already a batch.
    assert all(receive(one) is one for one in (batch, (1, 2), None))


def test_a_converter_in_a_thread(tmp_path, monkeypatch):
    """Each batch is converted after it was made, as a trace shows, on its own lane."""
    rehearsal.install(monkeypatch.setattr)
    path = tmp_path / "run.json"
    manager = cseq.MTSequence(
        np.arange(10), batch_size=2, out_type="cuda", num_converters=1, shuffle=False
    )
    assert manager.use_cuda
    with cseq.trace(path), manager.start() as batches:
        got = list(batches)
    assert all(same_bits(one, torch.tensor([2.0 * k, 2.0 * k + 1])) for k, one in enumerate(got))
    assert len(got) == 5
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    for batch in range(5):
        index, convert = slices[f"index 0/{batch}"], slices[f"convert 0/{batch}"]
        assert index["ts"] + index["dur"] <= convert["ts"] + 0.001
        assert index["tid"] != convert["tid"]
