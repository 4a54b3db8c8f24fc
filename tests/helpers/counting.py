"""Producers of numbers, and the streams that they should give."""

import itertools
import os
from pathlib import Path

import numpy as np
from kinds import QUICKEST

from cseq.processes.launcher import start_methods
from cseq.stream import Streams

METHODS = start_methods()


class Numbers:
    """Its assignment is the number of items; each has the worker's number, its own and data."""

    def __init__(self, number, num_workers):
        self.number = number
        self.made = 0

    def begin(self, length):
        self.length = length
        self.made = 0
        return "begun", self.number, length

    def item(self, k):
        return self.number, k, np.full(3, 10 * k + self.number)

    def items(self, start):
        for k in range(start, self.length):
            item = self.item(k)
            self.made += 1
            yield item

    def add(self, a, b):
        return self.number, a + b

    def count(self):
        return self.made

    def pid(self):
        return os.getpid()


def streams(producer=Numbers, num_workers=2, **options):
    """Make streams of workers that start in the quickest way."""
    return Streams(producer, num_workers, **({"start_method": QUICKEST.start_method} | options))


def plain(items):
    """Make items comparable, to the bit."""
    return [
        tuple(np.asarray(x).tobytes() if hasattr(x, "dtype") else x for x in item) for item in items
    ]


def in_process(lengths, producer=Numbers):
    """Return the stream of the producers, which run here one after the other."""
    made = [producer(number, len(lengths)) for number in range(len(lengths))]
    for one, length in zip(made, lengths, strict=True):
        one.begin(length)
    rounds = itertools.zip_longest(*(list(one.items(0)) for one in made))
    return plain(item for turn in rounds for item in turn if item is not None)


class Gated(Numbers):
    """Makes one item for each byte from a pipe; item k leaves a file `.k` when its work begins."""

    def __init__(self, gate, number, num_workers):
        super().__init__(number, num_workers)
        self.name = gate
        self.gate = os.open(gate, os.O_RDONLY)

    def item(self, k):
        Path(f"{self.name}.{k}").touch()
        os.read(self.gate, 1)
        return super().item(k)


class Broken(Numbers):
    """Raises a given exception at a given place."""

    def begin(self, assignment):
        self.where, length = assignment
        if self.where == "begin":
            raise self.error()
        return super().begin(length)

    def item(self, k):
        if self.where == k:
            raise self.error()
        return super().item(k)

    def fail(self):
        raise self.error()

    def stop(self):
        raise StopIteration

    def error(self):
        return TwoArguments(self.number, "broken")


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)

    def __str__(self):
        return "{}: {}".format(*self.args)
