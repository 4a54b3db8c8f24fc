"""The loaders: one function for each, which runs a `Work`.

Each is a generator function: it sets the loader up, yields the function that runs a round, and
closes the loader. All of them shuffle, fetch a whole batch with one call of the indexer, buffer at
most `work.buffer` batches, and keep their workers between epochs. To add a loader, add a function
here and use it in the cases that it is for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cseq
from work import Bare, Batches, Rows, Work, shuffled

Rounds = Iterator[Callable[[], float]]

# -- the limit


def bare(work: Work) -> Rounds:
    """No loader at all: a loop over the indexer, in this process."""
    yield functools.partial(work.measure, Bare(work))


# -- cseq


def cseq_processes(work: Work, **options: Any) -> Rounds:
    """`MPSequence`."""
    with cseq_manager(cseq.MPSequence, work, **options).start() as batches:
        yield functools.partial(work.measure, batches)


def cseq_threads(work: Work, **options: Any) -> Rounds:
    """`MTSequence`."""
    with cseq_manager(cseq.MTSequence, work, **options).start() as batches:
        yield functools.partial(work.measure, batches)


def cseq_test_mode(work: Work, **options: Any) -> Rounds:
    """`start_test()`."""
    with cseq_manager(cseq.MPSequence, work, **options).start_test() as batches:
        yield functools.partial(work.measure, batches)


def cseq_manager(kind: Callable[..., Any], work: Work, **options: Any) -> Any:
    """Make a manager for a `Work`."""
    ours = {
        "num_workers": work.num_workers,
        "batch_size": work.batch_size,
        "buffer": work.buffer,
        "shuffle": work.shuffle,
        "out_type": "null",
        "seed": 1,
    }
    return kind(work.indexer, work.samples, **(ours | options))


# -- the standard library


def plain_queue(work: Work) -> Rounds:
    """Threads and two `queue.Queue`, and a dict that brings the batches back into order."""
    inputs: queue.Queue = queue.Queue(work.buffer)
    outputs: queue.Queue = queue.Queue(work.buffer)

    def serve() -> None:
        indexer = work.indexer()
        while (task := inputs.get()) is not None:
            ticket, indices = task
            outputs.put((ticket, indexer[indices]))

    threads = [threading.Thread(target=serve) for _ in range(work.num_workers)]
    for thread in threads:
        thread.start()
    yield functools.partial(work.measure, InOrder(Rows(work), inputs, outputs, work.buffer))
    for _ in threads:
        inputs.put(None)
    for thread in threads:
        thread.join()


def pipe(work: Work) -> Rounds:
    """A process that sends the bytes of batches through a pipe, at most `buffer` batches ahead."""
    context = multiprocessing.get_context("fork")

    class Sent:
        """The batches of an epoch, from a separate process."""

        def __iter__(self) -> Iterator[Any]:
            reader, writer = context.Pipe(duplex=False)
            room = context.Semaphore(work.buffer)

            def send() -> None:
                indexer = work.indexer()
                for indices in Rows(work):
                    room.acquire()
                    writer.send_bytes(indexer[indices])

            process = context.Process(target=send)
            process.start()
            for _ in range(work.batches):
                yield reader.recv_bytes()
                room.release()
            process.join()

    yield functools.partial(work.measure, Sent())


class InOrder:
    """The batches of an epoch from a queue, with at most `buffer` of them requested at a time."""

    def __init__(self, rows: Rows, inputs: queue.Queue, outputs: queue.Queue, buffer: int) -> None:
        self.rows = rows
        self.inputs = inputs
        self.outputs = outputs
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        rows = enumerate(self.rows)
        asked = 0
        early: dict[int, Any] = {}
        for task in rows:
            self.inputs.put(task)
            asked += 1
            if asked == self.buffer:
                break
        taken = 0
        while taken < asked:
            while taken not in early:
                ticket, batch = self.outputs.get()
                early[ticket] = batch
            batch = early.pop(taken)
            taken += 1
            task = next(rows, None)
            if task is not None:
                self.inputs.put(task)
                asked += 1
            yield batch


# -- torch


class TorchDataset:
    """An indexer as a data set. Each worker makes its own at its first batch."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.samples

    @functools.cached_property
    def indexer(self) -> Any:
        """The indexer of this process."""
        return self.work.indexer()

    def __getitem__(self, indices: list[int]) -> Any:
        return self.indexer[indices]


def torch_dataloader(
    work: Work, *, start_method: str = "fork", home: str = "torch.utils.data"
) -> Rounds:
    """`DataLoader` with batch fetch: its sampler gives whole batches, which become tensors."""
    loader = torch_loader(work, start_method, kind=importlib.import_module(home).DataLoader)
    yield functools.partial(work.measure, loader)
    del loader


