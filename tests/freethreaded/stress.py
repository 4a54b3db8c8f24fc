"""Threads that share managers, iterators and what readers remember, for ThreadSanitizer.

python tests/freethreaded/stress.py [BATCHES]
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 3


class Echo:
    """So quick that the loop's threads compete for ready batches."""

    def __getitem__(self, indices: Any) -> Any:
        """Return what the other classes do."""
        return {"floats": indices}


class Pairs:
    """A structure of its own: the indices as floats, and as they are."""

    def __getitem__(self, indices: Any) -> Any:
        """Return a pair."""
        return indices.astype(np.float32), indices


class Dicts:
    """Another one, with leaves that go by pickle."""

    def __getitem__(self, indices: Any) -> Any:
        """Return a dict."""
        return {"floats": indices.astype(np.float32), "rest": [indices, "text"]}


def together(*functions: Callable[[], None]) -> None:
    """Run functions at once, in threads of their own; raise the first exception of any of them."""
    raised: list[BaseException] = []
    line = threading.Barrier(len(functions))

    def guarded(function: Callable[[], None]) -> None:
        try:
            line.wait()
            function()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def share(manager: Any, ordered: bool, batches: int) -> None:
    """Have threads take the batches of one iterator, and others look at the manager."""
    iterator = iter(manager)
    taken: list[float] = []

    def take() -> None:
        taken.extend(float(batch["floats"][0]) for batch in iterator)

    def look() -> None:
        for _ in range(batches // 2):
            manager.stats()
            if ordered:
                manager.state_dict()

    together(*[take] * THREADS, look)
    assert len(set(taken)) == len(taken) == batches, len(taken)


def alone(worker: Any, batches: int) -> None:
    """Go through epochs of a manager of this thread."""
    options = {"batch_size": 4, "shuffle": False, "out_type": "null"}
    with cseq.MPSequence(worker, 4 * batches, num_workers=1, **options).start() as manager:
        for _ in range(3):
            for number, batch in enumerate(manager):
                floats = batch[0] if worker is Pairs else batch["floats"]
                assert floats.tolist() == list(range(4 * number, 4 * number + 4))
            assert number == batches - 1


def main(batches: int) -> None:
    """Run everything once."""
    for kind, worker, count in (
        (cseq.MTSequence, Echo, 20 * batches),
        (cseq.MTSequence, Dicts, batches),
        (cseq.MPSequence, Dicts, batches),
    ):
        for ordered in (True, False):
            options: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "buffer": 10}
            with kind(
                worker, 4 * count, out_type="null", ordered=ordered, **options
            ).start() as manager:
                for _ in range(2):
                    share(manager, ordered, count)
                for _ in manager:
                    break  # an epoch that is given up
                assert sum(1 for _ in manager) == count
    # Plans, and what the reader remembers, belong to all threads.
    together(*[lambda worker=worker: alone(worker, batches) for worker in (Pairs, Dicts) * 2])  # type: ignore[misc]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
