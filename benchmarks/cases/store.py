"""Shards in a slow and faulty object store (200 ms per answer): how long a loop waits."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
from harness.case import Case, Contender, Counter, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHARDS, ROWS, BATCH = scaled(32, 8), 100, 32
# A sample has this many bytes, and the loop takes this many bytes per second.
SIZE = scaled(100_000, 1000)
RATE = 100e6
STEP = BATCH * SIZE / RATE
# The server answers after this many seconds.
DELAY = 0.2
# This many shards are mixed. The time that the loop waits counts from the second window.
WINDOW = 4
WORKERS = 2
NPY, MEMORY = "store.Npy", "arrays in memory"
LIT, MOSAIC, WEB = "litdata", "MosaicML Streaming", "WebDataset"

# The faults of each case, as arguments of `S3Server.fail`.
FAULTS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "sound": (),
    "503_1": ({"kind": "503", "chance": 0.01},),
    "503_10": ({"kind": "503", "chance": 0.1},),
    "broken": (
        {"kind": "cut", "chance": 0.05},
        {"kind": "stall", "chance": 0.05, "seconds": 5},
    ),
}
# If many requests fail, cseq fetches more shards ahead and resends stalled requests early.
PREPARED: dict[str, dict[str, Any]] = {
    "503_10": {"ahead": 8},
    "broken": {"timeout": 0.5, "ahead": 12},
}
SECRETS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}


def sample(number: int) -> np.ndarray:
    """Make a sample: incompressible bytes and its number."""
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def numbers(shard: int) -> range:
    """Return the sample numbers of a shard."""
    return range(shard * ROWS, (shard + 1) * ROWS)


class Memory:
    """Samples in memory: any waiting here is due to the machine."""

    def __init__(self) -> None:
        self.table = np.stack([sample(number) for number in range(ROWS)])

    def __getitem__(self, indices: np.ndarray) -> Any:
        return np.take(self.table, indices % ROWS, 0, cseq.empty((len(indices), SIZE), np.uint8))


@contextmanager
def memory(_server: Any, _cache: str) -> Iterator[Any]:
    """Yield the batches of an epoch."""
    order = cseq.Blocks(rows=ROWS, window=WINDOW, samples=SHARDS * ROWS)
    options: Any = {"out_type": "cpu", "dtype": None, "order": order, "num_workers": WORKERS}
    with cseq.MPSequence(Memory, SHARDS * ROWS, batch_size=BATCH, **options).start() as batches:
        yield batches


def write_npy(folder: Path) -> None:
    """Write .npy files."""
    for shard in range(SHARDS):
        np.save(folder / f"{shard:04}.npy", np.stack([sample(each) for each in numbers(shard)]))


def write_tar(folder: Path) -> None:
    """Write tar files, as WebDataset does."""
    from webdataset import TarWriter

    for shard in range(SHARDS):
        with TarWriter(str(folder / f"{shard:04}.tar")) as file:
            for number in numbers(shard):
                file.write({"__key__": f"{number:06}", "bin": sample(number).tobytes()})


@contextmanager
def ours(server: Any, cache: str, **options: Any) -> Iterator[Any]:
    """Yield the batches of an epoch of cseq's reader. Its index is made here, too."""
    from obstore.store import S3Store

    from cseq import store

    there = S3Store("any", **server.options)
    shards = store.Npy("", cache=cache, store=there, **options)
    more: Any = {"out_type": "cpu", "dtype": None, "num_workers": WORKERS}
    more["order"] = shards.order(window=WINDOW)
    with cseq.MPSequence(shards, len(shards), batch_size=BATCH, **more).start() as batches:
        yield batches


def write_lit(folder: Path) -> None:
    """Write litdata's chunks, with as many samples per chunk as a shard has."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=ROWS)
    for number in range(SHARDS * ROWS):
        writer[number] = {"x": sample(number)}
    writer.done()
    writer.merge()


@contextmanager
def lit(server: Any, cache: str) -> Iterator[Any]:
    """Yield litdata's batches. It fetches more chunks in advance the longer they take."""
    from litdata import StreamingDataLoader, StreamingDataset

    # litdata has no argument for a store without TLS.
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    secrets = {**SECRETS, "endpoint_url": server.endpoint, "region_name": "us-east-1"}
    dataset = StreamingDataset(
        "s3://any/", cache_dir=cache, shuffle=True, storage_options=secrets, max_pre_download=8
    )
    yield StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, drop_last=True)


def write_mosaic(folder: Path) -> None:
    """Write MosaicML's shards."""
    from streaming import MDSWriter

    columns = {"x": f"ndarray:uint8:{SIZE}"}
    limit = ROWS * (SIZE + 8) + 100
    with MDSWriter(out=str(folder), columns=columns, size_limit=limit) as file:
        for number in range(SHARDS * ROWS):
            file.write({"x": sample(number)})


