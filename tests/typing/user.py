"""A user's script for the type checkers: exactly the lines marked `refused` are errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import cseq

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[NDArray[np.float32], NDArray[np.int64]]


class Images:
    def __init__(self, path: str = "images.npy") -> None:
        self.images = np.load(path)

    def __getitem__(self, indices: NDArray[np.int64]) -> Pair:
        return self.images[indices], indices % 10

    def close(self) -> None:
        """Close nothing."""


class Words:
    def __getitem__(self, indices: NDArray[np.int64]) -> list[str]:
        return [str(index) for index in indices]


class NoIndexer:
    """Has no `__getitem__`."""


class Tensor:
    """Stands for torch's."""

    def backward(self) -> None:
        """Do nothing."""


# -- the loop's batches

null = cseq.MPSequence[Pair](Images, 100, 2, out_type="null", seed=1)
assert_type(null, cseq.MPSequence[Pair])
with null.start() as started:
    assert_type(started, cseq.MPSequence[Pair])
    for images, labels in started:
        assert_type(images, NDArray[np.float32])
        images.nonsense()  # refused
        assert_type(labels, NDArray[np.int64])
pairs: Iterator[Pair] = iter(null)

cseq.MTSequence(partial(Images, "x"), 100, out_type="null")
cseq.MTSequence(Images("x"), 100, out_type="null")
cseq.MSequence(Images, 100, out_type="null", thread_type="thread")

anything = cseq.MPSequence(Images, 100, out_type="cpu")
for batch in anything:
    assert_type(batch, Any)
    batch.whatever()

annotated = cseq.MPSequence[tuple[Tensor, Tensor]](Images, 100, 2, out_type="cuda:1")
for x, y in annotated:
    assert_type(x, Tensor)
    y.backward()
    y.nonsense()  # refused
declared: cseq.MTSequence[Tensor] = cseq.MTSequence(Images, 100)
for tensor in declared:
    assert_type(tensor, Tensor)


def train(batches: cseq.MSequence[Pair]) -> float:
    """Take any of the classes."""
    return sum(float(images.sum()) for images, _ in batches)


train(null)
train(cseq.MTSequence(Images, 9, out_type="null"))
words = cseq.MPSequence[list[str]](Words, 9, out_type="null")
train(words)  # refused


def make(indexer: cseq.Indexer[Pair]) -> Pair:
    """Take any indexer of pairs."""
    return indexer[np.arange(3)]


make(Images())
make(NoIndexer())  # refused

# -- arguments

cseq.MPSequence(
    Images,
    [1, 2, 3],
    num_workers=0,
    num_converters=None,
    batch_size=8,
    buffer=4,
    shuffle=False,
    out_type=lambda array: array.sum(),
    seed=None,
    dtype=None,
    drop_last=True,
    ordered=False,
    start_method="forkserver",
    shard="auto",
    on_error="skip",
    max_restarts=3,
    timeout=1.5,
    on_timeout="restart",
    memory_limit="2GiB",
    pad=False,
)
cseq.MSequence(Images, 100, 2, 1, 8, 3, False, "thread", "null", 5, shard=(0, 2))
cseq.MTSequence(Images, 100, 2, 1, 8, 3, False, "null", 5)
cseq.MPSequence(np.arange(10), 10, out_type=f"cuda:{1}")

cseq.MPSequence(3, 100)  # refused
cseq.MPSequence(NoIndexer, 100)  # refused
cseq.MPSequence(NoIndexer(), 100, out_type="null")  # refused
cseq.MPSequence(dset_size=100)  # refused
cseq.MPSequence(Images, 100, num_workers="4")  # refused
cseq.MPSequence(Images, 100, num_worker=4)  # refused
cseq.MPSequence(Images, 100, collate_fn=None)  # refused
cseq.MPSequence(Images, 100, batch_size=None)  # refused
cseq.MPSequence(Images, 100, thread_type="proc")  # refused
cseq.MPSequence(Images, 100, start_method="thread")  # refused
cseq.MPSequence(Images, 100, on_error="ignore")  # refused
cseq.MPSequence(Images, 100, on_timeout="kill", out_type="null")  # refused
cseq.MPSequence(Images, 100, shard="mine")  # refused
cseq.MPSequence(Images, 100, out_type=3)  # refused
cseq.MTSequence(Images, 100, shuffle="yes")  # refused
cseq.MSequence(Images, 100, thread_type="process")  # refused

# -- methods

null.start(compat=True)
null.start_test("numpy").finish()
null.start_test("inline")  # refused
null.set_epoch(3)
null.set_epoch("3")  # refused
null.sampler.set_epoch(null.epoch)
samples: int = len(null.sampler)
null.load_state_dict(null.state_dict())
null.epoch = 4  # refused
null[0]  # refused
waited: float = null.stats().loop_waited
