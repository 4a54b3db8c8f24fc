"""Streams of keyed items, and iterators that draw the keys."""

import numpy as np
from kinds import QUICKEST

from cseq.stream import Streams


class Makes:
    """An item is its worker's number, its key, and some data."""

    def __init__(self, number, num_workers):
        self.number = number
        self.assignment = None

    def begin(self, assignment):
        self.assignment = assignment

    def make(self, key):
        return self.number, key, np.full(3, self.number)


def streams(producer=Makes, num_workers=2, **options):
    """Make streams of workers that start in the quickest way."""
    options = {"start_method": QUICKEST.start_method, "prefetch": 2} | options
    return Streams(producer, num_workers, **options)


def begin(s, keys, **options):
    """Begin an epoch of keys; the assignments do not matter."""
    assert s.begin([0] * s.num_workers, iter(keys), **options) == []


def lists(count):
    """Return keys like a batch sampler's."""
    return [[k, -k] for k in range(count)]


def keys_of(items):
    """Return the keys of some items."""
    return [item[1] for item in items]


class Counting:
    """An iterator that records how many keys were drawn."""

    def __init__(self, keys):
        self.keys = iter(keys)
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        key = next(self.keys)
        self.drawn += 1
        return key
