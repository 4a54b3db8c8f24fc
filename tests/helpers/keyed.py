"""Streams whose items are named by keys, and what draws the keys."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from kinds import QUICKEST

from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PAUSE = 0.0005  # seconds between two looks at what nothing signals


class Makes:
    """An item is its worker's number, its key, and some data."""

    def __init__(self, number: int, num_workers: int) -> None:
        self.number = number
        self.num_workers = num_workers
        self.assignment: Any = None
        self.made = 0

    def begin(self, assignment: Any) -> Any:
        self.assignment = assignment
        self.made = 0
        return assignment

    def make(self, key: Any) -> Any:
        self.made += 1
        return self.number, key, np.full(3, self.number)

    def items(self, start: int) -> Iterator[Any]:
        for k in range(start, self.assignment):
            yield self.make([k])

    def add(self, a: int, b: int) -> tuple[int, int]:
        return self.number, a + b

    def assigned(self) -> Any:
        return self.assignment

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ZeroDivisionError("in a call")


def streams(
    producer: Callable[[int, int], Any] = Makes, num_workers: int = 2, **options: Any
) -> Streams:
    """Make streams of workers that are started in the quickest way."""
    options = {"start_method": QUICKEST.start_method, "prefetch": 2} | options
    return Streams(producer, num_workers, **options)


def begin(s: Streams, keys: Any, **options: Any) -> None:
    """Begin an epoch of keys; the assignments are of no account."""
    assert s.begin([0] * s.num_workers, iter(keys), **options) == []


def lists(count: int) -> list[list[int]]:
    """Keys as a batch sampler's."""
    return [[k, -k] for k in range(count)]


def keys_of(items: Any) -> list[Any]:
    """The keys of some items."""
    return [item[1] for item in items]


class Counting:
    """An iterator that knows how many keys were drawn, and in which thread."""

    def __init__(self, keys: Any) -> None:
        self.keys = iter(keys)
        self.drawn = 0
        self.threads: set[int] = set()

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        self.threads.add(threading.get_ident())
        key = next(self.keys)
        self.drawn += 1
        return key


class TwoArguments(Exception):
    """Has a second argument."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)