@contextmanager
def mosaic(server: Any, cache: str) -> Iterator[Any]:
    """Yield MosaicML's batches, whose samples are mixed as far as in our windows."""
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    os.environ.update({name.upper(): value for name, value in SECRETS.items()})
    os.environ.update(S3_ENDPOINT_URL=server.endpoint, AWS_DEFAULT_REGION="us-east-1")
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote="s3://any/",
        local=cache,
        batch_size=BATCH,
        shuffle=True,
        shuffle_block_size=WINDOW * ROWS,
        predownload=2 * WINDOW * ROWS,
        download_retry=10,
    )
    # Forked workers would share the connection of the index, and read one another's answers.
    for stream in dataset.streams:
        stream._downloader.clean_up()
    yield StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, drop_last=True)


@contextmanager
def web(server: Any, _cache: str) -> Iterator[Any]:
    """Yield WebDataset's batches. Its shards come through curl, as in its documentation."""
    from webdataset import WebDataset, WebLoader, warn_and_continue

    urls = [f"{server.endpoint}/any/{shard:04}.tar" for shard in range(SHARDS)]
    data = WebDataset(urls, shardshuffle=SHARDS, handler=warn_and_continue).shuffle(WINDOW * ROWS)
    rows = data.to_tuple("bin").map_tuple(lambda each: np.frombuffer(each, np.uint8).copy())
    yield WebLoader(rows.batched(BATCH), batch_size=None, num_workers=WORKERS)


KINDS = {
    NPY: (write_npy, ours, ("obstore",)),
    MEMORY: (None, memory, ()),
    LIT: (write_lit, lit, ("torch", "litdata", "boto3", "obstore")),
    MOSAIC: (write_mosaic, mosaic, ("torch", "mosaicml-streaming")),
    WEB: (write_tar, web, ("torch", "webdataset")),
}


def waits(batches: Any, first: float) -> float:
    """Take batches at the fixed rate. Return the percentage of time that the loop waited."""
    waited = []
    begin = first
    for _ in batches:
        waited.append(time.perf_counter() - begin)
        time.sleep(STEP)
        begin = time.perf_counter()
    Counter.batches += len(waited)
    counted = waited[WINDOW * ROWS // BATCH :]
    return 100 * sum(counted) / (sum(counted) + len(counted) * STEP)


def first_batch(batches: Any, begin: float) -> float:
    """Return the seconds to the first batch."""
    for _ in islice(batches, 1):
        Counter.batches += 1
        took = time.perf_counter() - begin
    return took


def epochs(name: str, faults: str, measure: Any) -> Iterator[Any]:
    """Measure a first epoch. Each round has an empty cache, and different requests fail."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
    from s3_server import S3Server

    write, batches_of, _ = KINDS[name]
    if name == NPY:
        batches_of = partial(batches_of, **PREPARED.get(faults, {}))
    with tempfile.TemporaryDirectory() as folder, S3Server(folder, delay=DELAY) as server:
        if write is not None:
            write(Path(folder))
        for fault in FAULTS[faults]:
            server.fail(**fault)

        def run() -> float:
            with tempfile.TemporaryDirectory() as cache:
                begin = time.perf_counter()
                with batches_of(server, cache) as batches:
                    return measure(batches, begin)

        yield run


def case(name: str, title: str, unit: str, make: Any, goal: str, at_most: float) -> Case:
    """Declare a case."""
    contenders = tuple(
        Contender(each, partial(make, each), needs, each == NPY)
        for each, (_, _, needs) in KINDS.items()
    )
    goals = (Goal(goal, lambda f: f[NPY], at_most=at_most),)
    return Case(f"store_{name}", title, unit, contenders, limit=MEMORY, goals=goals, rounds=3)


def waiting(faults: str, title: str) -> Case:
    """Declare a case of a loop that consumes 100 MB/s."""
    title = f"An S3 server with 200 ms a request, {title}: a loop of 100 MB/s waits"
    make = partial(epochs, faults=faults, measure=waits)
    return case(faults, title, "% of the time", make, "% of the time", 1)


CASES = (
    waiting("sound", "sound"),
    waiting("503_1", "1 % of 503"),
    waiting("503_10", "10 % of 503"),
    waiting("broken", "5 % of answers cut, 5 % stalled for 5 s"),
    case(
        "first",
        "From nothing to the first batch, 200 ms a request",
        "s",
        partial(epochs, faults="sound", measure=first_batch),
        "seconds",
        1,
    ),
)
