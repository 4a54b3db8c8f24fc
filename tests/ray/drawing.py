"""What the tests with Ray make batches of, and what test mode makes of the same."""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any

import numpy as np
from kinds import assert_same
from local_cluster import until

import cseq

SAMPLES, SIZE = 700, 4
BATCHES = SAMPLES // SIZE
OPTIONS: dict[str, Any] = {"batch_size": SIZE, "seed": 3, "out_type": "null"}
SMALL: dict[str, Any] = {"buffer": 16}  # so that the loop is never far from the agents


class Draws:
    """Draws from all generators; batches have different sizes, some over 100 KB."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        drawn = cseq.rng().integers(1000, size=len(indices))
        large = np.arange(int(indices[0]) % 9 * 3000)
        return indices, drawn, np.random.randint(1000), random.random(), large  # noqa: NPY002


class DrawsAlone:
    """Draws from `cseq.rng` alone: also threads make the same batches."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        return indices, cseq.rng().integers(1000, size=len(indices))


class DrawsSlowly(Draws):
    """Takes a few milliseconds."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        time.sleep(0.004)
        return super().__getitem__(indices)


class ByProcess(Draws):
    """Says which process has made a batch, and that one's parents; the rest is `Draws`'s."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        return os.getpid(), super().__getitem__(indices)


def actor_of_this_process() -> int:
    """Return the id of the process of Ray's that has started this worker."""
    pid = os.getpid()
    while True:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().startswith(b"ray::"):
                return pid
        with open(f"/proc/{pid}/stat", "rb") as file:
            pid = int(file.read().rpartition(b")")[2].split()[1])


def sequence(fleet: Any, **options: Any) -> Any:
    """Make a sequence on a fleet."""
    return cseq.RaySequence(fleet, SAMPLES, 2, **OPTIONS | options)


@functools.cache
def in_test_mode(worker: Any = Draws, epoch: int = 0, samples: int = SAMPLES) -> list[Any]:
    """List the batches of an epoch that test mode makes."""
    manager = cseq.MPSequence(worker, samples, **OPTIONS)
    manager.set_epoch(epoch)
    with manager.start_test() as batches:
        return list(batches)


def assert_is_test_mode(got: list[Any], worker: Any = Draws, epoch: int = 0) -> None:
    """Fail unless these are the batches of an epoch in test mode, bit for bit."""
    assert_same(got, in_test_mode(worker, epoch))


def await_agents(fleet, count=2):
    """Wait until agents answer."""
    until(lambda: ready(fleet) == count, f"the agents are {fleet.agents}")


def ready(fleet):
    """Count the agents that answer."""
    return sum(agent.state == "ready" for agent in fleet.agents)
