"""What a lane asks of torch."""

from __future__ import annotations

from typing import Any

import pytest

from cseq.converter.lane import Lane

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


def test_a_cuda_lane_asks_torch_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer's stream waits for the event, and every tensor is recorded on that stream."""
    journal: list[Any] = []

    class Stream:
        def __init__(self, device: object = None) -> None:
            self.device = device

        def wait_event(self, event: object) -> None:
            journal.append(("wait", self.device, event))

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            journal.append(("record", stream.device))

    class Tensor:
        def record_stream(self, stream: Stream) -> None:
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
