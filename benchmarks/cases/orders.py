"""Orders alone: made from 10^7 lengths and read, compared with other libraries."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
from harness.case import Case, Contender, Goal, scaled
from work import Floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUDGET, LONGEST = 16384, 2048
ROW = 4096


def lengths(n: int) -> np.ndarray[Any, Any]:
    """Draw sentence-like lengths."""
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, n)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def cpu(run: Callable[[], Any], samples: int) -> float:
    """Return this thread's CPU time per sample in nanoseconds."""
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / samples


def read_all(order: cseq.Order, size: int, most: int) -> float:
    """Read batches from the middle of an epoch. Return the nanoseconds per sample."""
    reader, start = order.reader(1), order.units // 2
    samples = 0
    begin = time.thread_time_ns()
    for k in range(start, min(start + most, order.units - size), size):
        samples += len(reader.samples(3, k, size)[0])
    return (time.thread_time_ns() - begin) / max(samples, 1)


def first_batch(order: cseq.Order, size: int) -> float:
    """Return the microseconds to the first batch after a resume, with a new reader."""
    start = time.thread_time_ns()
    order.reader(1).samples(3, order.units // 2, size)
    return (time.thread_time_ns() - start) / 1000


def made(make: Callable[[Any], Any], n: int) -> Iterator[Callable[[], float]]:
    """Measure making an order from n lengths."""
    given = lengths(n)
    yield partial(cpu, partial(make, given), n)


def read(make: Callable[[Any], cseq.Order], n: int, size: int) -> Iterator[Callable[[], float]]:
    """Measure reading an order in batches."""
    yield partial(read_all, make(lengths(n)), size, scaled(20_000, 20) * size)


def resumed(make: Callable[[Any], cseq.Order], n: int, size: int) -> Iterator[Callable[[], float]]:
    """Measure the first read of an order."""
    yield partial(first_batch, make(lengths(n)), size)


def buckets(given: Any) -> cseq.Order:
    """Token-budget batches."""
    return cseq.Buckets(given, BUDGET, most=512)


def packed(given: Any) -> cseq.Order:
    """Rows of 4096 tokens."""
    return cseq.Packed(given, ROW)


def documents(n: int) -> np.ndarray[Any, Any]:
    """Draw web-page-like lengths, some longer than a row."""
    drawn = np.random.default_rng(0).lognormal(6.55 - 0.72, 1.2, n)
    return np.clip(drawn, 2, 60_000).astype(np.int32)


def split(given: Any) -> cseq.Order:
    """Rows of 8192 tokens; long documents are cut."""
    return cseq.Packed(given, 2 * ROW, too_long="split")


def concatenated(given: Any) -> cseq.Order:
    """Rows of 8192 tokens from concatenated documents."""
    return cseq.Concatenated(given, 2 * ROW)


def rows_made(make: Callable[[Any], cseq.Order], n: int) -> Iterator[Callable[[], float]]:
    """Measure making an order of documents and reading its first batch, in ns per document."""
    given = documents(n)
    yield partial(cpu, lambda: make(given).reader(1).samples(0, 0, 8), n)


def rows_read(make: Callable[[Any], cseq.Order], n: int) -> Iterator[Callable[[], float]]:
    """Measure reading batches of 8 rows from the middle of an epoch, in microseconds each."""
    order, most = make(documents(n)), scaled(5000, 5)
    reader, start = order.reader(1), order.units // 2
    reader.samples(3, start, 8)

    def run() -> float:
        begin = time.thread_time_ns()
        for k in range(start, start + 8 * most, 8):
            reader.samples(3, k % (order.units - 8), 8)
        return (time.thread_time_ns() - begin) / 1000 / most

    yield run


def balanced(make: Callable[[Any], cseq.Order], given: Any) -> cseq.Order:
    """Steps of 256 rows."""
    return cseq.Balanced(make(given), scaled(256, 4))


def slowest(make: Callable[[Any], cseq.Order], over: str, n: int) -> Iterator[Callable[[], float]]:
    """Measure the slowest of 64 ranks over the mean, if they wait at 4 microbatches of one row."""
    inner, step = make(documents(n)), scaled(256, 16)
    order: cseq.Order = inner
    if over != "as they are":
        order = cseq.Balanced(inner, step, over=over)  # type: ignore[arg-type]
    count = order.units // step * step

    def run() -> float:
        reader, works = inner.measured(1)
        samples, sizes = reader.samples(0, 0, inner.units)
        found = works(0, np.arange(inner.units))
        work_of = dict(zip(samples[sizes.cumsum() - sizes].tolist(), found.tolist(), strict=True))
        samples, sizes = order.reader(1).samples(0, 0, count)
        work = np.array([work_of[first] for first in samples[sizes.cumsum() - sizes].tolist()])
        work = work.reshape(-1, 4, step // 4)
        return float((work.max(2).sum(1) / work.mean(2).sum(1)).mean())

    yield run


def sorted_by_numpy(given: Any) -> Any:
    """Do the minimum that batches of equal lengths need: a stable sort."""
    return np.argsort(given, kind="stable")


def permuted_by_numpy(n: int) -> Iterator[Callable[[], float]]:
    """Shuffle the same number of samples, without batches."""
    yield partial(cpu, lambda: np.random.default_rng(1).permutation(n), n)


def permuted_by_torch(n: int) -> Iterator[Callable[[], float]]:
    """Do the same with torch, on one thread."""
    import torch

    torch.set_num_threads(1)
    yield partial(cpu, lambda: torch.randperm(n), n)


def lhotse_buckets(n: int) -> Iterator[Callable[[], float]]:
    """Lhotse's dynamic buckets over the same number of cuts, by duration."""
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(k), start=0, duration=float(length), channel=0)
        for k, length in enumerate(lengths(n))
    ).to_eager()

    def run() -> None:
        sampler = DynamicBucketingSampler(
            cuts, max_duration=float(BUDGET), num_buckets=30, shuffle=True, seed=1
        )
        for _ in sampler:
            pass

    yield partial(cpu, run, n)


