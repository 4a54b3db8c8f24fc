"""Keys that the trainer draws, as in a DataLoader: 32 ints each, for two small tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from harness.case import Case, Contender, Goal, scaled
from work import Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The number of keys per worker, as in a DataLoader by default.
PREFETCH = 2


class Pairs:
    """A producer, and a data set of batches: 32 x 8 floats and 32 numbers."""

    def __init__(self, *_: int) -> None:
        pass

    def begin(self, assignment: Any) -> None:
        """Do nothing."""

    def make(self, key: list[int]) -> Any:
        """Make the batch for a key."""
        import torch

        return torch.zeros(32, 8), torch.tensor(key)

    __getitem__ = make


def keys(work: Work) -> Iterator[list[int]]:
    """Return the keys of an epoch in order."""
    return (list(range(k * 32, k * 32 + 32)) for k in range(work.batches))


class KeyEpochs:
    """`Streams` that run the epochs of a `Work`."""

    def __init__(self, work: Work, streams: Any, *, ordered: bool) -> None:
        self.work = work
        self.streams = streams
        self.ordered = ordered

    def __iter__(self) -> Iterator[Any]:
        count = self.streams.num_workers
        self.streams.begin([None] * count, keys(self.work), ordered=self.ordered)
        return iter(self.streams)


def cseq_streams(work: Work, *, ordered: bool = True) -> Iterator[Callable[[], float]]:
    """`Streams` with keys. As in a DataLoader, torch is imported before the workers are forked."""
    import torch  # noqa: F401

    from cseq.stream import Streams

    with Streams(Pairs, work.num_workers, prefetch=PREFETCH, start_method="fork") as streams:
        yield partial(work.measure, KeyEpochs(work, streams, ordered=ordered))


class Sampler:
    """The keys as a torch sampler."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[list[int]]:
        return keys(self.work)


def torch_dataloader(work: Work) -> Iterator[Callable[[], float]]:
    """`DataLoader` with the same keys, batches and workers."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Pairs(),  # type: ignore[arg-type]
        sampler=Sampler(work),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=work.num_workers,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    yield partial(work.measure, loader)
    del loader


WORK = Work(Pairs, scaled(20_000, 40), microseconds)
OURS, UNORDERED, TORCH = "cseq, keys", "cseq, keys, in no order", "torch DataLoader"

CASES = (
    Case(
        "keys",
        "Batches by keys of a sampler in the trainer",
        "µs/batch",
        (
            Contender(OURS, partial(cseq_streams, WORK), needs=("torch",), ours=True),
            Contender(
                UNORDERED, partial(cseq_streams, WORK, ordered=False), needs=("torch",), ours=True
            ),
            Contender(TORCH, partial(torch_dataloader, WORK.part(20)), needs=("torch",)),
        ),
        goals=(Goal("part of the DataLoader's time", lambda f: f[OURS] / f[TORCH], 1 / 10),),
    ),
)
