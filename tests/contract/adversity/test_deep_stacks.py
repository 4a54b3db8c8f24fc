"""Batches requested deep in the stack: a RecursionError loses none."""

import inspect
import sys
from functools import partial
from itertools import chain

import numpy as np
import pytest
from kinds import QUICK, QUICKEST, by_name

import cseq

SAMPLES, FRAMES = 24, 120


def deep(frames, call):
    """Call a function the given number of frames deeper."""
    return deep(frames - 1, call) if frames else call()


def taken_deep(items):
    """Take all items, each first with one frame of the stack left, then two, …, until it comes.

    Also return the number of failures.
    """
    iterator, taken, failed = iter(items), [], 0
    frame, left = inspect.currentframe(), sys.getrecursionlimit()
    while frame is not None:
        frame, left = frame.f_back, left - 1
    while True:
        for room in range(1, FRAMES + 40):
            try:
                taken.append(deep(left - room, partial(next, iterator)))
                break
            except RecursionError:
                failed += 1
            except StopIteration:
                return taken, failed
        else:
            raise AssertionError(f"no item after {len(taken)}, with {FRAMES} frames and more left")


class Indexer:
    def __getitem__(self, indices):
        return deep(20, partial(np.array, indices))


@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_managers(kind):
    """It holds where Python decodes each batch, and where it makes the batch in test mode."""
    decode = lambda array: deep(20, array.tolist)  # noqa: E731
    manager = kind.make(Indexer, SAMPLES, batch_size=2, shuffle=False, out_type=decode)
    with kind.begin(manager) as batches:
        taken, failed = taken_deep(batches)
    assert taken == [[k, k + 1] for k in range(0, SAMPLES, 2)]
    # A worker thread decodes the batches of a thread pool.
    assert failed > (0 if kind.name == "thread" else 5 * len(taken))


@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_a_batch_that_is_too_deep_itself(kind):
    """Where the stack is not deep, it raises once, and is over."""

    def decode(array):
        return deep(sys.getrecursionlimit() if array[0] == 2 else 0, array.tolist)

    manager = kind.make(Indexer, 8, batch_size=2, shuffle=False, out_type=decode)
    with kind.begin(manager) as batches:
        iterator = iter(batches)
        assert next(iterator) == [0, 1]
        with pytest.raises(RecursionError):
            next(iterator)
        assert list(iterator) == [[4, 5], [6, 7]]


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize("rng", ["worker", "batch"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders(num_workers, rng, shuffle):
    """The loader does not call a sampler there: an exception would end the sampler's generator."""
    pytest.importorskip("torch")
    options = {"num_workers": num_workers, "rng": rng, "shuffle": shuffle}
    if num_workers:
        options["multiprocessing_context"] = QUICKEST.start_method
    made = cseq.DataLoader(list(range(SAMPLES)), 2, **options)
    taken, failed = taken_deep(made)
    rows = [batch.tolist() for batch in taken]
    assert sorted(chain.from_iterable(rows)) == list(range(SAMPLES))
    assert shuffle or rows == [[k, k + 1] for k in range(0, SAMPLES, 2)]
    assert failed > 5 * len(taken)