def trl_packed(n: int) -> Iterator[Callable[[], float]]:
    """TRL's best fit decreasing over the same number of token rows."""
    from datasets import Dataset
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [[0] * int(length) for length in lengths(n)]})
    yield partial(cpu, partial(pack_dataset, rows, ROW, "bfd"), n)


def grain_packed(n: int) -> Iterator[Callable[[], float]]:
    """Grain's best fit over the same number of token rows."""
    import grain
    from grain.experimental import BestFitPackIterDataset

    rows = [{"tokens": np.zeros(length, np.int32)} for length in lengths(n)]

    def run() -> None:
        source = grain.MapDataset.source(rows).to_iter_dataset()
        for _ in BestFitPackIterDataset(source, length_struct={"tokens": ROW}, num_packing_bins=64):
            pass

    yield partial(cpu, run, n)


def weights(n: int) -> np.ndarray[Any, Any]:
    """Weights, some of which are much greater than the others."""
    return np.random.default_rng(0).pareto(2, n) + 0.1


def weighted(n: int) -> Iterator[Callable[[], float]]:
    """Measure making weighted draws, in nanoseconds per sample."""
    given = weights(n)
    yield partial(cpu, partial(cseq.Weighted, given), n)


def drawn(n: int) -> Iterator[Callable[[], float]]:
    """Measure reading weighted draws in batches of 32."""
    yield partial(read_all, cseq.Weighted(weights(n)), 32, scaled(640_000, 640))


def first_drawn(n: int) -> Iterator[Callable[[], float]]:
    """Measure reading the first weighted draw."""
    yield partial(first_batch, cseq.Weighted(weights(n)), 1)


def drawn_by_numpy(n: int) -> Iterator[Callable[[], float]]:
    """The same number of draws with numpy."""
    given = weights(n)
    given /= given.sum()
    yield partial(cpu, lambda: np.random.default_rng(1).choice(n, n, p=given), n)


def drawn_by_torch(n: int) -> Iterator[Callable[[], float]]:
    """The same number of draws with torch, on one thread."""
    import torch

    torch.set_num_threads(1)
    given = torch.from_numpy(weights(n))
    sampler = torch.utils.data.WeightedRandomSampler(given, n)  # type: ignore[arg-type]
    yield partial(cpu, lambda: next(iter(sampler)), n)


