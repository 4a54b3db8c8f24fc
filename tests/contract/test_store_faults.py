"""Loops over shards of a failing store: the stream is unchanged, or the error is clear."""

from __future__ import annotations

import functools
import io
import re
import sys
from datetime import timedelta

import numpy as np
import pytest
from kinds import FEW, INLINE, by_name
from s3_server import S3Server
from sharded import s3

import cseq

pytest.importorskip("obstore")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")

SHARDS, ROWS, WIDTH, BATCH = 8, 40, 500, 16
RETRIES = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=10),
        "max_backoff": timedelta(milliseconds=50),
        "base": 2,
    },
}
KEY = "train/{:02}.npy"


def shard(number, add=0):
    """Make the .npy file of a shard whose rows all differ."""
    first = sum(size(each) for each in range(number))
    draw = np.random.default_rng(0).integers(0, 256, (1, WIDTH))
    table = (draw + np.arange(first, first + size(number))[:, None] * 7 + add) % 256
    file = io.BytesIO()
    np.save(file, table.astype(np.uint8))
    return file.getvalue()


def size(number):
    """Return the number of samples of a shard; no two shards are the same size."""
    return ROWS + number


SIZES = [size(number) for number in range(SHARDS)]
TOTAL = sum(SIZES)


@functools.cache
def table():
    """Return all samples, in the order of the shards."""
    return np.concatenate([np.load(io.BytesIO(shard(number))) for number in range(SHARDS)])


def truth(epochs=1, window=2):
    """Return the stream of the same samples from memory."""
    order = cseq.Blocks(SIZES, window)
    with INLINE.start(table(), TOTAL, batch_size=BATCH, order=order) as batches:
        return [batch.copy() for _ in range(epochs) for batch in batches]


@pytest.fixture
def server():
    """Return a server with the shards."""
    objects = {KEY.format(number): shard(number) for number in range(SHARDS)}
    with S3Server(objects) as running:
        yield running


def read(server, cache, **options):
    """Make the reader; its store retries requests twice, after a short pause."""
    from cseq import store

    made = s3(server, retry_config=RETRIES)
    return store.Npy("train/", cache=cache, store=made, **{"timeout": 20, **options})


def epoch(kind, rows, epochs=1, **options):
    """Return the batches that a loop gets in an epoch."""
    order = rows.order(window=2)
    with kind.start(rows, len(rows), batch_size=BATCH, order=order, **options) as batches:
        return [batch.copy() for _ in range(epochs) for batch in batches]


def is_right(stream, expected):
    """Return whether two streams have the same batches."""
    return len(stream) == len(expected) and all(map(np.array_equal, stream, expected))


