"""Threads and processes of `cseq.DataLoader` by kind of work, compared with other threads."""

from __future__ import annotations

import functools
import io
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cases.dataloader import Tensors, first_batch
from harness.case import Case, Contender, Counter, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

THREADS, PROCESSES = "cseq.DataLoader, threads", "cseq.DataLoader, processes"
TORCH, SPDL, FUTURES = "torch DataLoader", "SPDL threads", "concurrent.futures"
BARE, LIMIT = "bare loop", "bare threads"
# The number of batches that each worker prefetches.
AHEAD = 2

# -- data sets


class Jpegs:
    """Photographs of 320 x 240, decoded by Pillow, which releases the GIL."""

    def __init__(self, samples: int) -> None:
        from PIL import Image

        self.samples, self.files = samples, []
        rng = np.random.default_rng(0)
        for _ in range(16):
            coarse = rng.integers(0, 255, (15, 20, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((320, 240)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.decode(self.files[index % 16]))

    def decode(self, data: bytes) -> np.ndarray:
        """Decode a file."""
        from PIL import Image

        return np.array(Image.open(io.BytesIO(data)))


class Tokens:
    """Windows of 1025 tokens from a memory map."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "tokens.bin"
        np.arange(scaled(10**7, 10**4), dtype=np.uint16).tofile(path)
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import torch

        start = index * 7919 % (len(self.tokens) - 1025)
        return torch.from_numpy(self.tokens[start : start + 1025].astype(np.int64))


class Images:
    """4.8 MB of images for 32 indices, by one fancy index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.table = np.zeros((256, 3, 224, 224), np.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, indices: Any) -> Any:
        import torch

        return torch.from_numpy(self.table[np.asarray(indices) % 256])


class Dicts:
    """Records in a list of Python objects."""

    def __init__(self, samples: int) -> None:
        count = scaled(300_000, 1000)
        self.samples = samples
        self.records = [{"id": n, "text": f"text {n}", "tags": [n, n + 1]} for n in range(count)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        record = self.records[index % len(self.records)]
        return record["id"], len(record["text"])


class Interpreted:
    """Samples that each take about 30 µs of Python code."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        total = index
        for number in range(500):
            total += number & 7
        return total


class Remote:
    """Samples that each take 20 ms to arrive."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return index


class Arrow:
    """Rows of a Hugging Face table, 32 at a time."""

    def __init__(self, samples: int) -> None:
        import datasets

        count = scaled(20_000, 100)
        rng = np.random.default_rng(0)
        self.samples = samples
        columns = {"tokens": rng.integers(0, 9, (count, 128)).tolist(), "label": [*range(count)]}
        self.rows = datasets.Dataset.from_dict(columns).with_format("numpy")

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, indices: Any) -> Any:
        import torch

        rows = self.rows[[index % len(self.rows) for index in indices]]
        return torch.from_numpy(np.stack(rows["tokens"])), torch.from_numpy(rows["label"])


# -- loaders


def loader_of(name: str, dataset: Any, batches: list[Any], num_workers: int) -> Any:
    """Make a DataLoader, without collation if the data set takes all indices of a batch at once."""
    import torch.utils.data

    import cseq

    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": True}
    options["prefetch_factor"] = AHEAD
    if name == THREADS:
        options["worker_method"] = "thread"
    elif name in (PROCESSES, TORCH):
        options["multiprocessing_context"] = "fork"
    else:
        options = {"num_workers": 0}
    if isinstance(dataset, (Images, Arrow)):
        options |= {"sampler": batches, "batch_size": None}
    else:
        options |= {"batch_sampler": batches}
    return (torch.utils.data if name in (TORCH, BARE) else cseq).DataLoader(dataset, **options)


def fetching(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that makes the batch of a list of indices, as a DataLoader does."""
    if isinstance(dataset, (Images, Arrow)):
        fetch: Callable[[Any], Any] = dataset.__getitem__
        return fetch
    from torch.utils.data import default_collate

    return lambda indices: default_collate([dataset[index] for index in indices])


def futures(dataset: Any, batches: list[Any], num_workers: int) -> Iterator[Any]:
    """Yield batches in order from a thread pool, prefetching as many as a DataLoader does."""
    fetch = fetching(dataset)
    with ThreadPoolExecutor(num_workers) as pool:
        ahead: deque[Any] = deque()
        for batch in batches:
            ahead.append(pool.submit(fetch, batch))
            if len(ahead) > AHEAD * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class Futures:
    """The same, epoch after epoch."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return futures(*self.given)


def bare_threads(dataset: Any, batches: list[Any], num_workers: int) -> float:
    """Make the batches in threads that do not hand them over. Return the microseconds per batch."""
    import torch

    fetch, begin = fetching(dataset), threading.Barrier(num_workers + 1)

    def make(own: list[Any]) -> None:
        torch.set_num_threads(1)
        begin.wait()
        for indices in own:
            fetch(indices)

    with ThreadPoolExecutor(num_workers) as pool:
        made = [pool.submit(make, batches[n::num_workers]) for n in range(num_workers)]
        begin.wait()
        start = time.perf_counter()
        for each in made:
            each.result()
    Counter.batches += len(batches)
    return (time.perf_counter() - start) / len(batches) * 1e6


def epochs(
    name: str, make: Callable[[int], Any], count: int, batch_size: int, num_workers: int
) -> Iterator[Callable[[], float]]:
    """Measure the time per batch of an epoch."""
    dataset = make(count * batch_size)
    order = np.random.default_rng(0).permutation(count * batch_size).reshape(count, batch_size)
    batches = order.tolist()
    if name == SPDL:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(batches, continuous=True)
        builder.pipe(fetching(dataset), concurrency=num_workers, output_order="input")
        pipeline = builder.add_sink(AHEAD * num_workers).build(num_threads=num_workers)
        with pipeline.auto_stop():
            yield functools.partial(rate, pipeline, count, num_workers)
        return
    given = dataset, batches, num_workers
    if name == LIMIT:
        yield functools.partial(bare_threads, *given)
        return
    loader = Futures(*given) if name == FUTURES else loader_of(name, *given)
    yield functools.partial(rate, loader, count, num_workers)


def rate(loader: Any, count: int, num_workers: int) -> float:
    """Run an epoch. Return the microseconds per batch after the first ones.

    SPDL's pipeline makes the first ones before the loop requests the epoch.
    """
    skipped = min((AHEAD + 1) * num_workers, count // 2)
    for number, _ in enumerate(loader, 1):
        if number == skipped:
            start = time.perf_counter()
    Counter.batches += count
    return (time.perf_counter() - start) / (count - skipped) * 1e6


class Records(NamedTuple):
    """The loaders of `first_batch`."""

    num_workers: int

    def loader(self, name: str) -> Any:
        """Make the loader of a contender."""
        batches = np.arange(32 * 100).reshape(100, 32).tolist()
        return loader_of(name, Dicts(32 * 100), batches, self.num_workers)


# -- cases


def part(name: str) -> Callable[[Mapping[str, float]], float]:
    """Return a function for our time per batch as a fraction of another contender's."""
    return lambda figures: figures[THREADS] / figures[name]


def goals(*more: Goal) -> tuple[Goal, ...]:
    """Our threads are never slower than other threads."""
    others = (
        Goal(f"part of the time of {name}", part(name), at_most=1.0) for name in (SPDL, FUTURES)
    )
    return (*others, *more)


def case(
    name: str,
    title: str,
    make: Callable[[int], Any],
    batches: int,
    batch_size: int = 32,
    num_workers: int = 2,
    *more: Goal,
    group: str = "threads",
    needs: tuple[str, ...] = (),
) -> Case:
    """Declare a case whose figure is the time of a batch."""

    def contender(which: str) -> Contender:
        needed = ("torch", *needs, *(("spdl-core",) if which == SPDL else ()))
        # A loop without workers takes long.
        count = max(batches // 4, 2) if which == BARE else batches
        run = partial(epochs, which, make, count, batch_size, num_workers)
        return Contender(which, run, needed, ours=which in (THREADS, PROCESSES))

    rivals = (THREADS, PROCESSES, TORCH, SPDL, FUTURES, BARE, LIMIT)
    return Case(
        f"{group}_{name}",
        f"Threads and processes: {title}",
        "µs/batch",
        tuple(map(contender, rivals)),
        goals=goals(*more),
    )


HALVES = Goal(
    "of the bare loop's rate for each core", lambda f: f[BARE] / f[THREADS] / 2, at_least=0.9
)
THREADED = Goal("of bare threads' rate", lambda f: f[LIMIT] / f[THREADS], at_least=0.9)
WAITING = Goal("of 32 readers' rate", lambda f: 20e3 / 32 / f[THREADS], at_least=0.95)
FIRST = tuple(
    Contender(name, partial(first_batch, Records(2), name), ("torch",), ours=name != TORCH)
    for name in (THREADS, PROCESSES, TORCH)
)

CASES = (
    case(
        "jpeg",
        "32 JPEG files, Pillow",
        Jpegs,
        scaled(60, 4),
        32,
        2,
        HALVES,
        THREADED,
        needs=("pillow",),
    ),
    case("tokens", "32 windows of a token file", Tokens, scaled(1000, 8)),
    case("images", "4.8 MB of images by an index", Images, scaled(400, 6)),
    case("dicts", "32 of 300 000 records", Dicts, scaled(1000, 8)),
    case("python", "1 ms of Python code", Interpreted, scaled(500, 8)),
    case("remote", "samples after 20 ms, 32 workers", Remote, scaled(1600, 64), 1, 32, WAITING),
    case("arrow", "32 rows of Hugging Face's", Arrow, scaled(600, 6), needs=("datasets",)),
    case("small", "32 tensors of 8 floats", Tensors, scaled(2000, 8)),
    Case(
        "threads_start",
        "Threads and processes: first batch of 300 000 records",
        "ms",
        FIRST,
        goals=(Goal("ms", lambda f: f[THREADS], at_most=20),),
        fresh=True,
    ),
)
