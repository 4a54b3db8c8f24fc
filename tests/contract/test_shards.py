"""Shards of a store: one process per machine fetches each shard once; samples have indices."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
import sharded
from checkout import import_path
from kinds import FIRST_PROCESS, PARALLEL, QUICK, THREAD, by_name
from s3_server import S3Server
from sharded import fetching, flat, kill_fetching, npy, npy_shards, s3, whole, written
from waiting import together, until

import cseq
from cseq import store

pytest.importorskip("obstore")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.needs("Linux")

SIZES = [7, 12, 9, 9, 11, 8, 8, 10]
SHARDS, TARS = npy_shards(SIZES), sharded.tar_shards(SIZES)
SAMPLES = sum(SIZES)


@pytest.fixture
def server():
    """Return a store with the shards."""
    with S3Server(SHARDS) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the shards."""
    return written(SHARDS, tmp_path / "data") + "/train"


def numbers(batches):
    """Return the samples of batches, in order, and check that each is whole."""
    rows = np.concatenate(list(batches))
    assert rows.dtype == np.int32
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


@pytest.mark.parametrize("way", ["folder", "path", "file", "pattern", "list", "http"])
def test_a_place_is_a_folder_a_pattern_or_a_list(way, folder, server, tmp_path):
    """Local paths, file:// and http(s):// are read like stores."""
    url = f"{server.endpoint}/any/train/"
    urls = {
        "folder": f"{folder}/", "path": folder, "file": f"file://{folder}",
        "pattern": f"{folder}/00*.npy",
        "list": [f"{folder}/{number:03}.npy" for number in range(len(SIZES))],
        "http": [f"{url}{number:03}.npy" for number in range(len(SIZES))],
    }  # fmt: skip
    arrays = store.Npy(urls[way], cache=tmp_path / "cache", limit="1 MB")
    assert arrays[:][:, 0].tolist() == [*range(SAMPLES)]


def test_an_index_is_a_number_a_slice_or_an_array(folder):
    """A number gives a row, any other index a batch in its own memory; negative ones count back."""
    arrays = store.Npy(folder, limit="1 MB")
    assert len(arrays) == SAMPLES
    assert arrays[8].tolist() == [8] * 150
    assert arrays[np.int64(-1)].tolist() == [SAMPLES - 1] * 150
    assert arrays[[60, -2, 0, 60]][:, 0].tolist() == [60, SAMPLES - 2, 0, 60]
    assert arrays[5:9].shape == (4, 150)
    assert arrays[[]].shape == (0, 150)
    batch = arrays[[1, 2]]
    batch += 1
    assert arrays[1].tolist() == [1] * 150
    for wrong, error in ((SAMPLES, IndexError), ([0, SAMPLES], IndexError), ([1.5], TypeError)):
        with pytest.raises(error):
            arrays[wrong]
    assert repr(arrays).startswith(f"<Npy: {SAMPLES} samples in 8 shards of file:///")


@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_shards_come_before_a_batch_needs_them(kind, tmp_path):
    """During the loop's first batches, the next windows are fetched, but not all of the data."""
    with S3Server(npy_shards([20] * 40)) as many:
        arrays = store.Npy("train/", store=s3(many), cache=tmp_path / "cache", limit="1 MB")
        order = arrays.order(window=2)
        with kind.start(arrays, None, batch_size=4, buffer=2, order=order) as batches:
            first = next(iter(batches))
            until(lambda: whole(many) >= 2 + 2 + 4)
            # A worker may be a window ahead.
            assert whole(many) <= 2 + 2 + 2 + 4
            assert first[:, 0].tolist() == order.batches(4, seed=42, stop=1)[0]


