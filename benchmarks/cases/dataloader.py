"""`cseq.DataLoader` compared with the classes that it replaces: only the import differs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness import usage
from harness.case import Case, Contender, Counter, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS, TORCH, STATEFUL = "cseq.DataLoader", "torch DataLoader", "StatefulDataLoader"
POOL = "multiprocessing.Pool.imap"
WITHOUT = "torch DataLoader, num_workers=0"
HOMES = {OURS: "cseq", TORCH: "torch.utils.data", STATEFUL: "torchdata.stateful_dataloader"}
NEEDS = {POOL: (), STATEFUL: ("torch", "torchdata.stateful_dataloader")}

# -- data sets: a batch has 32 samples unless `Load` gives another number


class Tensors:
    """Samples of eight floats and a number."""

    def __init__(self, samples: int) -> None:
        import torch

        self.samples = samples
        self.table = torch.zeros(256, 8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.table[index % 256], index


class Arrays(Tensors):
    """The same samples as arrays."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.table = np.zeros((256, 8), np.float32)


class Images(Tensors):
    """Samples of 3 x 224 x 224 bytes."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        import torch

        self.table = torch.zeros(256, 3, 224, 224, dtype=torch.uint8)


class Dicts(Tensors):
    """Samples that are dicts of 20 tensors of 16."""

    def __init__(self, samples: int) -> None:
        import torch

        self.samples = samples
        self.parts = {f"part {number}": torch.zeros(256, 16) for number in range(20)}

    def __getitem__(self, index: int) -> Any:
        return {name: part[index % 256] for name, part in self.parts.items()}


class Slow(Tensors):
    """Samples that take 5 ms each. A batch has 4."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


@dataclass
class Record:
    """A sample of four fields."""

    number: int
    text: str
    score: float
    tags: list[str]


class Named(NamedTuple):
    """The same sample as a named tuple."""

    number: int
    text: str
    score: float
    tags: list[str]


def fields(n: int) -> tuple[int, str, float, list[str]]:
    """Return the fields of a record."""
    return n, f"some words of text number {n} " * 8, n / 2, ["a", "b", str(n)]


def annotations(n: int) -> dict[str, Any]:
    """Return an image's annotations: numbers in containers that are nested six deep."""
    box = [1.0, 2.0, 3.0, 4.0 * n]
    return {"id": n, "parts": [{"box": box, "outline": [[n, *box]]} for _ in range(n % 8)]}


OBJECTS: dict[str, Callable[[int], Any]] = {
    "dataclasses": lambda n: Record(*fields(n)),
    "named": lambda n: Named(*fields(n)),
    "numbers": lambda n: {"id": np.int64(n), "y": np.float32(n), "text": f"abc{n}"},
    "lists": lambda n: list(range(n % 200 + 50)),
    "annotations": annotations,
}


class Objects(Tensors):
    """Objects without arrays, made in advance."""

    def __init__(self, kind: str, samples: int) -> None:
        self.samples = samples
        self.table = [OBJECTS[kind](n) for n in range(2000)]

    def __getitem__(self, index: int) -> Any:
        return self.table[index % len(self.table)]


def listed(samples: list[Any]) -> list[Any]:
    """Return the samples unchanged: a collate function."""
    return samples


def stacked(samples: list[Any]) -> Any:
    """Stack the samples: a user's collate function."""
    import torch

    return torch.stack([image for image, _ in samples]), torch.tensor([n for _, n in samples])


# -- loaders


class Load(NamedTuple):
    """A load: the data set, the number of batches per epoch, and the options."""

    dataset: Callable[[int], Any]
    batches: int
    batch_size: int = 32
    collate_fn: Any = None
    num_workers: int = 2

    def loader(self, name: str, **more: Any) -> Any:
        """Make a contender's loader."""
        from importlib import import_module

        workers: dict[str, Any] = {"num_workers": 0}
        if name != WITHOUT:
            workers = {"num_workers": self.num_workers, "persistent_workers": True}
            workers["multiprocessing_context"] = "fork"
        home = import_module(HOMES.get(name, HOMES[TORCH]))
        make = getattr(home, "StatefulDataLoader" if name == STATEFUL else "DataLoader")
        return make(
            self.dataset(self.batches * self.batch_size),
            batch_size=self.batch_size,
            shuffle=True,
            collate_fn=self.collate_fn,
            **(workers | more),
        )


