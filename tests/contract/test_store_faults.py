"""Loops over shards of a failing store: the stream is unchanged, or the error is clear."""

from __future__ import annotations

import re
import sys
from datetime import timedelta

import pytest
import sharded
from kinds import FEW, FIRST_PROCESS, KINDS, by_name
from s3_server import S3Server
from sharded import SEED, Numbers, kill_fetching, loop, npy, npy_shards, s3, stream, whole

from cseq import store

pytest.importorskip("obstore")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")

WINDOW, BATCH, WIDTH = 2, 16, 125
# No two shards have the same size.
SIZES = [40 + number for number in range(8)]
TOTAL = sum(SIZES)
SHARDS = npy_shards(SIZES, WIDTH)
BRIEF, LONGEST = timedelta(milliseconds=10), timedelta(milliseconds=50)
BACKOFF = {"init_backoff": BRIEF, "max_backoff": LONGEST, "base": 2}
RETRIES = {"retry_timeout": timedelta(seconds=20), "backoff": BACKOFF}
KEY = "train/{:03}.npy"


@pytest.fixture
def server():
    """Return a server with the shards."""
    with S3Server(SHARDS) as running:
        yield running


def read(server, cache, kind=store.Npy, max_retries=2, **options):
    """Make the reader; its store retries requests after a short pause."""
    made = s3(server, retry_config=RETRIES | {"max_retries": max_retries})
    return kind("train/", cache=cache, store=made, **{"timeout": 20, **options})


# Passing faults: how often a shard fails before it comes.
PASSING = {
    "503": {"kind": "503", "times": 2}, "500": {"kind": "500", "times": 2},
    "503 with Retry-After": {"kind": "503", "times": 1, "retry_after": 1},
    "refused": {"kind": "refuse", "times": 2}, "cut": {"kind": "cut", "times": 2},
    "cut at once": {"kind": "cut", "times": 2, "at": 0.0}, "half": {"kind": "half", "times": 2},
    "stall": {"kind": "stall", "times": 1}, "hang": {"kind": "hang", "times": 1},
}  # fmt: skip


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_changes_nothing(server, tmp_path, fault):
    """Each shard fails once or twice; the loop gets a healthy store's stream, without an error."""
    patience = 0.5 if fault in ("stall", "hang") else 20
    rows = read(server, tmp_path, timeout=patience)
    server.forget()
    server.fail(**PASSING[fault])
    kind = FEW[list(PASSING).index(fault) % len(FEW)]
    assert loop(kind, rows, WINDOW, BATCH) == stream(SIZES, WINDOW, BATCH)
    times = PASSING[fault]["times"]
    for key in SHARDS:
        seen = [one.fault for one in server.log(key, "GET")]
        assert [fault for fault in seen if fault] == [PASSING[fault]["kind"]] * times
    assert rows.stats().fetched == len(SIZES)


def test_without_a_timeout_slow_answers_are_awaited(server, tmp_path):
    """`timeout=None` means no limit."""
    server.slow(0.3)
    rows = read(server, tmp_path, timeout=None)
    assert loop(FEW[0], rows, WINDOW, BATCH) == stream(SIZES, WINDOW, BATCH)


# The reader, its files, and the sizes of the parts that it fetches.
FORMATS = {
    "npy": (store.Npy, SHARDS, SIZES),
    "tar": (store.Tar, sharded.tar_shards([7, 12, 9, 11, 8]), [7, 12, 9, 11, 8]),
    "parquet": (store.Parquet, sharded.parquet_shards([25, 40, 7]), [10, 10, 5, 10, 10, 10, 10, 7]),
}
every_format = pytest.mark.parametrize(
    ("reader", "files", "sizes"), FORMATS.values(), ids=list(FORMATS)
)


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("kind", KINDS, ids=by_name)
@every_format
def test_each_part_is_fetched_once(reader, files, sizes, kind, tmp_path):
    """The first epoch or the index requests each part once, and the next epoch none."""
    with S3Server(files) as server:
        rows = read(server, tmp_path, reader, limit="1 MB")
        is_indexed = whole(server) == len(sizes)
        assert is_indexed == (reader is store.Tar)
        assert rows.sizes.tolist() == sizes
        server.forget()
        assert loop(kind, rows, WINDOW, BATCH, 2) == stream(sizes, WINDOW, BATCH, 2)
        parts = {(one.key, one.span) for one in server.log()}
        assert len(parts) == server.count() == (0 if is_indexed else len(sizes))
        assert rows.stats().fetched == len(sizes)


def empty(cache):
    """Remove the parts that were fetched."""
    for path in (cache / "shards").iterdir():
        path.unlink()


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("kind", FEW, ids=by_name)
@every_format
def test_a_kill_and_requests_that_fail_change_nothing(reader, files, sizes, kind, tmp_path):
    """The fetching process is killed while every fourth request fails; the stream is unchanged."""
    with S3Server(files) as server:
        rows = read(server, tmp_path, reader, max_retries=9, limit="1 MB")
        rows[0]
        kill_fetching(tmp_path)
        empty(tmp_path)
        for fault in ("503", "cut", "half", "refuse"):
            server.fail(fault, chance=0.06)
        assert loop(kind, rows, WINDOW, BATCH, 2) == stream(sizes, WINDOW, BATCH, 2)
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
    nbytes = len(SHARDS[KEY.format(3)])
    said = re.escape(said.format(nbytes=nbytes, half=nbytes // 2))
    options = {"batch_size": BATCH, "order": rows.order(window=WINDOW), "seed": SEED}
    with pool.start(Numbers(rows), TOTAL, **options) as batches:
        with pytest.raises(kind, match=said) as caught:
            for _ in batches:
                pass
        assert KEY.format(3) in str(caught.value)
        server.heal()
        rest = [number for batch in batches for number in batch.tolist()]
    assert rest == stream(SIZES, WINDOW, BATCH, 2)[TOTAL:]


@pytest.mark.needs("Linux")
@every_format
def test_changed_shards(reader, files, sizes, tmp_path):
    """If a shard was replaced, the error names it and the remedy."""
    key = [*files][1]
    with S3Server(files) as server:
        rows = read(server, tmp_path, reader, limit="1 MB")
        empty(tmp_path)
        server.put(key, files[key][::-1])
        said = rf"{key}.* has changed since its index was made.*different cache="
        with pytest.raises(ValueError, match=said):
            loop(FIRST_PROCESS, rows, WINDOW, BATCH)


SUM = """
import sys
from obstore.store import S3Store
from cseq import store
rows = store.Npy("train/", cache=sys.argv[1], store=S3Store("any", **eval(sys.argv[2])))
print(rows[:][:, 0].sum())
"""


def test_next_run_with_a_changed_shard(server, run_anew):
    """A kept folder is compared with the store when it is next opened; a new one has the shard."""
    given = repr(server.options)
    done = run_anew(SUM, "old", given)
    assert (done.returncode, done.stdout) == (0, f"{sum(range(TOTAL))}\n"), done.stderr
    server.put(KEY.format(0), npy(1000, SIZES[0], WIDTH))
    done = run_anew(SUM, "old", given)
    assert done.returncode == 1
    assert re.search(r"ValueError: shard .*000\.npy.* has changed .*different cache=", done.stderr)
    done = run_anew(SUM, "new", given)
    assert int(done.stdout) == sum(range(TOTAL)) + 1000 * SIZES[0], done.stderr
