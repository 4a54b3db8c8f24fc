"""Shards in a store or a folder, whose samples hold their numbers, and queries about them."""

import io
import os
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
from waiting import until

import cseq

SEED = 3


def npy(first, rows, width=150):
    """Return the bytes of an .npy file whose rows hold their numbers, from `first` on."""
    return saved(np.repeat(np.arange(first, first + rows)[:, None], width, 1).astype(np.int32))


def saved(array):
    """Return the bytes of an array's .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_shards(sizes, width=150):
    """Return .npy shards of given sizes, by name."""
    firsts = (np.cumsum(sizes) - sizes).tolist()
    shards = [npy(first, size, width) for first, size in zip(firsts, sizes, strict=True)]
    return {f"train/{number:03}.npy": shard for number, shard in enumerate(shards)}


def tar_of(members):
    """Return the bytes of a tar file with the given members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def tar_shards(sizes):
    """Return tar shards of given sizes, by name; each sample has two members with its number."""
    shards, first = {}, 0
    for number, size in enumerate(sizes):
        pairs = []
        for k in range(first, first + size):
            pairs.append((f"some/{k:04}.bin", bytes([k % 256]) * (k + 1)))
            pairs.append((f"some/{k:04}.cls", str(k).encode()))
        shards[f"train/{number:03}.tar"], first = tar_of(pairs), first + size
    return shards


def parquet_shards(sizes, rows=10, **options):
    """Return Parquet files of given sizes, by name; a row group has `rows` rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files, first = {}, 0
    for number, size in enumerate(sizes):
        numbers, first = np.arange(first, first + size), first + size
        columns = {
            "number": numbers,
            "half": (numbers / 2).astype(np.float32),
            "text": [f"row {k}" for k in numbers.tolist()],
            "pair": pa.array([[k, -k] for k in numbers.tolist()], pa.list_(pa.int32(), 2)),
            "list": [[*range(k % 3)] for k in numbers.tolist()],
        }
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file, row_group_size=rows, **options)
        files[f"train/{number:03}.parquet"] = file.getvalue()
    return files


def written(objects, folder):
    """Write objects to a folder; return the folder."""
    for name, data in objects.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder)


def whole(server, key="*"):
    """Count the successful requests for whole objects."""
    seen = server.log(key, "GET")
    return sum(not one.span and one.status == 200 and not one.fault for one in seen)


def s3(server, **options):
    """Return an obstore store of a server."""
    stores = pytest.importorskip("obstore.store")
    return stores.S3Store("any", **server.options, **options)


def flat(order, *args, **options):
    """Return the samples of all batches as one list."""
    return [number for batch in order.batches(*args, **options) for number in batch]


def stream(sizes, window, batch_size, epochs=1):
    """Return the samples of a reader's order over several epochs."""
    order = cseq.Blocks(sizes, window)
    return [k for epoch in range(epochs) for k in flat(order, batch_size, seed=SEED, epoch=epoch)]


class Numbers:
    """An indexer of the numbers in a reader's samples, which checks that each sample is whole."""

    def __init__(self, reader):
        self.reader = reader

    def __getitem__(self, indices):
        found = self.reader[indices]
        if isinstance(found, dict):
            numbers = found["number"]
            assert (found["half"] == numbers / 2).all()
            assert (found["pair"] == np.stack([numbers, -numbers], 1)).all()
            return numbers
        if isinstance(found, list):
            numbers = [int(sample["cls"]) for sample in found]
            for number, sample in zip(numbers, found, strict=True):
                assert sample["bin"] == bytes([number % 256]) * (number + 1)
                assert sample["__key__"] == f"some/{number:04}"
            return np.array(numbers)
        assert (found == found[:, :1]).all()
        return found[:, 0]


def loop(kind, reader, window, batch_size, epochs=1):
    """Return the numbers in the samples that a training loop receives from a reader."""
    options = {"batch_size": batch_size, "order": reader.order(window=window), "seed": SEED}
    with kind.start(Numbers(reader), len(reader), **options) as batches:
        return np.concatenate([batch for _ in range(epochs) for batch in batches]).tolist()


def fetching(cache):
    """Return the id of the process that fetches into a folder, or None."""
    wanted = Path(cache, "fetcher").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[-3].endswith(f":{wanted}"):
            return int(words[4])
    return None


def kill_fetching(cache):
    """Kill the process that fetches into a folder, and wait for it to end."""
    number = fetching(cache)
    descriptor = os.pidfd_open(number)
    os.kill(number, signal.SIGKILL)
    until(lambda: fetching(cache) != number)
    os.close(descriptor)
