"""Conversion on a lane, with the CPU as the device, alone and in managers."""

import json

import numpy as np
import pytest
import rehearsal
from converting import SlowLane, converter, same_bits, watched

import cseq
from cseq.converter.cuda import CudaConverter, receive

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


def test_tensors_on_a_lane():
    """CPU tensors travel like arrays, in their own memory order; the indexer's stay unchanged."""
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.eye(3, dtype=torch.float64).to_sparse()
    batch = {"a": images, "b": torch.arange(4)[::2], "c": torch.ones(2, requires_grad=True)}
    batch |= {"d": torch.ones(2, device="meta"), "e": "text", "f": sparse}
    got = receive(converter().convert(batch))
    assert same_bits(got["a"], images)
    assert got["a"].data_ptr() != images.data_ptr()
    assert same_bits(got["b"], torch.tensor([0.0, 2.0]))
    assert same_bits(got["c"], torch.ones(2))
    assert not got["c"].requires_grad
    assert got["d"] is batch["d"]
    assert got["e"] == "text"
    assert got["f"].dtype == torch.float32
    assert torch.equal(got["f"].to_dense(), torch.eye(3))


def test_what_the_device_can_fetch_is_not_copied_before():
    """An array in page-locked memory, of the right type, is copied from its place."""
    lane = SlowLane()
    array = np.zeros((3, 4), np.float32)
    converter(lane=lane).convert(array)
    assert lane.journal == [array.ctypes.data]


def test_what_the_device_cannot_fetch_is_staged():
    """An array in ordinary memory passes through page-locked memory."""

    class Ordinary(SlowLane):
        def can_fetch(self, tensor):
            return False

    lane = Ordinary()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = converter(lane=lane).convert(array)
    assert lane.journal != [array.ctypes.data]
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


def test_a_pause_waits_for_the_copies():
    """Before it pauses, and when it closes, a converter waits and releases everything."""
    for stop in (lambda cuda: cuda.reap(wait=True), CudaConverter.close):
        lane = SlowLane()
        cuda = converter(lane=lane)
        array, gone = watched(3)
        cuda.convert(array)
        del array
        stop(cuda)
        assert gone() is None
        assert "wait on the host" in lane.journal


def test_the_consumer_waits_on_the_device():
    """The consumer joins the lane with every tensor of the batch, and does not itself wait."""
    lane = SlowLane()
    batch = {"a": np.arange(2), "b": [np.ones(1), 1]}
    transfer = converter(lane=lane).convert(batch)
    lane.journal.clear()
    got = receive(transfer)
    assert len(lane.journal) == 1
    verb, event, tensors = lane.journal[0]
    assert (verb, event) == ("join", lane.marks[0])
    assert [id(tensor) for tensor in tensors] == [id(got["a"]), id(got["b"][0])]


def test_other_results_are_received_as_they_are():
    """A result that is no transfer is already a batch."""
    for batch in (np.arange(3), (1, 2), None):
        assert receive(batch) is batch


def test_exporting_waits_for_the_copies():
    """A process may overwrite a batch's memory once it has exported the batch."""
    lane = SlowLane()
    cuda = converter(lane=lane)
    array, gone = watched(3)
    cuda.export([array])
    del array
    assert gone() is None
    assert lane.journal[-1] == "wait on the host"


def test_closing_collects():
    """A converter that closes makes torch release what consumers have taken."""
    lane = SlowLane()
    converter(lane=lane).close()
    assert lane.journal == ["collect"]


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
