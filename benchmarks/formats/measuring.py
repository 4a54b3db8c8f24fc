"""Each script in this folder makes data in its format, checks the batches, and measures.

A script is a user's program: it runs as `__main__`, and the workers get its classes from there. It
passes its functions to `main`, which has this command line:

    SCRIPT make FOLDER           write the data
    SCRIPT check FOLDER          write it, then compare it with the batches of cseq's loaders
    SCRIPT measure WAY FOLDER    run one round of one way of loading; print a line of JSON
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import cseq
from harness import usage
from harness.case import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["main", "scaled"]

WORKERS = 2
# The number of buffered batches. The DataLoader has prefetch_factor=2 per worker.
BUFFER = 4
# Both in seconds. In QUIET, all processes together use hardly any CPU time.
WARM_UP = 0.5
QUIET = 0.25
SECONDS = float(os.environ.get("CSEQ_FORMATS_SECONDS", "2"))

# The options that both kinds of manager get.
OURS = {"num_workers": WORKERS, "buffer": BUFFER, "out_type": "cpu", "dtype": None, "seed": 1}

# The options that all DataLoaders get.
FORKED = {
    "num_workers": WORKERS,
    "prefetch_factor": BUFFER // WORKERS,
    "shuffle": True,
    "persistent_workers": True,
    "multiprocessing_context": "fork",
}
SERVED = FORKED | {"multiprocessing_context": "forkserver"}


def main(
    make: Callable[[str], None],
    ours: Callable[..., Any],
    theirs: Callable[[str, dict[str, Any]], Any],
    *,
    numbers: Callable[[Any], Iterable[int]] | None,
    same: bool = True,
    forks: bool = True,
) -> None:
    """Run the command line.

    Parameters
    ----------
    make : callable
        folder → nothing: writes the data.
    ours : callable
        (class of manager, folder, options) → a manager that is not started.
    theirs : callable
        (folder, options) → a DataLoader.
    numbers : callable or None
        batch → the numbers of its samples; None if samples are drawn and have no numbers.
    same : bool
        Whether a sample's values are the same in each epoch, so that cseq's can be compared with
        the DataLoader's. If not, they come from global generators, which threads share.
    forks : bool
        Whether the DataLoader's workers can be forked, although they inherit open files.
    """
    verb, *arguments = sys.argv[1:]
    if verb == "make":
        make(*arguments)
    elif verb == "check":
        (folder,) = arguments
        make(folder)
        check(folder, ours, theirs(folder, FORKED if forks else SERVED), numbers, same=same)
    elif verb == "measure":
        way, folder = arguments
        make_loader = ways(ours, theirs, folder, forks=forks).get(way)
        print(json.dumps(None if make_loader is None else measure(make_loader)))
    else:
        raise SystemExit(__doc__)


# -- one round


def ways(ours: Any, theirs: Any, folder: str, *, forks: bool) -> dict[str, Callable[[], Any]]:
    """Name the ways of loading, as run.py does."""
    forked = OURS | {"start_method": "fork"}
    found = {
        "cseq": lambda: ours(cseq.MPSequence, folder, OURS).start(),
        "cseq fork": lambda: ours(cseq.MPSequence, folder, forked).start(),
        "cseq threads": lambda: ours(cseq.MTSequence, folder, OURS).start(),
        "cseq.DataLoader": lambda: DropIn(theirs(folder, FORKED)),
        "cseq.DataLoader forkserver": lambda: DropIn(theirs(folder, SERVED)),
        "DataLoader": lambda: theirs(folder, FORKED),
        "DataLoader forkserver": lambda: theirs(folder, SERVED),
    }
    if not forks:
        del found["DataLoader"], found["cseq.DataLoader"]
    return found


class DropIn:
    """An unchanged DataLoader with cseq's workers instead of torch's, or an error."""

    def __init__(self, loader: Any) -> None:
        from cseq.adapters import torch

        torch.install()
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        made = type(batches)
        expect(made.__module__.startswith("cseq."), f"cseq's iterator, not {made.__qualname__}")
        return batches


def measure(make_loader: Callable[[], Any]) -> dict[str, float]:
    """Time the start, then the stream.

    The memory is as in a training loop: it holds a batch, and the buffer is full.
    """
    # Otherwise, Python may collect what torch's import has left, which takes 90 ms.
    gc.collect()
    begin = time.perf_counter()
    loader = make_loader()
    batches = endless(loader)
    size = len(leaves(next(batches))[0])
    first = time.perf_counter() - begin
    take(batches, WARM_UP)
    cpu = usage.cpu_seconds(os.getpid())
    begin = time.perf_counter()
    count = take(batches, SECONDS)
    seconds = time.perf_counter() - begin
    cpu = usage.cpu_seconds(os.getpid()) - cpu
    held = next(batches)
    settle()
    memory = usage.memory_bytes(os.getpid())
    del held
    batches.close()
    if hasattr(loader, "finish"):
        loader.finish()
    else:
        del loader, batches
        # The DataLoader's workers end with its iterator.
        gc.collect()
    return {
        "first_ms": first * 1e3,
        "samples_per_s": count / seconds,
        "cpu_us": cpu / count * 1e6,
        "memory_mb": memory / 1e6,
        "batch_size": size,
    }


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over one epoch after another."""
    while True:
        yield from loader


