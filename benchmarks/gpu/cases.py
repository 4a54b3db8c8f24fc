"""The measurements on the device: rates, steps, converters, the start and memory."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
import loaders
from cases.starting import first_batch
from gpu import device
from harness.case import Case, Contender, Counter, Goal, scaled
from work import Floats, ImagesInPlace, Structured, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PINNED, PAGEABLE = "bare copy, page-locked", "bare copy, pageable"
RESIDENT = "one resident batch"
PROCESSES, THREADS = "cseq.MPSequence, converters in processes", "cseq.MPSequence"
ALL_THREADS = "cseq.MTSequence"
DATALOADER = "torch DataLoader, pin_memory"
OUR_DATALOADER = "cseq.DataLoader, pin_memory"
OUR_THREADS = "cseq.DataLoader, threads, pin_memory"

SHAPE = (32, 3, 224, 224)
# The size of a uint8 batch in bytes.
IMAGES = int(np.prod(SHAPE))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = max(2, min(8, CORES // 2))
# The same number as with a DataLoader's prefetch_factor of 2.
BUFFER = 2 * WORKERS

# -- indexers


class Unfilled:
    """An array of floats that costs nothing to make, so that only its transport takes time."""

    def __getitem__(self, indices):
        return cseq.empty((len(indices), *SHAPE[1:]), np.float32)


class Labelled(ImagesInPlace):
    """Images and their classes."""

    def __init__(self) -> None:
        super().__init__("uint8")

    def __getitem__(self, indices):
        return super().__getitem__(indices), np.asarray(indices) % 10


# -- the loop


def seconds_a_batch(work: Work, loader: Iterable[Any], step: Callable[[Any], object]) -> float:
    """Run a step with each batch, and wait until the device has finished the last one."""
    start = time.perf_counter()
    count = 0
    for batch in loader:
        step(batch)
        count += 1
    device.synchronize()
    seconds = time.perf_counter() - start
    if count != work.batches:
        raise RuntimeError(f"the loader returned {count} batches instead of {work.batches}")
    Counter.batches += count
    return seconds / count


def nothing(_batch: Any) -> None:
    """Do nothing."""


def microseconds(work: Work, loader: Iterable[Any]) -> float:
    """Return the microseconds per batch without a step."""
    return seconds_a_batch(work, loader, nothing) * 1e6


@dataclass(frozen=True)
class Rate:
    """Measures gigabytes per second for batches of a given size."""

    nbytes: int

    def __call__(self, work: Work, loader: Iterable[Any]) -> float:
        return self.nbytes / seconds_a_batch(work, loader, nothing) / 1e9


def training(work: Work, loader: Iterable[Any]) -> float:
    """Return the milliseconds per training step."""
    return seconds_a_batch(work, loader, training_step()) * 1e3


@functools.cache
def training_step() -> Callable[[Any], object]:
    """Make a network with about the cost of a ResNet-18, and a function that trains it on a batch.

    The step does not wait for the device, as in a loop that does not read the loss.
    """
    import torch
    from torch import nn

    width = device.scaled_to(64, 2)
    layers: list[Any] = [nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage in range(4):
        for layer in range(device.scaled_to(4, 1)):
            wanted = width << stage
            stride = 2 if stage and not layer else 1
            layers += [nn.Conv2d(channels, wanted, 3, stride, 1), nn.BatchNorm2d(wanted)]
            layers.append(nn.ReLU())
            channels = wanted
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    network = nn.Sequential(*layers).to(device.DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: Any) -> None:
        images, labels = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images.float() / 255), labels).backward()
        optimizer.step()

    return step


def python_loop(work: Work, loader: Iterable[Any]) -> float:
    """Return the milliseconds per step in pure Python, which holds the GIL."""

    def step(_batch: Any) -> int:
        total = 0
        for number in range(100_000):
            total += number & 1
        return total

    return seconds_a_batch(work, loader, step) * 1e3


# -- the limits


def on_the_device(batch: Any) -> Any:
    """Start copying all tensors of a batch to the device."""
    if isinstance(batch, dict):
        return {name: on_the_device(part) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [on_the_device(part) for part in batch]
    return device.send(batch)


class Copies:
    """Copies of host memory, one after another, and nothing else."""

    def __init__(self, hosts: list[Any], count: int) -> None:
        self.hosts = hosts
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield device.send(self.hosts[number % len(self.hosts)])


def bare_copies(work: Work, nbytes: int, *, pinned: bool) -> loaders.Rounds:
    """Copy host memory of a batch's size to the device: the limit of every loader."""
    import torch

    device.prepare()
    hosts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(work.buffer)]
    if pinned:
        hosts = [device.page_locked(host) for host in hosts]
    yield partial(work.measure, Copies(hosts, work.batches))