def drop_in(loader: Callable[..., Any], work: Work, dataset: Any, **options: Any) -> Rounds:
    """A DataLoader, torch's or another class with the same arguments, over a data set's samples."""
    made = loader(
        dataset,
        num_workers=work.num_workers,
        prefetch_factor=max(1, work.buffer // work.num_workers),
        persistent_workers=True,
        **options,
    )
    yield functools.partial(work.measure, made)
    del made


def torch_loader(
    work: Work, start_method: str | None, *, pin_memory: bool = False, kind: Any = None
) -> Any:
    """Make a DataLoader for a `Work`, torch's or another class with the same arguments."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    dataset = TorchDataset(work)
    order = RandomSampler(dataset) if work.shuffle else SequentialSampler(dataset)
    return (kind or DataLoader)(
        dataset,
        sampler=BatchSampler(order, work.batch_size, drop_last=False),
        batch_size=None,
        num_workers=work.num_workers,
        prefetch_factor=max(1, work.buffer // work.num_workers),
        persistent_workers=True,
        multiprocessing_context=start_method,
        pin_memory=pin_memory,
    )


# -- SPDL


def spdl_process(work: Work, *, segment_bytes: int = 0) -> Rounds:
    """`iterate_in_subprocess`: one worker process, with shared memory if segments are given."""
    loader = spdl_subprocess(work, segment_bytes)
    yield functools.partial(work.measure, loader)
    del loader


def spdl_subprocess(work: Work, segment_bytes: int = 0, start_method: str | None = None) -> Any:
    """Start SPDL's worker process. Segments need the default start method."""
    from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

    arena = None
    if segment_bytes:
        arena = SharedMemorySegmentPool(segment_bytes + 2**20, work.buffer + 4)
    return iterate_in_subprocess(
        functools.partial(Batches, work),
        buffer_size=work.buffer,
        mp_context=start_method,
        arena=arena,
    )


# The indexer's method, in a worker of `spdl_pool`.
_fetch: Any = None


def spdl_open(work: Work) -> None:
    """Make the indexer of a worker."""
    global _fetch
    _fetch = work.indexer().__getitem__


def spdl_fetch(indices: Any) -> Any:
    """Make a batch in a worker."""
    return _fetch(indices)


def spdl_pool(work: Work, *, start_method: str) -> Rounds:
    """A pipeline with one stage, which is run by a pool of `work.num_workers` processes."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from spdl.pipeline import PipelineBuilder

    context = multiprocessing.get_context(start_method)
    # Half of the batches are requested, and half are in the sink.
    half = max(1, work.buffer // 2)
    with ProcessPoolExecutor(work.num_workers, context, spdl_open, (work,)) as pool:
        builder = (
            PipelineBuilder()
            .add_source(Rows(work), continuous=True)
            .pipe(spdl_fetch, executor=pool, concurrency=half, output_order="input")
            .add_sink(half)
        )
        pipeline = builder.build(num_threads=1)
        with pipeline.auto_stop():
            yield functools.partial(work.measure, pipeline)


def spdl_threads(work: Work) -> Rounds:
    """A pipeline with the indexer as its only stage, run by `work.num_workers` threads."""
    from spdl.pipeline import PipelineBuilder

    indexer = work.indexer()
    builder = (
        PipelineBuilder()
        .add_source(Rows(work), continuous=True)
        .pipe(indexer.__getitem__, concurrency=work.num_workers, output_order="input")
        .add_sink(work.buffer)
    )
    pipeline = builder.build(num_threads=work.num_workers)
    with pipeline.auto_stop():
        yield functools.partial(work.measure, pipeline)


# -- Grain


class GrainSource:
    """Batch number → batch, in one order; Grain shuffles the batches."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.batches

    def __getitem__(self, number: int) -> Any:
        return self.indexer[self.rows[number]]

    @functools.cached_property
    def indexer(self) -> Any:
        """The indexer of this process."""
        return self.work.indexer()

    @functools.cached_property
    def rows(self) -> Any:
        """The indices of an epoch."""
        return shuffled(self.work, 0)


class GrainEpochs:
    """A Grain iterator that repeats its epochs forever, so that its workers are kept."""

    def __init__(self, work: Work, *, threads: bool = False) -> None:
        import grain

        logging.getLogger("absl").setLevel(logging.ERROR)
        dataset = grain.MapDataset.source(GrainSource(work))
        if work.shuffle:
            dataset = dataset.shuffle(seed=1)
        dataset = dataset.repeat()
        # By default, Grain would read 500 batches ahead, in 16 threads per worker.
        if threads:
            reading = grain.ReadOptions(work.num_workers, prefetch_buffer_size=work.buffer)
            self.batches = iter(dataset.to_iter_dataset(reading))
        else:
            share = max(1, work.buffer // work.num_workers)
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=share)
            working = grain.MultiprocessingOptions(work.num_workers, per_worker_buffer_size=share)
            self.batches = iter(dataset.to_iter_dataset(reading).mp_prefetch(working))
        self.count = work.batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield next(self.batches)

    def close(self) -> None:
        """Stop the workers."""
        self.batches.close()


def grain_processes(work: Work) -> Rounds:
    """`mp_prefetch` over a source whose elements are batches."""
    yield from grain_rounds(GrainEpochs(work), work)


def grain_threads(work: Work) -> Rounds:
    """Threads that read a source whose elements are batches."""
    yield from grain_rounds(GrainEpochs(work, threads=True), work)


def grain_rounds(epochs: GrainEpochs, work: Work) -> Rounds:
    """Run the rounds of an iterator, then close it."""
    yield functools.partial(work.measure, epochs)
    epochs.close()


# -- fleets, with the tests' helpers

TESTS = Path(__file__).resolve().parents[1] / "tests"


@contextlib.contextmanager
def ray_cluster(nodes: int, **more: Any) -> Iterator[None]:
    """Connect to a cluster of several nodes on this machine, whose processes find our modules.

    `more`: arguments of one more node.
    """
    sys.path.append(str(TESTS / "ray"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    from local_cluster import local_cluster

    with local_cluster(nodes) as cluster:
        if more:
            cluster.add_node(**more)
        yield


def cseq_ray(work: Work) -> Rounds:
    """`RaySequence`, with an agent on each of several nodes."""
    options = {"batch_size": work.batch_size, "buffer": work.buffer, "shuffle": work.shuffle}
    options["seed"] = 1
    with (
        ray_cluster(work.num_workers),
        cseq.RayFleet(work.indexer, work.num_workers, 1) as fleet,
        cseq.RaySequence(
            fleet, work.samples, out_type="null", seed=1, **options
        ).start() as batches,
    ):
        yield functools.partial(work.measure, batches)


def ray_calls(work: Work) -> Rounds:
    """An actor on each node, and a call for each batch."""
    import ray

    class Calls(Rows):
        def __iter__(self) -> Iterator[Any]:
            under_way: deque[Any] = deque()
            for number, indices in enumerate(super().__iter__()):
                under_way.append(actors[number % len(actors)].__getitem__.remote(indices))
                if len(under_way) == work.buffer:
                    yield ray.get(under_way.popleft())
            yield from map(ray.get, under_way)

    class Actor:
        def __init__(self) -> None:
            self.indexer = work.indexer()

        def __getitem__(self, indices: Any) -> Any:
            return self.indexer[indices]

    with ray_cluster(work.num_workers):
        make = ray.remote(num_cpus=1)(Actor)
        actors = [make.remote() for _ in range(work.num_workers)]
        yield functools.partial(work.measure, Calls(work))


def ray_data(work: Work) -> Rounds:
    """Ray Data's `map_batches` with the same number of actors on one node, with NumPy batches."""
    import ray

    class Indexed:
        def __init__(self) -> None:
            self.indexer = work.indexer()

        def __call__(self, rows: Any) -> Any:
            return {"batch": self.indexer[rows["id"]]}

    with ray_cluster(0, num_cpus=4):
        ray.data.DataContext.get_current().enable_progress_bars = False
        made = ray.data.range(work.samples).map_batches(
            Indexed, batch_size=work.batch_size, concurrency=work.num_workers
        )
        batches = made.iter_batches(batch_size=work.batch_size, batch_format="numpy")
        yield functools.partial(work.measure, batches)


def ray_objects(work: Work, nbytes: int) -> Rounds:
    """Measure getting objects, which other nodes made in advance, one after another, in GB/s."""
    import ray

    def make() -> Any:
        return np.ones(nbytes, np.uint8)

    def measure() -> float:
        seconds = 0.0
        for _ in range(work.batches):
            reference = ray.remote(num_cpus=1)(make).remote()
            ray.wait([reference], fetch_local=False)
            start = time.perf_counter()
            ray.get(reference)
            seconds += time.perf_counter() - start
            del reference
        return work.batches * nbytes / seconds / 1e9

    with ray_cluster(work.num_workers):
        yield measure
