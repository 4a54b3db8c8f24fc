"""Streams of keyed items, and iterators that draw the keys."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from kinds import QUICKEST

from cseq.stream import Streams

# Seconds between two looks at a state that nothing signals.
PAUSE = 0.0005


class Makes:
    """An item is its worker's number, its key, and some data."""

    def __init__(self, number, num_workers):
        self.number = number
        self.num_workers = num_workers
        self.assignment: Any = None
        self.made = 0

    def begin(self, assignment):
        self.assignment = assignment
        self.made = 0
        return assignment

    def make(self, key):
        self.made += 1
        return self.number, key, np.full(3, self.number)

    def items(self, start):
        for k in range(start, self.assignment):
            yield self.make([k])

    def add(self, a, b):
        return self.number, a + b

    def assigned(self):
        return self.assignment

    def pid(self):
        return os.getpid()

    def fail(self):
        raise ZeroDivisionError("in a call")


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
    """An iterator that records how many keys were drawn, and in which threads."""

    def __init__(self, keys):
        self.keys = iter(keys)
        self.drawn = 0
        self.threads: set[int] = set()

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.get_ident())
        key = next(self.keys)
        self.drawn += 1
        return key


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)