def mixed(count: int, n: int) -> Iterator[Callable[[], float]]:
    """Measure reading a mixture of many sources by 1024, minus the time of its sources alone."""
    sources = {f"source {k}": cseq.Shuffled(n) for k in range(count)}
    order = cseq.Mixture(sources, {name: k + 1 for k, name in enumerate(sources)})
    alone, most = cseq.Shuffled(n), scaled(2_000_000, 2048)
    yield lambda: read_all(order, 1024, most) - read_all(alone, 1024, min(most, n // 4))


def mixed_by_grain(count: int, n: int, most: int) -> Iterator[Callable[[], float]]:
    """Grain's mixture of the same number of shuffled ranges, element by element."""
    import grain

    ranges = [grain.MapDataset.range(n).shuffle(seed=k) for k in range(count)]
    mixture = grain.MapDataset.mix(ranges, weights=[k + 1 for k in range(count)])

    def run() -> None:
        for k in range(most):
            mixture[k]

    yield partial(cpu, run, most)


def blocks(lanes: int, n: int) -> Iterator[Callable[[], float]]:
    """Measure shuffling and reading windows of 512 blocks of 256 samples."""
    order = cseq.Blocks(256, 512, lanes, samples=n)
    yield partial(read_all, order, 1024, scaled(2_000_000, 2048))


def first_of_blocks(n: int) -> Iterator[Callable[[], float]]:
    """Measure the first batch, including the shuffle of its window."""
    yield partial(first_batch, cseq.Blocks(256, 512, samples=n), 256)


def loaded(n: int, *, fixed: bool) -> Iterator[Callable[[], float]]:
    """Measure epochs of small batches from two workers, in buckets or of a fixed size."""
    order: cseq.Order = cseq.Buckets(lengths(n), BUDGET // 2)
    size: dict[str, Any] = {}
    if fixed:
        order, size = cseq.Shuffled(n), {"batch_size": -(-n // order.units)}
    manager: Any = cseq.MPSequence(
        partial(Floats, n), n, 2, order=order, buffer=10, out_type="null", seed=1, **size
    )

    def run() -> float:
        start = time.perf_counter_ns()
        count = sum(1 for _ in manager)
        return (time.perf_counter_ns() - start) / 1000 / count

    with manager.start():
        yield run


MANY = scaled(10**7, 2000)
# For peers that take microseconds per sample.
FEW = scaled(20_000, 500)
BALANCED, WAITING = "cseq, balanced", ("step", "window", "epoch")
MOST_WAITED = {"split": (1.6, 1.05, 1.01), "concatenated": (1.7, 1.05, 1.01)}
OURS, NUMPY, TORCH = "cseq", "numpy.permutation", "torch.randperm"
VARYING, FIXED = "cseq, buckets", "cseq, as many of a fixed size"
LHOTSE, TRL, GRAIN = f"lhotse, {FEW} samples", f"trl, {FEW} samples", f"grain, {FEW} samples"

CASES = (
    Case(
        "orders_buckets_made",
        "Buckets of 10^7 lengths, made",
        "ns/sample",
        (
            Contender(OURS, partial(made, buckets, MANY), ours=True),
            Contender("numpy.argsort, stable", partial(made, sorted_by_numpy, MANY)),
        ),
        goals=(Goal("seconds for 10^7", lambda f: f[OURS] / 100, 1.5),),
    ),
    Case(
        "orders_buckets_read",
        "Buckets of 10^7 lengths, read batch by batch",
        "ns/sample",
        (
            Contender(OURS, partial(read, buckets, MANY, 1), ours=True),
            Contender(NUMPY, partial(permuted_by_numpy, MANY)),
            Contender(TORCH, partial(permuted_by_torch, MANY), needs=("torch",)),
            Contender(LHOTSE, partial(lhotse_buckets, FEW), needs=("lhotse",)),
        ),
        goals=(
            Goal("ns a sample", lambda f: f[OURS], 60),
            Goal("times as fast as lhotse", lambda f: f[LHOTSE] / f[OURS], None, 100),
        ),
    ),
    Case(
        "orders_buckets_first",
        "Buckets of 10^7 lengths, the first batch after a resume",
        "µs",
        (Contender(OURS, partial(resumed, buckets, MANY, 1), ours=True),),
        goals=(Goal("µs", lambda f: f[OURS], 2000),),
    ),
    Case(
        "orders_packed_made",
        "Rows of 4096 tokens from 10^7 lengths, made",
        "ns/sample",
        (
            Contender(OURS, partial(made, packed, MANY), ours=True),
            Contender("numpy.argsort, stable", partial(made, sorted_by_numpy, MANY)),
            Contender(TRL, partial(trl_packed, FEW), needs=("trl", "datasets")),
            Contender(GRAIN, partial(grain_packed, FEW), needs=("grain",)),
        ),
        goals=(
            Goal("seconds for 10^7", lambda f: f[OURS] / 100, 1),
            Goal("times as fast as trl", lambda f: f[TRL] / f[OURS], None, 200),
        ),
    ),
    Case(
        "orders_packed_read",
        "Rows of 4096 tokens from 10^7 lengths, read by 8",
        "ns/sample",
        (Contender(OURS, partial(read, packed, MANY, 8), ours=True),),
    ),
    *(
        case
        for name, make in (("split", split), ("concatenated", concatenated))
        for case in (
            Case(
                f"orders_{name}_made",
                f"Rows of 8192 tokens from 10^7 documents, {name}, made, and the first batch",
                "ns/document",
                (Contender(OURS, partial(rows_made, make, MANY), ours=True),),
                goals=(Goal("seconds for 10^7", lambda f: f[OURS] / 100, 0.6),),
            ),
            Case(
                f"orders_{name}_read",
                f"Rows of 8192 tokens from 10^7 documents, {name}, read by 8",
                "µs/batch",
                (
                    Contender(OURS, partial(rows_read, make, MANY), ours=True),
                    Contender(BALANCED, partial(rows_read, partial(balanced, make), MANY)),
                ),
                goals=(Goal("µs a batch", lambda f: f[OURS], 100),),
            ),
            Case(
                f"orders_{name}_balanced",
                f"Rows of 8192 tokens, {name}: the slowest of 64 ranks over the mean",
                "times",
                tuple(
                    Contender(over, partial(slowest, make, over, scaled(10**6, 2000)))
                    for over in ("as they are", *WAITING)
                ),
                goals=tuple(
                    Goal(over, lambda f, over=over: f[over], most)  # type: ignore[misc]
                    for over, most in zip(WAITING, MOST_WAITED[name], strict=True)
                ),
            ),
        )
    ),
    Case(
        "orders_loaded",
        "Small batches from two workers: of buckets, and of a fixed size",
        "µs/batch",
        (
            Contender(VARYING, partial(loaded, scaled(10**6, 2000), fixed=False), ours=True),
            Contender(FIXED, partial(loaded, scaled(10**6, 2000), fixed=True), ours=True),
        ),
        goals=(Goal("times of fixed ones", lambda f: f[VARYING] / f[FIXED], 1.3),),
    ),
    Case(
        "orders_weighted_made",
        "10^7 weights become draws",
        "ns/sample",
        (Contender(OURS, partial(weighted, MANY), ours=True),),
        goals=(Goal("ns a sample", lambda f: f[OURS], 30),),
    ),
    Case(
        "orders_weighted_first",
        "Draws from 10^7 weights, the first one",
        "µs",
        (Contender(OURS, partial(first_drawn, MANY), ours=True),),
        goals=(Goal("µs", lambda f: f[OURS], 1000),),
    ),
    *(
        Case(
            f"orders_weighted_{power}",
            f"Draws from 10^{power} weights, by 32",
            "ns/sample",
            (
                Contender(OURS, partial(drawn, scaled(10**power, 2000)), ours=True),
                Contender("numpy.choice, 10^7", partial(drawn_by_numpy, MANY)),
                Contender("torch, 10^7", partial(drawn_by_torch, MANY), needs=("torch",)),
            ),
            goals=(Goal("ns a draw", lambda f: f[OURS], 400),),
        )
        for power in (7, 8)
    ),
    *(
        Case(
            f"orders_mixture_{count}",
            f"A mixture of {count} sources, less its sources, by 1024",
            "ns/sample",
            (
                Contender(OURS, partial(mixed, count, scaled(10**6, 5000)), ours=True),
                Contender(
                    GRAIN,
                    partial(mixed_by_grain, count, scaled(10**6, 5000), FEW),
                    needs=("grain",),
                ),
            ),
            goals=(
                Goal("ns a sample", lambda f: f[OURS], 100 if count == 3 else 250),
                Goal("times as fast as grain", lambda f: f[GRAIN] / f[OURS], None, 200),
            ),
        )
        for count in (3, 100)
    ),
    *(
        Case(
            f"orders_blocks_{lanes}",
            f"Blocks of 256 in windows of 512, {lanes} lanes, by 1024",
            "ns/sample",
            (
                Contender(OURS, partial(blocks, lanes, MANY), ours=True),
                Contender(NUMPY, partial(permuted_by_numpy, MANY)),
            ),
            goals=(Goal("ns a sample", lambda f: f[OURS], 30),),
        )
        for lanes in (1, 8)
    ),
    Case(
        "orders_blocks_first",
        "The first batch of Blocks",
        "µs",
        (Contender(OURS, partial(first_of_blocks, MANY), ours=True),),
        goals=(Goal("µs", lambda f: f[OURS], 5000),),
    ),
)