def epochs(load: Load, name: str) -> Iterator[Callable[[], float]]:
    """Measure the time per batch over an epoch of persistent workers."""
    if name != OURS:
        load = load._replace(batches=max(4, load.batches // 5))
    loader = load.loader(name)

    yield partial(measured, loader)


def measured(loader: Any) -> float:
    """Run an epoch. Return the microseconds per batch."""
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    seconds = time.perf_counter() - start
    Counter.batches += count
    return seconds / count * 1e6


class Pooled:
    """The batches of `Pool.imap` over the same samples."""

    # The data set in a process of the pool.
    dataset: Any

    def __init__(self, load: Load, pool: Any) -> None:
        self.load, self.pool = load, pool

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng().permutation(self.load.batches * self.load.batch_size)
        return self.pool.imap(self.fetch, order.reshape(-1, self.load.batch_size).tolist())

    @classmethod
    def open(cls, dataset: Any) -> None:
        """Store the data set in a process of the pool."""
        cls.dataset = dataset

    @classmethod
    def fetch(cls, keys: list[int]) -> list[Any]:
        """Make a batch in a process of the pool."""
        return [cls.dataset[key] for key in keys]


def processor(loader: Any) -> float:
    """Run an epoch. Return the CPU time of all processes per batch, in microseconds."""
    before, batches = usage.cpu_seconds(os.getpid()), Counter.batches
    measured(loader)
    return (usage.cpu_seconds(os.getpid()) - before) / (Counter.batches - batches) * 1e6


def objects(load: Load, name: str) -> Iterator[Callable[[], float]]:
    """Measure the CPU time per batch over an epoch of persistent workers."""
    if name != POOL:
        yield partial(processor, load.loader(name))
        return
    dataset = load.dataset(load.batches * load.batch_size)
    context = multiprocessing.get_context("fork")
    with context.Pool(load.num_workers, Pooled.open, (dataset,)) as pool:
        yield partial(processor, Pooled(load, pool))


def first_batch(load: Any, name: str) -> Iterator[Callable[[], float]]:
    """Measure the time from `iter` to the first batch, with all imports done."""
    loader = load.loader(name)
    kept: list[Any] = []
    # Collecting the garbage of imports takes 50 ms, so it happens before the measurement.
    gc.collect()

    def run() -> float:
        start = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds = time.perf_counter() - start
        kept.append(iterator)
        return seconds * 1e3

    yield run
    kept.clear()


def after_a_break(load: Load, name: str) -> Iterator[Callable[[], float]]:
    """Measure the time of `iter` while batches of the abandoned epoch are in progress."""
    loader = load.loader(name)
    if name == OURS:
        # With "worker", `iter` would wait as torch's does.
        loader.rng = "batch"

    def run() -> float:
        next(iter(loader))
        start = time.perf_counter()
        iter(loader)
        return (time.perf_counter() - start) * 1e3

    yield run


def states(load: Load, name: str) -> Iterator[Callable[[], float]]:
    """Measure the time of `state_dict` in mid-epoch."""
    loader = load.loader(name)
    iterator = iter(loader)
    next(iterator)
    calls = scaled(200, 2)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            loader.state_dict()
        return (time.perf_counter() - start) / calls * 1e6

    yield run
    del iterator


def death(load: Load, name: str) -> Iterator[Callable[[], float]]:
    """Measure the time from a worker's death to batches that it had not begun, or torch's error."""
    loader = load.loader(name)

    def run() -> float:
        iterator = iter(loader)
        next(iterator)
        start = time.perf_counter()
        # torch's SIGCHLD handler may raise at once.
        try:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            for _ in range(4 * load.num_workers):
                next(iterator)
        except (RuntimeError, OSError):
            if name == OURS:
                raise
            loader._iterator = None
        seconds = time.perf_counter() - start
        del iterator
        gc.collect()
        return seconds * 1e3

    yield run


# -- cases

TINY = Load(Tensors, scaled(5000, 10))
ONE = TINY._replace(num_workers=1)
LARGE = Load(Images, scaled(60, 6), 256)
SLOW = Load(Slow, scaled(150, 8), 4)
# Few samples, because the sampler first draws the whole order, which is equally slow for all.
START = TINY._replace(batches=100)
UNDER_WAY = Load(Slow, 40, 32)


def contenders(measure: Any, load: Load, *names: str) -> tuple[Contender, ...]:
    """Declare contenders that do the same work."""
    return tuple(
        Contender(name, partial(measure, load, name), NEEDS.get(name, ("torch",)), name == OURS)
        for name in names
    )


def part(most: float) -> Goal:
    """Declare a goal: a fraction of the time of torch's DataLoader."""
    return Goal("part of torch's time", lambda f: f[OURS] / f[TORCH], at_most=most)


def case(name: str, title: str, load: Load, most: float) -> Case:
    """Declare a case whose figure is the time of a batch."""
    title = f"DataLoader: {title}"
    rivals = contenders(epochs, load, OURS, TORCH, STATEFUL, WITHOUT)
    return Case(f"dataloader_{name}", title, "µs/batch", rivals, goals=(part(most),))


def case_of_objects(kind: str, title: str, most: float) -> Case:
    """Declare a case of batches that are lists of objects."""
    load = Load(partial(Objects, kind), scaled(500, 6), collate_fn=listed)
    rivals = contenders(objects, load, OURS, TORCH, POOL)
    name = f"dataloader_{kind}"
    return Case(name, f"DataLoader: {title}", "CPU µs/batch", rivals, goals=(part(most),))


CASES = (
    case("tensors", "32 tensors of 8 floats", TINY, 1 / 10),
    case("arrays", "32 arrays of 8 floats", TINY._replace(dataset=Arrays), 1 / 10),
    case("images", "4.8 MB of images", Load(Images, scaled(400, 6)), 1 / 6),
    case("large", "38 MB of images", LARGE, 1 / 4),
    case("stacked", "38 MB, torch.stack in collate_fn", LARGE._replace(collate_fn=stacked), 1 / 4),
    case("dicts", "32 dicts of 20 tensors", Load(Dicts, scaled(500, 6)), 1 / 6),
    case_of_objects("dataclasses", "32 dataclasses of four fields", 0.51),
    case_of_objects("named", "32 named tuples of four fields", 0.85),
    case_of_objects("numbers", "32 dicts with two of numpy's numbers", 0.53),
    case_of_objects("lists", "32 lists of 50 to 249 ints", 0.71),
    case_of_objects("annotations", "32 dicts of lists of dicts of lists", 0.71),
    case("slow", "4 samples of 5 ms", SLOW, 1.02),
    Case(
        "dataloader_one",
        "DataLoader: 32 tensors of 8 floats, 1 worker",
        "µs/batch",
        contenders(epochs, ONE, OURS, TORCH, WITHOUT),
        goals=(Goal("part of the time without", lambda f: f[OURS] / f[WITHOUT], at_most=1),),
    ),
    Case(
        "dataloader_start",
        "DataLoader: first batch, 2 forked workers",
        "ms",
        contenders(first_batch, START, OURS, TORCH, STATEFUL),
        goals=(part(1 / 2),),
        fresh=True,
    ),
    Case(
        "dataloader_break",
        "DataLoader: iter behind a break, batches of 160 ms under way",
        "ms",
        contenders(after_a_break, UNDER_WAY, OURS, TORCH),
        goals=(Goal("ms", lambda f: f[OURS], at_most=10),),
    ),
    Case(
        "dataloader_state",
        "DataLoader: state_dict in mid-epoch",
        "µs",
        contenders(states, TINY, OURS, STATEFUL),
        goals=(Goal("µs", lambda f: f[OURS], at_most=20),),
    ),
    Case(
        "dataloader_death",
        "DataLoader: a worker is killed",
        "ms",
        contenders(death, TINY, OURS, TORCH),
        goals=(Goal("ms", lambda f: f[OURS], at_most=1000),),
        fresh=True,
    ),
)
