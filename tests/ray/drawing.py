"""The batches of the tests with Ray, and test mode's version of them."""

import contextlib
import functools
import random
import time

import numpy as np
import ray
from kinds import assert_same
from local_cluster import until

import cseq

SAMPLES, SIZE = 700, 4
BATCHES = SAMPLES // SIZE
OPTIONS = {"batch_size": SIZE, "seed": 3, "out_type": "null"}
# A small buffer keeps the loop close to the agents.
SMALL = {"buffer": 16}


class Draws:
    """Draws from all generators; batches have different sizes, some over 100 KB."""

    def __getitem__(self, indices):
        drawn = cseq.rng().integers(1000, size=len(indices))
        large = np.arange(int(indices[0]) % 9 * 3000)
        return indices, drawn, np.random.randint(1000), random.random(), large  # noqa: NPY002


class DrawsSlowly(Draws):
    def __getitem__(self, indices):
        time.sleep(0.004)
        return super().__getitem__(indices)


def sequence(fleet, **options):
    """Make a sequence on a fleet."""
    return cseq.RaySequence(fleet, SAMPLES, 2, **OPTIONS | options)


@functools.cache
def in_test_mode(worker=Draws, epoch=0, samples=SAMPLES):
    """Return test mode's batches of an epoch."""
    manager = cseq.MPSequence(worker, samples, **OPTIONS)
    manager.set_epoch(epoch)
    with manager.start_test() as batches:
        return list(batches)


def assert_is_test_mode(got, worker=Draws, epoch=0):
    """Fail unless these are the batches of an epoch in test mode, bit for bit."""
    assert_same(got, in_test_mode(worker, epoch))


def pids(fleet):
    """Return the process ids of the agents that answer now."""
    calls = [fleet.ask(handle) for handle in fleet.handles]
    found = []
    for call in ray.wait(calls, num_returns=len(calls), timeout=2)[0]:
        with contextlib.suppress(ray.exceptions.RayError):
            # It is being started again.
            found.append(ray.get(call)[0])
    return found


def await_agents(fleet, count=2, without=()):
    """Wait until the given number of other agents answer; return their ids."""
    there = []

    def look():
        there[:] = set(pids(fleet)) - set(without)
        return len(there) == count

    until(look, f"there are {there}")
    return there