class Resident:
    """One batch on the device, over and over."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch = batch
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield self.batch


def resident(work: Work) -> loaders.Rounds:
    """No loader at all."""
    from torch.utils.data import default_convert

    device.prepare()
    batch = default_convert(work.indexer()[np.arange(work.batch_size)])
    yield partial(work.measure, Resident(on_the_device(batch), work.batches))


# -- the loaders


def start_ours(work: Work, kind: str, compat: bool | None = None) -> Any:
    """Make a manager, and start it."""
    options: dict[str, Any] = {"out_type": "cuda", "dtype": None}
    # A forked process inherits the substitute.
    if device.STANDS_IN and kind == "MPSequence":
        options["start_method"] = "fork"
    return loaders.cseq_manager(getattr(cseq, kind), work, **options).start(compat)


def ours(work: Work, kind: str, compat: bool | None = None) -> loaders.Rounds:
    """Run one of cseq's managers."""
    device.prepare()
    with start_ours(work, kind, compat) as batches:
        yield partial(work.measure, batches)


class DeviceLoader:
    """A DataLoader used with a device: the loop sends page-locked batches to it."""

    def __init__(self, work: Work, *, ours: bool = False, threads: bool = False) -> None:
        # Without a device, torch warns that it cannot page-lock.
        pin_memory = not device.STANDS_IN
        method, kind = "fork", cseq.DataLoader if ours else None
        if threads:
            method, kind = None, partial(cseq.DataLoader, worker_method="thread")
        self.loader = loaders.torch_loader(work, method, pin_memory=pin_memory, kind=kind)

    def __iter__(self) -> Iterator[Any]:
        return map(on_the_device, self.loader)


def dataloader(work: Work, **how: bool) -> loaders.Rounds:
    """`torch.utils.data.DataLoader`, or ours instead."""
    device.prepare()
    loader = DeviceLoader(work, **how)
    yield partial(work.measure, loader)
    del loader


OURS = {THREADS: "MPSequence", ALL_THREADS: "MTSequence"}
OUR_LOADERS = {OUR_DATALOADER: {"ours": True}, OUR_THREADS: {"ours": True, "threads": True}}
TORCH = ("torch",)


def contenders(work: Work) -> tuple[Contender, ...]:
    """Return all loaders for a `Work`."""
    return (
        *(
            Contender(name, partial(ours, work, kind), needs=TORCH, ours=True)
            for name, kind in OURS.items()
        ),
        *(
            Contender(name, partial(dataloader, work, **how), needs=TORCH, ours=True)
            for name, how in OUR_LOADERS.items()
        ),
        Contender(DATALOADER, partial(dataloader, work), needs=TORCH),
    )


def in_processes(work: Work) -> Contender:
    """Ours with converters in processes, which hand over CUDA memory."""
    how = partial(ours, work, "MPSequence", compat=False)
    return Contender(PROCESSES, how, needs=TORCH, ours=True)


# -- cases that can be measured only once


def first(make: Callable[[], Any]) -> Iterator[Callable[[], float]]:
    """Time the start. The device is already initialised."""
    device.prepare()
    yield from first_batch(make)


def held(make: Callable[[], Any]) -> Iterator[Callable[[], float]]:
    """Measure the device memory that a loader takes after it has returned some batches."""
    device.prepare()
    kept = []

    def run() -> float:
        before = device.used_bytes()
        loader = make()
        kept.extend((loader, iter(loader)))
        most = 0.0
        for _ in range(scaled(4 * BUFFER, 3)):
            next(kept[1])
            device.synchronize()
            most = max(most, device.used_bytes() - before)
        return most / 1e6

    yield run
    batches = kept.pop()
    del batches
    if hasattr(kept[0], "finish"):
        kept[0].finish()