def settle() -> None:
    """Wait until the workers have filled the buffer and are idle."""
    used, before = usage.cpu_seconds(os.getpid()), 0.0
    while used - before > QUIET / 10:
        time.sleep(QUIET)
        used, before = usage.cpu_seconds(os.getpid()), used


def take(batches: Iterator[Any], seconds: float) -> int:
    """Take batches for some seconds, and count their samples."""
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        count += len(leaves(next(batches))[0])
    return count


def leaves(batch: Any) -> list[Any]:
    """Return the arrays of a batch in order."""
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    if isinstance(batch, (tuple, list)):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


# -- checks of the batches


def check(folder: str, ours: Any, loader: Any, numbers: Any, *, same: bool) -> None:
    """Check that each sample arrives once and is right, for any workers and after a resume."""
    whole = epoch(ours(cseq.MPSequence, folder, OURS))
    count = sum(len(leaves(batch)[0]) for batch in whole)
    if numbers is not None:
        found = sorted(int(number) for batch in whole for number in numbers(batch))
        expect(found == list(range(count)), "each sample arrives once")
    kinds = (cseq.MPSequence, cseq.MTSequence) if same else (cseq.MPSequence,)
    for kind in kinds:
        alone = epoch(ours(kind, folder, OURS | {"num_workers": 1}))
        expect_alike(alone, whole, "one worker")
        state = state_after(2, ours(kind, folder, OURS))
        resumed = epoch(ours(kind, folder, OURS | {"seed": None}), state)
        expect_alike(resumed, whole[2:], "a resume after two batches")
    if numbers is not None and same:
        expected = samples(loader, numbers)
        found = samples(whole, numbers)
        for number, values in expected.items():
            expect_alike([found[number]], [values], f"sample {number}")
    print(f"{count} samples, {len(whole)} batches, all right")


def epoch(manager: Any, state: str = "null") -> list[Any]:
    """Return the batches of an epoch, or the remaining ones after a state."""
    if state != "null":
        manager.load_state_dict(json.loads(state))
    with manager.start() as batches:
        return list(batches)


def state_after(count: int, manager: Any) -> str:
    """Take some batches, leave the loop, and return the state."""
    with manager.start() as batches:
        taken = iter(batches)
        for _ in range(count):
            next(taken)
        return json.dumps(manager.state_dict())


def samples(batches: Iterable[Any], numbers: Any) -> dict[int, list[np.ndarray]]:
    """Split batches into samples by number, without the zeros of padding."""
    found = {}
    for batch in batches:
        arrays = [np.asarray(leaf) for leaf in leaves(batch)]
        for row, number in enumerate(numbers(batch)):
            found[int(number)] = [np.trim_zeros(np.ravel(array[row]), "b") for array in arrays]
    return found


def expect_alike(found: list[Any], expected: list[Any], what: str) -> None:
    """Compare batches bit for bit."""
    expect(len(found) == len(expected), f"{what}: {len(expected)} batches, not {len(found)}")
    for one, other in zip(found, expected, strict=True):
        pairs = list(zip(leaves(one), leaves(other), strict=True))
        alike = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
        expect(bool(pairs) and alike, f"{what}: the same values")


def expect(condition: bool, what: str) -> None:
    """Exit if the condition is false, because the format's script is then wrong."""
    if not condition:
        raise SystemExit(f"check failed: {what}")
