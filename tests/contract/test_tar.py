"""`store.Tar`: samples of several members in tar files of a store."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from kinds import FEW, by_name
from s3_server import S3Server
from sharded import kill_fetching, loop, s3, stream, tar_of, tar_shards, whole, written

import cseq
from cseq import store

pytest.importorskip("obstore")
pytestmark = pytest.mark.needs("Linux")

SIZES = [7, 12, 9, 11, 8]
SHARDS = tar_shards(SIZES)
SAMPLES = sum(SIZES)
WINDOW, BATCH = 2, 5


@pytest.fixture
def server():
    """Return a store with the shards."""
    with S3Server(SHARDS) as running:
        yield running


class Numbers:
    """An indexer of the numbers in samples, which checks each member."""

    def __init__(self, pictures):
        self.pictures = pictures

    def __getitem__(self, indices):
        samples = self.pictures[indices]
        found = np.array([int(sample["cls"]) for sample in samples])
        for number, sample in zip(found.tolist(), samples, strict=True):
            assert sample["bin"] == bytes([number % 256]) * (number + 1)
            assert sample["__key__"] == f"some/{number:04}"
        return found


def epochs(kind, pictures, epochs=1):
    """Return the sample numbers that a loop gets."""
    return loop(kind, Numbers(pictures), pictures, WINDOW, BATCH, epochs)


def test_samples_are_those_that_tarfile_reads(tmp_path):
    """Every member of every sample, by any index, equals the standard library's."""
    pictures = store.Tar(written(SHARDS, tmp_path) + "/train", limit="1 MB")
    expected = {}
    for data in SHARDS.values():
        with tarfile.open(fileobj=io.BytesIO(data)) as file:
            for member in file:
                key, _, name = member.name.partition(".")
                expected.setdefault(key, {"__key__": key})[name] = file.extractfile(member).read()
    assert pictures.sizes.tolist() == SIZES
    assert pictures[:] == [*expected.values()]
    assert pictures[-1] == pictures[SAMPLES - 1] == [*expected.values()][-1]
    assert pictures[np.array([30, 3, 30])] == [[*expected.values()][k] for k in (30, 3, 30)]
    assert pictures[[]] == []


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_each_shard_is_fetched_once(kind, server, tmp_path):
    """The index comes from the cached shards; no epoch requests one again."""
    pictures = store.Tar("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    assert epochs(kind, pictures, 2) == stream(SIZES, WINDOW, BATCH, 2)
    assert whole(server) == len(SIZES)


def test_a_limit_below_the_data(server, tmp_path):
    """Shards without room during indexing are fetched when they are needed."""
    limit = 4 * max(map(len, SHARDS.values()))
    pictures = store.Tar("train/", store=s3(server), cache=tmp_path / "c", limit=limit, ahead=1)
    order = pictures.order(window=1)
    assert pictures.stats().nbytes <= limit
    with cseq.MTSequence(
        Numbers(pictures), SAMPLES, batch_size=4, order=order, out_type="null"
    ).start() as batches:
        assert sorted(np.concatenate([*batches]).tolist()) == [*range(SAMPLES)]
    assert pictures.stats().nbytes <= limit


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_kill_and_requests_that_fail_change_nothing(kind, server, tmp_path):
    """The fetching process is killed while every fourth request fails; the stream is unchanged."""
    pictures = store.Tar("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    for name in range(2, 5):
        (tmp_path / "cache" / "shards" / str(name)).unlink()
    kill_fetching(tmp_path / "cache")
    for fault in ("503", "cut", "half", "refuse"):
        server.fail(fault, chance=0.06)
    assert epochs(kind, pictures, 2) == stream(SIZES, WINDOW, BATCH, 2)


def test_a_shard_that_has_changed_is_named(server, tmp_path):
    """If a shard differs from the index, the loop gets an error."""
    pictures = store.Tar("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    (tmp_path / "cache" / "shards" / "3").unlink()
    kill_fetching(tmp_path / "cache")
    server.put("train/003.tar", SHARDS["train/003.tar"][::-1])
    with pytest.raises(ValueError, match=r"003\.tar.* has changed since its index was made"):
        epochs(FEW[-1], pictures)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: b"no archive" * 100, r"is not a tar file: "),
        (lambda data: data[:5000], r"is not a tar file: "),
        (lambda data: data[:2048] + b"?" * 512 + data[2560:], r"has no valid .* at byte 2048"),
    ],
)
def test_a_damaged_shard_is_named(damage, match, server, tmp_path):
    """An incomplete tar file raises an error during indexing; no sample is lost."""
    server.put("train/002.tar", damage(SHARDS["train/002.tar"]))
    with pytest.raises(ValueError, match=rf"shard train/002\.tar of .* {match}"):
        store.Tar("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")


def test_what_is_a_sample(tmp_path):
    """Consecutive members with one key are a sample; names without a key or a dot are not."""
    members = [
        ("a/1.JPG", b"1"),
        ("a/1.seg.png", b"2"),
        ("b/1.jpg", b"3"),
        ("README", b"4"),
        (".hidden", b"5"),
        ("c.d/x.txt", b""),
        ("a/" + "long" * 60 + ".txt", b"6"),
    ]
    written({"0.tar": tar_of(members)}, tmp_path)
    assert store.Tar(tmp_path, limit="1 MB")[:] == [
        {"__key__": "a/1", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "b/1", "jpg": b"3"},
        {"__key__": "c.d/x", "txt": b""},
        {"__key__": "a/" + "long" * 60, "txt": b"6"},
    ]