def once(how_measured: Callable[[Callable[[], Any]], Any], work: Work) -> tuple[Contender, ...]:
    """Return all loaders, for cases that can be measured only once in a process."""
    makes = {name: partial(start_ours, work, kind) for name, kind in OURS.items()}
    makes |= {name: partial(DeviceLoader, work, **how) for name, how in OUR_LOADERS.items()}
    makes[DATALOADER] = partial(DeviceLoader, work)
    return tuple(
        Contender(name, partial(how_measured, make), needs=TORCH, ours=name != DATALOADER)
        for name, make in makes.items()
    )


# -- the cases


def batches(cuda: int, cpu: int) -> int:
    """Return the number of batches per epoch."""
    return scaled(device.scaled_to(cuda, cpu), 4)


def work_of(indexer: Callable[[], Any], count: int, figure: Callable[..., float]) -> Work:
    """Make a `Work` with this machine's number of workers."""
    return Work(indexer, count, figure, num_workers=WORKERS, buffer=BUFFER)


def with_copies(work: Work, nbytes: int) -> tuple[Contender, ...]:
    """Return all loaders and the bare copies."""
    return (
        Contender(PINNED, partial(bare_copies, work, nbytes, pinned=True), needs=TORCH),
        Contender(PAGEABLE, partial(bare_copies, work, nbytes, pinned=False), needs=TORCH),
        *contenders(work),
    )


def with_resident(work: Work) -> tuple[Contender, ...]:
    """Return all loaders and the batch that is already on the device."""
    return (Contender(RESIDENT, partial(resident, work), needs=TORCH), *contenders(work))


def over(name: str, limit: str) -> Callable[[Any], float]:
    """Compare two medians."""
    return lambda figures: figures[name] / figures[limit]


UNFILLED = work_of(Unfilled, batches(500, 40), Rate(4 * IMAGES))
FILLED = work_of(partial(ImagesInPlace, "uint8"), batches(600, 80), Rate(IMAGES))
TRAINING = work_of(Labelled, batches(200, 8), training)
PYTHON = work_of(Labelled, batches(300, 40), python_loop)
SMALL_BATCHES = batches(4000, 1000)
SMALL = work_of(partial(Floats, SMALL_BATCHES * 32), SMALL_BATCHES, microseconds)
PARTS = work_of(Structured, batches(300, 40), microseconds)
ONCE = work_of(Labelled, scaled(1000, 100), microseconds)
INVISIBLE = tuple(
    Goal(f"{name}: step over that of a resident batch", over(name, RESIDENT), at_most=1.02)
    for name in OURS
)

CASES = (
    Case(
        "gpu_transfer",
        "19 MB float32 batches that cost nothing to make, to the device",
        "GB/s",
        (*with_copies(UNFILLED, 4 * IMAGES), in_processes(UNFILLED)),
        limit=PINNED,
        goals=tuple(
            Goal(f"{name}: share of the bare copy's rate", over(name, PINNED), at_least=0.9)
            for name in (THREADS, ALL_THREADS)
        ),
        more_is_better=True,
    ),
    Case(
        "gpu_images",
        "4.8 MB batches of images, filled in place, to the device",
        "GB/s",
        with_copies(FILLED, IMAGES),
        limit=PINNED,
        more_is_better=True,
    ),
    Case(
        "gpu_step",
        "A training step on the device with batches of images",
        "ms/step",
        (*with_resident(TRAINING), in_processes(TRAINING)),
        limit=RESIDENT,
        goals=INVISIBLE,
    ),
    Case(
        "gpu_python",
        "A step that is Python alone, with batches of images",
        "ms/step",
        with_resident(PYTHON),
        limit=RESIDENT,
        goals=INVISIBLE,
    ),
    Case(
        "gpu_small",
        "Batches of 32 floats, to the device",
        "µs/batch",
        (*contenders(SMALL), in_processes(SMALL)),
    ),
    Case(
        "gpu_dict_113",
        "A dict of 4.8 MB of images and 112 small arrays, to the device",
        "µs/batch",
        contenders(PARTS),
    ),
    Case(
        "gpu_start",
        "Start to first batch on the device",
        "ms",
        once(first, ONCE),
        fresh=True,
    ),
    Case(
        "gpu_memory",
        "Memory that the loader takes on the device",
        "MB",
        once(held, ONCE),
        fresh=True,
    ),
)
