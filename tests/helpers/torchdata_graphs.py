"""Graphs of datapipes, and their loaders."""

import os
import random

import numpy as np
import pytest
from kinds import QUICKEST

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES  # noqa: E402
from torchdata.dataloader2 import DataLoader2  # noqa: E402
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe  # noqa: E402

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


def with_pid(item):
    return item, os.getpid()


def double(item):
    return 2 * item


def draw(item):
    """Draw from all generators that a reading service seeds."""
    numpy = int(np.random.randint(2**31))
    return item, random.random(), numpy, int(torch.randint(2**31, ()))


def random_graph():
    return IterableWrapper(range(6)).shuffle().map(draw).sharding_filter().map(draw)