def test_a_resume_fetches_no_skipped_shard(tmp_path):
    """A run that begins in the middle requests what it needs and what is ahead, no more."""
    with S3Server(npy_shards([20] * 40)) as many:
        arrays = store.Npy("train/", store=s3(many), cache=tmp_path / "cache", limit="1 MB")
        order = arrays.order(window=2)
        manager = THREAD.make(arrays, None, batch_size=10, buffer=2, order=order)
        manager.load_state_dict(manager.state_dict() | {"consumed": 600})
        with manager.start() as batches:
            rest = numbers(batches)
        assert rest == flat(order, 10, seed=42, start=60)
        first = {number // 20 for number in flat(order, 10, seed=42, stop=58)}
        skipped = first - {number // 20 for number in rest}
        ahead = {number // 20 for number in flat(order, 10, seed=42, epoch=1, stop=16)}
        assert len(skipped - ahead) > 15
        assert not any(whole(many, f"train/{number:03}.npy") for number in skipped - ahead)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_data_loader_reads_shards_ahead(method, server, tmp_path):
    """`cseq.DataLoader` takes the reader as data set, and its order as sampler."""
    torch = pytest.importorskip("torch")
    arrays = store.Npy("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    loader = cseq.DataLoader(
        arrays, 5, sampler=arrays.order(window=2), num_workers=2, worker_method=method
    )
    for _ in range(2):
        got = torch.cat([*loader])[:, 0].tolist()
        assert sorted(got) == [*range(SAMPLES)]
        assert got != sorted(got)
    assert whole(server) == len(SIZES)


RUN = """
import sys
from cseq import store

if __name__ == "__main__":
    arrays = store.Npy(sys.argv[1], cache=None if sys.argv[2] == "-" else sys.argv[2], limit="1 MB")
    print(int(arrays[:][:, 0].sum()), arrays.stats().fetched)
    print(str(arrays).rpartition(" kept in ")[2][:-1])
"""


def test_a_folder_is_kept_for_the_next_run(run_anew, folder, tmp_path):
    """The next run fetches nothing, and reads no header."""
    total = SAMPLES * (SAMPLES - 1) // 2
    first, second = (run_anew(RUN, folder, str(tmp_path / "cache")) for _ in range(2))
    assert first.stdout.split()[:2] == [str(total), "8"], first.stderr
    assert second.stdout.split()[:2] == [str(total), "0"], second.stderr


def test_shared_memory_is_gone_with_the_last_process(run_anew, folder):
    """Without a folder, nothing is left at the end."""
    done = run_anew(RUN, folder, "-")
    assert done.returncode == 0, done.stderr
    place = done.stdout.split()[2]
    assert os.path.basename(place).startswith("cseq-store-")
    until(lambda: not os.path.exists(place))


def test_a_folder_of_other_shards_is_refused(folder, tmp_path):
    """A cache folder with another place's shards raises an error that names both."""
    cache = tmp_path / "cache"
    kept = store.Npy(folder, cache=cache, limit="1 MB")
    with pytest.raises(ValueError, match=r"cache='.*' was created with urls=.*different folder"):
        store.Npy(f"{folder}/00[1-3].npy", cache=cache, limit="1 MB")
    assert len(kept) == SAMPLES


def test_a_shard_that_somebody_removed_is_fetched_again(server, tmp_path):
    """Files may vanish from the cache, for example to a cleaner of temporary files."""
    arrays = store.Npy("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    assert arrays[[0, SAMPLES - 1]][:, 0].tolist() == [0, SAMPLES - 1]
    for number in (0, len(SIZES) - 1):
        (tmp_path / "cache" / "shards" / str(number)).unlink()
    again = store.Npy("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    assert again[:][:, 0].tolist() == [*range(SAMPLES)]
    assert whole(server) == len(SIZES) + 2


@pytest.mark.parametrize("ahead", [1, 4])
def test_from_the_second_epoch_on_hits_are_limit_by_data(ahead, tmp_path):
    """With room for half of the shards, each later epoch fetches half of them.

    The cache never exceeds its limit.
    """
    shards = npy_shards([20] * 40)
    limit = 20 * max(map(len, shards.values()))
    with S3Server(shards) as many:
        arrays = store.Npy("train/", store=s3(many), cache=tmp_path, limit=limit, ahead=ahead)
        order = arrays.order(window=2)
        counts, sizes = [], []
        with FIRST_PROCESS.start(arrays, None, batch_size=10, buffer=4, order=order) as batches:
            for epoch in range(5):
                got = []
                for batch in batches:
                    got.append(batch)
                    sizes.append(arrays.stats().nbytes)
                assert numbers(got) == flat(order, 10, seed=42, epoch=epoch)
                counts.append(whole(many))
        sizes.append(taken(tmp_path / "shards"))
        assert 0 < max(sizes) <= limit
        # At the end of an epoch, shards of two windows and the read-ahead may already be the next
        # one's.
        assert 40 < counts[-1] - counts[0] <= 4 * (40 - 0.98 * 20) + 2 * 2 + ahead


RANK = """
import json, sys
from obstore.store import S3Store
import cseq
from cseq import store

if __name__ == "__main__":
    rank, options, cache, limit = json.loads(sys.argv[1])
    arrays = store.Npy("train/", store=S3Store("any", **options), cache=cache, limit=limit)
    manager = cseq.MPSequence(
        arrays, batch_size=25, num_workers=2, buffer=2, order=arrays.order(window=4), seed=1,
        shard=(rank, 2), out_type="null",
    )
    with manager.start() as batches:
        for _ in range(2):
            for batch in batches:
                print(*batch[:, 0], flush=True)
                sys.stdin.readline()
"""


def a_rank(path, *args):
    """Start a process that prints each batch of two epochs, and then waits for a line."""
    path.write_text(RANK)
    command = [sys.executable, "-W", "error", path, json.dumps(args)]
    environment = os.environ | {"PYTHONPATH": import_path()}
    pipes = dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def listed(folder):
    """Return the sizes of a folder's files, by name."""
    sizes = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes[entry.name] = entry.stat().st_size
    return sizes


def taken(folder):
    """Return the bytes of the files that were in a folder between two listings."""
    before, after = listed(folder), listed(folder)
    return sum(min(size, after.get(name, 0)) for name, size in before.items())


@pytest.mark.parametrize(("room", "late"), [(12, 0), (24, 24), (12, 24)])
def test_ranks_in_two_processes_share_shards(room, late, tmp_path):
    """Together, two ranks have each sample once per epoch, and the shards never exceed the limit.

    Ranks in step fetch each shard once per epoch. A late rank fetches none if all shards fit.
    """
    shards, got, most = npy_shards([100] * 24), ([], []), 0
    limit, cache = room * max(map(len, shards.values())), tmp_path / "cache"
    with S3Server(shards) as many, contextlib.ExitStack() as stack:
        ranks = []
        for step in range(96 + late):
            while len(ranks) < 1 + (step >= late):
                rank = a_rank(tmp_path / "rank.py", len(ranks), many.options, str(cache), limit)
                ranks.append(stack.enter_context(rank))
            going = [pair for pair in zip(ranks, got, strict=False) if len(pair[1]) < 96]
            for rank, batches in going:
                batches.append([*map(int, rank.stdout.readline().split())])
            for rank, _ in going:
                rank.stdin.write("\n")
                rank.stdin.flush()
            most = max(most, taken(cache / "shards"))
            # In the middle of an epoch, no shard is fetched for the next epoch yet.
            if step % 48 == 24 and not late:
                assert max(whole(many, key) for key in shards) <= 1 + step // 48
        counts = [whole(many, key) for key in shards]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for epoch in (slice(48), slice(48, 96)):
        both = np.concatenate(got[0][epoch] + got[1][epoch])
        assert sorted(both.tolist()) == [*range(2400)]
    assert limit / 2 < most <= limit
    if room == len(shards):
        assert counts == [1] * room


def test_a_shard_stays_until_a_worker_has_opened_it(tmp_path):
    """With room for one shard, workers that read different shards fetch each once per epoch."""
    shards = npy_shards([8] * 24)
    with S3Server(shards) as many:
        limit = max(map(len, shards.values()))
        arrays = store.Npy("train/", store=s3(many), cache=tmp_path, limit=limit)
        with FIRST_PROCESS.start(arrays, None, 3, batch_size=8, shuffle=False) as batches:
            for _ in range(3):
                assert numbers(batches) == [*range(192)]
        assert [whole(many, key) for key in shards] == [3] * 24


def test_what_a_process_leaves_unopened_makes_room(server, tmp_path, monkeypatch):
    """A process that ends before it opens the shard that it waited for holds up nobody."""
    monkeypatch.chdir(tmp_path)
    limit = max(map(len, SHARDS.values()))
    arrays = store.Npy("train/", store=s3(server), cache="cache", limit=limit)

    def connected():
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(60)
        line.connect("cache/socket")
        line.sendall(b'["stats"]\n')
        return line, line.makefile("rb")

    (ending, answers), (waiting, others) = connected(), connected()
    with ending, answers, waiting, others:
        ending.sendall(b'["need", [0]]\n')
        assert [json.loads(answers.readline()) for _ in range(2)][1] == [[0]]
        others.readline()
        waiting.sendall(b'["need", [1]]\n')
        # After two answers, what was sent before has been read.
        assert [arrays.stats().kept for _ in range(2)] == [1, 1]
        assert whole(server) == 1
        answers.close()
        ending.close()
        assert json.loads(others.readline()) == [[1]]


def test_what_a_window_needs_must_fit(folder, tmp_path):
    """A limit that is too small is an error at once, with the required bytes."""
    largest = max(map(len, SHARDS.values()))
    with pytest.raises(ValueError, match=rf"limit={largest - 1} is too small: the largest"):
        store.Npy(folder, cache=tmp_path / "cache", limit=largest - 1)
    arrays = store.Npy(folder, cache=tmp_path / "cache", limit=2 * largest)
    with pytest.raises(ValueError, match=r"two windows and the ahead=4 shards .* take up to \d+ b"):
        arrays.order(window=4)
    with pytest.raises(ValueError, match=r"the 8 shards of this batch take \d+ bytes"):
        arrays[:]


@pytest.mark.parametrize(
    ("urls", "options", "error", "match"),
    [
        (7, {}, TypeError, r"urls=7 is not a URL or path; pass one, or a list of them"),
        ([], {}, TypeError, r"urls=\[\] is not a URL"),
        ("…", {"ahead": 0}, ValueError, r"ahead=0 is below 1"),
        ("…", {"limit": "many"}, ValueError, r"limit='many' is not a size"),
        ("…", {"timeout": -1}, ValueError, r"timeout=-1 is not a positive, finite number"),
        ("/none/of/it/", {}, OSError, r"/none/of/it"),
        ("…/*.tar", {}, ValueError, r"matches none of the 8 objects there"),
    ],
)
def test_bad_arguments_are_named(urls, options, error, match, folder, tmp_path):
    """An error names the argument, its value and the remedy."""
    place = urls.replace("…", folder) if isinstance(urls, str) else urls
    with pytest.raises(error, match=match):
        store.Npy(place, **{"cache": tmp_path / "cache", "limit": "1 MB"} | options)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"no array", r"x.npy is not a valid .npy file"),
        (npy(0, 4, 5), r"has rows of shape \(5,\) and dtype int32"),
        (npy(0, 4)[:-1], r"it has 2527 of 2528 bytes"),
        (sharded.saved(np.array(3.0)), r"x.npy .* the array is a single number"),
    ],
)
def test_a_shard_of_another_kind_is_named(data, match, folder, tmp_path):
    """A file that is no shard of rows like the others' is an error at once."""
    written({"x.npy": data}, folder)
    with pytest.raises(ValueError, match=match):
        store.Npy(folder, cache=tmp_path / "cache", limit="1 MB")


def test_what_is_not_installed_is_named(monkeypatch, folder):
    """Without obstore, the error says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    with pytest.raises(ImportError, match=r"needs obstore: pip install 'cseq-loader\[store\]'"):
        store.Npy(folder, limit="1 MB")


@pytest.mark.parametrize("kind", PARALLEL, ids=by_name)
def test_a_killed_fetching_process_is_replaced(kind, server, tmp_path):
    """Another process continues the order, with the cached shards, and the loop goes on."""
    cache = tmp_path / "cache"
    with S3Server(npy_shards([20] * 30)) as many:
        arrays = store.Npy("train/", store=s3(many), cache=cache, limit="1 MB")
        order = arrays.order(window=2)
        got = []
        with kind.start(arrays, None, batch_size=10, buffer=2, order=order) as batches:
            for number, batch in enumerate(batches):
                got.append(batch)
                if number in (3, 30):
                    kill_fetching(cache)
        assert numbers(got) == flat(order, 10, seed=42)
        # Some requests were in flight, and some are ahead of the end.
        assert 30 <= whole(many) <= 30 + 2 * 4 + 4


class Dying(store.Npy):
    """Kills the fetching process at one step of two shards, once each."""

    settings = ("step",)

    def __init__(self, urls, step, **options):
        self.step = step
        super().__init__(urls, **options)

    def spans(self, objects, number):
        """Return where a shard's bytes are; from now on, renaming a shard kills the process."""
        self.die(number, "asked")
        real = os.replace

        def replace(source, target):
            number = int(os.path.basename(target)) if target.startswith(f"{self.folder}/s") else -1
            self.die(number, "written")
            real(source, target)
            self.die(number, "renamed")

        os.replace = replace
        return super().spans(objects, number)

    def finish(self, number, path):
        """Die when half of a shard is written."""
        self.die(number, "half", path)

    def die(self, number, step, path=None):
        """Kill this process if it reaches the step for the first time."""
        mark = f"{self.folder}/{step}-{number}"
        if number in (2, 5) and step == self.step and not os.path.exists(mark):
            os.close(os.open(mark, os.O_CREAT))
            if path is not None:
                os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", ["asked", "half", "written", "renamed"])
def test_a_kill_at_any_step_of_a_shard_leaves_it_whole_or_absent(step, server, tmp_path):
    """The fetching process is killed between any two writes; the stream is unchanged."""
    cache = tmp_path / "cache"
    arrays = Dying("train/", step, store=s3(server), cache=cache, limit="1 MB")
    order = arrays.order(window=2)
    with FIRST_PROCESS.start(arrays, None, batch_size=5, order=order) as batches:
        for epoch in range(2):
            assert numbers(batches) == flat(order, 5, seed=42, epoch=epoch)
    assert {path.name for path in cache.glob(f"{step}-*")} == {f"{step}-2", f"{step}-5"}
    assert {path.name for path in (cache / "shards").iterdir()} == {*map(str, range(len(SIZES)))}
    for path, data in zip(sorted((cache / "shards").iterdir()), SHARDS.values(), strict=True):
        assert path.read_bytes() == data


def test_the_fetching_process_ends_with_the_last_reader(folder, tmp_path):
    """It does not outlive its folder's readers; a new reader starts another one."""
    cache = tmp_path / "cache"
    for _ in range(2):
        arrays = store.Npy(folder, cache=cache, limit="1 MB")
        other = pickle.loads(pickle.dumps(arrays))
        assert fetching(cache) is not None
        del arrays
        assert other[3].tolist() == [3] * 150
        del other
        until(lambda: fetching(cache) is None)


def test_connections_that_come_at_its_end_break_nothing(folder, tmp_path, monkeypatch, capfd):
    """Processes that connect while the fetching process ends get none of its errors or output."""
    monkeypatch.chdir(tmp_path)
    over = threading.Event()

    def knock():
        while not over.is_set():
            with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
                line.connect("cache/socket")
                line.sendall(b'["stats"]\n')
                line.recv(100)

    def read():
        try:
            for _ in range(8):
                arrays = store.Npy(folder, cache="cache", limit="1 MB")
                assert arrays[3][0] == 3
                del arrays
        finally:
            over.set()

    together(read, *[knock] * 12)
    assert capfd.readouterr() == ("", "")


def test_many_idle_connections_survive_the_fetching_process(server, tmp_path):
    """Threads have left more connections than the starts that a process may retry in a row."""
    arrays = store.Npy("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    found = []

    def read(number):
        found.append(int(arrays[number][0]))
        arrays.stats()

    for epochs in (1, 2):
        server.slow(0.2)
        together(*(partial(read, 9 * k) for k in range(8)))
        assert sorted(found) == sorted([9 * k for k in range(8)] * epochs)
        kill_fetching(tmp_path / "cache")
        for path in (tmp_path / "cache" / "shards").iterdir():
            path.unlink()


def test_samples_are_those_that_tarfile_reads(tmp_path):
    """Every member of every sample, by any index, equals the standard library's."""
    pictures = store.Tar(written(TARS, tmp_path) + "/train", limit="1 MB")
    expected = {}
    for data in TARS.values():
        with tarfile.open(fileobj=io.BytesIO(data)) as file:
            for member in file:
                key, _, name = member.name.partition(".")
                expected.setdefault(key, {"__key__": key})[name] = file.extractfile(member).read()
    assert pictures.sizes.tolist() == SIZES
    assert pictures[:] == [*expected.values()]
    assert pictures[-1] == pictures[SAMPLES - 1] == [*expected.values()][-1]
    assert pictures[np.array([30, 3, 30])] == [[*expected.values()][k] for k in (30, 3, 30)]
    assert pictures[[]] == []


def test_a_limit_below_the_size_of_tar_files(tmp_path):
    """Shards without room during indexing are fetched when they are needed."""
    limit = 4 * max(map(len, TARS.values()))
    with S3Server(TARS) as server:
        pictures = store.Tar("train/", store=s3(server), cache=tmp_path, limit=limit, ahead=1)
        assert pictures.stats().nbytes <= limit
        assert sorted(sharded.loop(THREAD, pictures, 1, 4)) == [*range(SAMPLES)]
        assert pictures.stats().nbytes <= limit


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: b"no archive" * 100, r"is not a tar file: "),
        (lambda data: data[:5000], r"is not a tar file: "),
        (lambda data: data[:2048] + b"?" * 512 + data[2560:], r"has no valid .* at byte 2048"),
    ],
)
def test_a_damaged_tar_file_is_named(damage, match, tmp_path):
    """An incomplete tar file raises an error during indexing; no sample is lost."""
    key = "train/002.tar"
    with (
        S3Server({**TARS, key: damage(TARS[key])}) as server,
        pytest.raises(ValueError, match=rf"shard train/002\.tar of .* {match}"),
    ):
        store.Tar("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")


