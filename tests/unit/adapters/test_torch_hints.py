"""Log messages about an epoch that is most likely wrong, where torch is silent."""

import re

import pytest
from conftest import complaints

torch = pytest.importorskip("torch")

import cseq  # noqa: E402 - after the check for torch
from cseq.adapters.torch import DataLoader, hints  # noqa: E402
from cseq.order import sampler  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_said():
    """Forget what was logged before."""
    hints.warn.cache_clear()
    sampler.warn.cache_clear()


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A data set of numbers; each worker yields all of them, or its part."""

    def __init__(self, length, *, divides=False):
        self.length, self.divides = length, divides

    def __len__(self):
        if self.length is None:
            raise RuntimeError("its length is not known")
        return int(self.length)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id, 12, info.num_workers) if self.divides else range(12))


@pytest.mark.parametrize("size", [1, 5, None])
def test_a_stream_that_comes_once_per_worker(caplog, size):
    """The log says once how often each sample came, and what to do."""
    loader = DataLoader(Stream(12), size, num_workers=2)
    assert [sum(1 for _ in loader) for _ in range(2)] == [2 * len(range(0, 12, size or 1))] * 2
    [line] = complaints(caplog.messages)
    assert line.startswith("each of 2 workers read all 12 samples of dataset=Stream, so the")
    assert "get_worker_info().id" in line


@pytest.mark.parametrize(
    ("stream", "workers", "size"),
    [
        (Stream(12, divides=True), 2, 4),
        (Stream(12, divides=True), 2, 8),
        (Stream(12, divides=True), 2, 1),
        (Stream(12), 1, 4),
        (Stream(24), 2, 4),
        (Stream(None), 2, 4),
    ],
)
def test_a_stream_about_which_nothing_is_said(caplog, stream, workers, size):
    """It divides its samples, or has no such length, or has one worker."""
    assert sum(1 for _ in DataLoader(stream, size, num_workers=workers)) > 0
    assert complaints(caplog.messages) == []


@pytest.mark.parametrize("kind", ["list", "order", "stream"])
def test_an_epoch_without_batches(caplog, kind):
    """If drop_last leaves nothing, the log says so once; an empty data set without it is silent."""
    options = {"sampler": cseq.Shuffled()} if kind == "order" else {}
    data = Stream(12) if kind == "stream" else list(range(12))
    workers = int(kind == "stream")
    loader = DataLoader(data, 16, drop_last=True, num_workers=workers, **options)
    assert [sum(1 for _ in loader) for _ in range(2)] == [0, 0]
    [line] = complaints(caplog.messages)
    assert re.search("epoch has no batch.*; pass a smaller batch_size, or drop_last=F", line)
    assert [*DataLoader([])] == []
    assert len(complaints(caplog.messages)) == 1
