"""The adapters, each compared with the original. An item is a sample or a sequence."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.case import Case, Contender, Goal, scaled
from work import Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS, THEIRS = "cseq's", "the original"
# float32 arrays of 128 bytes and of 1 MB.
SHAPES = {"small": (32, 1), "large": (2185, 120)}
ITEMS = {"small": scaled(20_000, 40), "large": scaled(400, 12)}
# The sequences that each RETURNN worker keeps.
BUFFER = 20


def work_of(size: str, part: int = 1) -> Work:
    """Return a `Work` whose batches are single items."""
    return Work(partial(make, size), max(1, ITEMS[size] // part), microseconds, batch_size=1)


def make(size: str, _: object = None) -> Any:
    """Make an item."""
    return np.zeros(SHAPES[size], np.float32)


# -- torchdata's MultiProcessingReadingService


def torchdata(size: str, part: int, *, original: bool) -> Iterator[Callable[[], float]]:
    """Measure a DataLoader2 over a mapped range whose items are made by two processes."""
    # The warnings say that datapipes are deprecated.
    warnings.simplefilter("ignore")
    from torchdata.dataloader2 import DataLoader2
    from torchdata.datapipes.iter import IterableWrapper

    if original:
        from torchdata.dataloader2 import MultiProcessingReadingService
    else:
        from cseq.adapters.torchdata import MultiProcessingReadingService
    work = work_of(size, part)
    pipe = IterableWrapper(range(work.batches), deepcopy=False).shuffle().sharding_filter()
    loader = DataLoader2(
        pipe.map(partial(make, size)),
        reading_service=MultiProcessingReadingService(num_workers=work.num_workers),
    )
    yield partial(work.measure, loader)
    loader.shutdown()


# -- RETURNN's MultiProcDataset


class Sequences:
    """Reads a RETURNN dataset epoch by epoch, as RETURNN's trainer does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        dataset = self.dataset
        dataset.init_seq_order(epoch=self.epoch)
        number = 0
        while dataset.is_less_than_num_seqs(number):
            dataset.load_seqs(number, number + 1)
            yield dataset.get_data(number, "data")
            number += 1


def returnn(size: str, part: int, *, original: bool) -> Iterator[Callable[[], float]]:
    """Measure a MultiProcDataset over sequences in memory, in random order."""
    from returnn_data import InMemory

    work = work_of(size, part)
    inner = {"class": InMemory, "length": work.batches, "shape": SHAPES[size]}
    yield from over(inner, work, original=original)


def task12ax(part: int, *, original: bool | None) -> Iterator[Callable[[], float]]:
    """Measure a MultiProcDataset over RETURNN's Task12AXDataset, or the latter alone (None)."""
    work = work_of("small", 5 * part)
    yield from over({"class": "Task12AXDataset", "num_seqs": work.batches}, work, original=original)


def over(
    inner: dict[str, Any], work: Work, *, original: bool | None
) -> Iterator[Callable[[], float]]:
    """Wrap a dataset unless `original` is None, and iterate over it."""
    from returnn.datasets.basic import init_dataset

    if original:
        from returnn.datasets.multi_proc import MultiProcDataset
    else:
        from cseq.adapters.returnn import MultiProcDataset
    wrapped = {
        "class": MultiProcDataset,
        "dataset": inner,
        "num_workers": work.num_workers,
        "buffer_size": BUFFER,
    }
    dataset = init_dataset(inner if original is None else wrapped)
    yield partial(work.measure, Sequences(dataset))
    dataset.finish_epoch(free_resources=True)


GOALS = {"small": 10, "large": 5}


def case(adapter: str, title: str, run: Callable[..., Any], size: str) -> Case:
    """Declare a case: an adapter and its original, the latter with shorter epochs."""
    mine = (f"cseq.adapters.{adapter}", adapter)
    return Case(
        f"{adapter}_{size}",
        f"{title}: {size} items",
        "µs/item",
        (
            Contender(OURS, partial(run, size, 1, original=False), needs=mine, ours=True),
            Contender(THEIRS, partial(run, size, 5, original=True), needs=(adapter,)),
        ),
        goals=(Goal("times as fast", lambda f: f[THEIRS] / f[OURS], at_least=GOALS[size]),),
    )


ALONE = "in process"
TASK12AX = Case(
    "returnn_task12ax",
    "RETURNN's MultiProcDataset: Task12AXDataset, whose sequences are computed",
    "µs/item",
    (
        Contender(
            OURS,
            partial(task12ax, 1, original=False),
            needs=("cseq.adapters.returnn", "returnn"),
            ours=True,
        ),
        Contender(THEIRS, partial(task12ax, 1, original=True), needs=("returnn",)),
        Contender(ALONE, partial(task12ax, 1, original=None), needs=("returnn",)),
    ),
    goals=(Goal("times the rate in process", lambda f: f[ALONE] / f[OURS], at_least=1.7),),
)

CASES = (
    *(
        case("torchdata", "torchdata's MultiProcessingReadingService", torchdata, size)
        for size in SHAPES
    ),
    *(case("returnn", "RETURNN's MultiProcDataset", returnn, size) for size in SHAPES),
    TASK12AX,
)