def test_what_is_a_sample_of_a_tar_file(tmp_path):
    """Consecutive members with one key are a sample; names without a key or a dot are not."""
    long = "a/" + "long" * 60
    members = [
        ("a/1.JPG", b"1"), ("a/1.seg.png", b"2"), ("b/1.jpg", b"3"), ("README", b"4"),
        (".hidden", b"5"), ("c.d/x.txt", b""), (f"{long}.txt", b"6"),
    ]  # fmt: skip
    written({"0.tar": sharded.tar_of(members)}, tmp_path)
    assert store.Tar(tmp_path, limit="1 MB")[:] == [
        {"__key__": "a/1", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "b/1", "jpg": b"3"},
        {"__key__": "c.d/x", "txt": b""},
        {"__key__": long, "txt": b"6"},
    ]


@pytest.mark.parametrize("again", ["a.jpg", "a.JPG"])
def test_a_sample_that_would_hide_another_is_an_error(again, tmp_path):
    """Two samples with one key, one after the other, are refused rather than made one."""
    written({"0.tar": sharded.tar_of([("a.jpg", b"1"), ("a.cls", b"2"), (again, b"3")])}, tmp_path)
    with pytest.raises(ValueError, match=r"0\.tar has two members a\.jpg; give each"):
        store.Tar(tmp_path, limit="1 MB")
