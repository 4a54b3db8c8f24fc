"""Graphs of datapipes, and loaders of them."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kinds import QUICKEST

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES  # noqa: E402
from torchdata.dataloader2 import DataLoader2  # noqa: E402
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torchdata import MultiProcessingReadingService  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


MULTI = SHARDING_PRIORITIES.MULTIPROCESSING

QUICK = QUICKEST.start_method


def service(num_workers: int = 2, context: str | None = QUICK, **options: Any) -> Any:
    """Make a reading service that starts its processes fast."""
    return MultiProcessingReadingService(num_workers, context, **options)


def loader(pipe: Any, num_workers: int = 2, context: str | None = QUICK, **options: Any) -> Any:
    """Make a DataLoader2 with it."""
    return DataLoader2(pipe, reading_service=service(num_workers, context, **options))


def numbers(count: int = 10) -> Any:
    """A pipe of numbers, of which every worker gets its share."""
    return IterableWrapper(range(count)).sharding_filter()


def shuffled(count: int = 20) -> Any:
    """The same, in random order."""
    return IterableWrapper(range(count)).shuffle().sharding_filter()


def dispatched(count: int = 10) -> Any:
    """A pipe of numbers, made in the dispatching process."""
    return IterableWrapper(range(count)).sharding_round_robin_dispatch(MULTI)


class Stays(IterDataPipe):
    """A pipe that must not be copied to workers."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def is_replicable(self) -> bool:
        return False


class Uneven(IterDataPipe):
    """A pipe that has as many items as its worker's number says."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        number = cseq.worker_info().number
        yield from ((number, item) for item in range(self.counts[number]))


class Oops(Exception):
    """What a test's pipe raises."""


class Raising(IterDataPipe):
    """A pipe that raises in the place of an item."""

    def __init__(self, source: Any, place: int, error: Exception) -> None:
        self.source, self.place, self.error = source, place, error

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(self.source):
            if place == self.place:
                raise self.error
            yield item


def with_pid(item: Any) -> tuple[Any, int]:
    return item, os.getpid()


def double(item: Any) -> Any:
    return 2 * item


def draw(item: Any) -> Any:
    """Draw from all generators that a reading service seeds."""
    numpy = int(np.random.randint(2**31))
    return item, random.random(), numpy, int(torch.randint(2**31, ()))


def slowly(seconds: float, item: Any) -> Any:
    time.sleep(seconds)
    return item


# -- 8, D 5: seeds


def random_graph() -> Any:
    return IterableWrapper(range(6)).shuffle().map(draw).sharding_filter().map(draw)


def random_dispatched_graph() -> Any:
    pipe = IterableWrapper(range(6)).shuffle().map(draw).sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).shuffle()


def long_graph() -> Any:
    return shuffled(40).map(draw)
