"""A lane's calls to torch."""

import pytest

from cseq.converter.lane import Lane, parts

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


def test_a_cuda_lane_asks_torch_in_this_order(monkeypatch):
    """The consumer's stream waits for the event, and every tensor is recorded on that stream."""
    journal = []

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_event(self, event):
            journal.append(("wait", self.device, event))

    class Event:
        def __init__(self, *, blocking):
            assert blocking

        def record(self, stream):
            journal.append(("record", stream.device))

    class Tensor:
        layout = torch.strided

        def record_stream(self, stream):
            journal.append(("use", stream.device))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(("current", device)))
    lane = Lane("cuda:1")
    event = lane.record([])
    lane.join(event, [Tensor(), Tensor()])
    device = torch.device("cuda:1")
    use = ("use", ("current", device))
    assert journal == [("record", device), ("wait", ("current", device), event), use, use]
    assert lane.pins


# torch calls its sparse tensors a beta feature.
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_the_parts_of_a_sparse_tensor(layout):
    """The parts of a sparse tensor are strided, and hold all of its data."""
    values = torch.eye(4)
    blocks = ((2, 2),) if layout.startswith("bs") else ()
    found = parts(getattr(values, f"to_sparse_{layout}")(*blocks))
    assert len(found) == (2 if layout == "coo" else 3)
    assert all(part.layout is torch.strided for part in found)
    assert float(found[-1].sum()) == 4
    assert parts(values) == [values]
