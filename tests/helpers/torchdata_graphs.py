"""Graphs of datapipes, and their loaders."""

import os
import random
import time

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

MULTI = SHARDING_PRIORITIES.MULTIPROCESSING

QUICK = QUICKEST.start_method


def service(num_workers=2, context=QUICK, **options):
    """Make a reading service with processes that start fast."""
    return MultiProcessingReadingService(num_workers, context, **options)


def loader(pipe, num_workers=2, context=QUICK, **options):
    """Make a DataLoader2 with this service."""
    return DataLoader2(pipe, reading_service=service(num_workers, context, **options))


def numbers(count=10):
    """A pipe of numbers that the workers share."""
    return IterableWrapper(range(count)).sharding_filter()


def shuffled(count=20):
    """Return the same pipe in random order."""
    return IterableWrapper(range(count)).shuffle().sharding_filter()


def dispatched(count=10):
    """A pipe of numbers that the dispatching process makes."""
    return IterableWrapper(range(count)).sharding_round_robin_dispatch(MULTI)


class Stays(IterDataPipe):
    """A pipe that must not be copied to workers."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        yield from self.source

    def is_replicable(self):
        return False


class Uneven(IterDataPipe):
    """A pipe whose number of items is its worker's number."""

    def __init__(self, counts):
        self.counts = counts

    def __iter__(self):
        number = cseq.worker_info().number
        yield from ((number, item) for item in range(self.counts[number]))


class Oops(Exception):
    """The exception of a test's pipe."""


class Raising(IterDataPipe):
    """A pipe that raises instead of returning an item."""

    def __init__(self, source, place, error):
        self.source, self.place, self.error = source, place, error

    def __iter__(self):
        for place, item in enumerate(self.source):
            if place == self.place:
                raise self.error
            yield item


def with_pid(item):
    return item, os.getpid()


def double(item):
    return 2 * item


def draw(item):
    """Draw from all generators that a reading service seeds."""
    numpy = int(np.random.randint(2**31))
    return item, random.random(), numpy, int(torch.randint(2**31, ()))


def slowly(seconds, item):
    time.sleep(seconds)
    return item


def random_graph():
    return IterableWrapper(range(6)).shuffle().map(draw).sharding_filter().map(draw)


def random_dispatched_graph():
    pipe = IterableWrapper(range(6)).shuffle().map(draw).sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).shuffle()


def long_graph():
    return shuffled(40).map(draw)