# Passing faults: how often a shard fails before it comes.
PASSING = {
    "503": {"kind": "503", "times": 2},
    "503 with Retry-After": {"kind": "503", "times": 1, "retry_after": 1},
    "500": {"kind": "500", "times": 2},
    "refused": {"kind": "refuse", "times": 2},
    "cut": {"kind": "cut", "times": 2},
    "cut at once": {"kind": "cut", "times": 2, "at": 0.0},
    "half": {"kind": "half", "times": 2},
    "stall": {"kind": "stall", "times": 1},
    "hang": {"kind": "hang", "times": 1},
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_changes_nothing(server, tmp_path, fault):
    """Each shard fails once or twice; the loop gets a healthy store's stream, without an error."""
    patience = 0.5 if fault in ("stall", "hang") else 20
    rows = read(server, tmp_path, timeout=patience)
    server.forget()
    server.fail(**PASSING[fault])
    kind = FEW[list(PASSING).index(fault) % len(FEW)]
    assert is_right(epoch(kind, rows), truth())
    times = PASSING[fault]["times"]
    for number in range(SHARDS):
        seen = [one.fault for one in server.log(KEY.format(number), "GET")]
        assert [fault for fault in seen if fault] == [PASSING[fault]["kind"]] * times
    assert rows.stats().fetched == SHARDS


def test_without_a_timeout_slow_answers_are_awaited(server, tmp_path):
    """`timeout=None` means no limit."""
    server.slow(0.3)
    assert is_right(epoch(FEW[0], read(server, tmp_path, timeout=None)), truth())


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_chance(server, tmp_path, kind):
    """Over two epochs, one request in five fails in any of these ways; the stream is unchanged."""
    rows = read(server, tmp_path)
    for fault in ("503", "cut", "half", "refuse"):
        server.fail(fault, chance=0.05)
    assert is_right(epoch(kind, rows, epochs=2), truth(epochs=2))
    assert any(one.fault for one in server.log())


# Lasting faults, and the words of their errors.
LASTING = {
    "503": ({"kind": "503"}, OSError, "503"),
    "403": ({"kind": "403"}, OSError, "403"),
    "cut": ({"kind": "cut", "at": 0.0}, OSError, "0 of {nbytes} bytes arrived"),
    "half": ({"kind": "half", "at": 0.0}, OSError, "0 of {nbytes} bytes arrived"),
    "short": ({"kind": "short"}, ValueError, "it now has {half} bytes instead of {nbytes}"),
    "stall": ({"kind": "stall", "at": 0.0}, OSError, "none for 0.2 s"),
    "etag": ({"kind": "etag"}, ValueError, "has changed since its index was made"),
    "404": ({"kind": "404"}, ValueError, "it no longer exists"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_what_lasts_is_a_clear_error(server, tmp_path, fault):
    """A shard never comes: the loop raises, with its name and the reason; then the loop goes on."""
    options, kind, said = LASTING[fault]
    rows = read(server, tmp_path, timeout=0.2 if fault == "stall" else 20)
    server.fail(key=KEY.format(3), **options)
    pool = FEW[list(LASTING).index(fault) % len(FEW)]
    said = said.format(nbytes=len(shard(3)), half=len(shard(3)) // 2)
    with pool.start(rows, len(rows), batch_size=BATCH, order=rows.order(window=2)) as batches:
        with pytest.raises(kind, match=re.escape(said)) as caught:
            for _ in batches:
                pass
        assert KEY.format(3) in str(caught.value)
        server.heal()
        for batch, expected in zip(batches, truth(epochs=2)[-len(batches) :], strict=True):
            assert np.array_equal(batch, expected)


def test_changed_shards(server, tmp_path):
    """If a shard was replaced, the error names the remedy: a new folder, with the new shard."""
    rows = read(server, tmp_path / "old")
    other = shard(5, add=100)
    server.put(KEY.format(5), other)
    with pytest.raises(ValueError, match=r"05\.npy.* has changed .*different cache="):
        epoch(FEW[-1], rows)
    new = read(server, tmp_path / "new")
    found = np.concatenate(epoch(INLINE, new))
    assert not np.array_equal(found, np.concatenate(truth()))
    expected = table().copy()
    first = sum(SIZES[:5])
    expected[first : first + size(5)] = np.load(io.BytesIO(other))
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))


def test_next_run_with_a_changed_shard(server, tmp_path, run_anew):
    """A kept folder is compared with the store when it is next opened."""
    script = (
        "from obstore.store import S3Store\nfrom cseq import store\n"
        f"there = S3Store('any', **{server.options!r})\n"
        f"rows = store.Npy('train/', cache={str(tmp_path / 'cache')!r}, store=there)\n"
        "print(rows[:].sum())\n"
    )
    done = run_anew(script)
    assert (done.returncode, done.stdout) == (0, f"{table().sum()}\n"), done.stderr
    server.put(KEY.format(5), shard(5, add=1))
    done = run_anew(script)
    assert done.returncode == 1
    assert re.search(r"ValueError: shard .*05\.npy.* has changed .*different cache=", done.stderr)
