"""`cached`: samples made once per machine, for all workers, ranks and threads."""

import errno
import logging
import os
import pickle
import signal
import sys

import numpy as np
import pytest
from forking import in_child
from kinds import PARALLEL, by_name

import cseq

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")


# The pickles of data sets have it, so that tests in two processes of pytest share no cache.
PROCESS = os.getpid()


class Decoded:
    """Samples of several parts that hold their number; `log` gets a line for each one made."""

    def __init__(self, number=20, log=None, shape=(3, 50)):
        self.number, self.log, self.shape = number, log, shape
        self.process = PROCESS

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        image = np.random.default_rng(index).integers(0, 256, self.shape, np.uint8)
        return {"image": image, "label": index, "name": f"sample {index}", "none": np.empty((0, 2))}


class Noisy(Decoded):
    def __getitem__(self, index):
        return {"image": np.random.default_rng().integers(0, 256, self.shape, np.uint8)}


class Indexer:
    def __init__(self, samples):
        self.samples = samples

    def __getitem__(self, indices):
        return np.stack([each["image"] for each in self.samples[indices]])


def is_right(sample, index, shape=(3, 50)):
    """Return whether a sample is what `Decoded` makes."""
    expected = Decoded(shape=shape)[index]
    return all(np.array_equal(sample[name], value) for name, value in expected.items())


def lines(log):
    """Return the samples that were made, each as often as it was."""
    return sorted(map(int, log.read_text().split())) if log.exists() else []


@pytest.mark.parametrize("kind", PARALLEL, ids=by_name)
def test_each_sample_is_made_once_for_all_workers_and_epochs(kind, tmp_path):
    """Two epochs of a shuffled indexer make each sample once, apart from simultaneous ones."""
    log = tmp_path / "made"
    samples = cseq.cached(Decoded(40, str(log)), "2 MB")
    with kind.start(Indexer(samples), 40, batch_size=4) as batches:
        for _ in range(2):
            got = np.concatenate([batch.reshape(4, -1) for batch in batches])
            assert len(np.unique(got, axis=0)) == 40
    have = samples.stats()
    # Each process that finds a sample makes one for comparison.
    checks = 2 + kind.processes
    assert have.kept == have.made == 40
    assert sorted(set(lines(log))) == [*range(40)]
    assert len(lines(log)) <= 40 + have.others + checks
    # Batches made ahead count, too.
    assert have.hits >= 80 - 40 - have.others


def test_a_managers_figures_have_hits_and_misses(tmp_path):
    """`stats()` and the report have the counts of the process's caches."""
    samples = cseq.cached(Decoded(40), "2 MB")
    manager = cseq.MTSequence(Indexer(samples), 40, batch_size=4, out_type="null", seed=1)
    with manager.start() as batches:
        before = manager.stats()
        for _ in range(3):
            assert len(list(batches)) == 10
        found = manager.stats().since(before)
        manager.report(tmp_path / "report.html")
    assert found.cache_misses >= 40 - before.cache_misses
    assert found.cache_hits >= 40
    assert found.cache_nbytes >= samples.stats().nbytes
    assert "samples from caches of" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_sample_is_a_copy_of_your_own():
    """Writes to a sample change neither the cache nor another sample."""
    samples = cseq.cached(Decoded(), "2 MB")
    for _ in range(3):
        sample = samples[3]
        assert is_right(sample, 3)
        sample["image"] += 1
    assert is_right(samples[-17], 3)


def test_views_are_read_only_and_not_copies():
    """A list of indices returns read-only views that share the cache's memory.

    Indices are checked as a list's are.
    """
    samples = cseq.cached(Decoded(shape=1000), "2 MB")
    for index in (1, 2):
        samples[index]
    one, two, again = samples[np.array([1, 2, 1])]
    assert is_right(one, 1, 1000)
    assert is_right(two, 2, 1000)
    assert np.shares_memory(one["image"], again["image"])
    assert not one["image"].flags.writeable
    assert [each["label"] for each in samples[18:]] == [18, 19]
    for index, error in ((20, IndexError), (-21, IndexError), (1.0, TypeError)):
        with pytest.raises(error):
            samples[index]


def test_torch_tensors_come_back_as_tensors():
    """A tensor keeps its type, and a copy may be written to."""
    torch = pytest.importorskip("torch")
    tensors = [(torch.full((300,), k, dtype=torch.bfloat16), k) for k in range(4)]
    samples = cseq.cached(tensors, "1 MB")
    samples[3]
    for _ in range(2):
        tensor, label = samples[3]
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[3][0])
        assert label == 3
        tensor += 1


def test_an_exception_is_raised_each_time():
    """A sample that cannot be made raises, and can be made later."""
    fails = [True]

    class Failing(Decoded):
        def __getitem__(self, index):
            if fails[0]:
                raise OSError("no such image")
            return super().__getitem__(index)

    samples = cseq.cached(Failing(), "2 MB", version="1")
    for _ in range(2):
        with pytest.raises(OSError, match="no such image"):
            samples[1]
    fails[0] = False
    assert is_right(samples[1], 1)
    assert samples.stats()[1:] == (1, samples.stats().nbytes, 2_000_000, 0, 1, 0)


def test_a_full_cache_keeps_what_it_has(tmp_path):
    """Beyond the limit, samples are made each time; hits are limit / data, all samples right."""
    log, samples = tmp_path / "made", 100
    whole = 100 * 1024
    overhead = cseq.cached(Decoded(samples, None, 800), "9 MB").stats().nbytes
    cache = cseq.cached(Decoded(samples, str(log), 800), overhead + whole // 2)
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(samples)
        assert all(is_right(cache[k], k, 800) for k in order)
    have = cache.stats()
    assert have.nbytes <= have.limit
    assert have.kept >= 0.98 * samples / 2
    assert have.hits == 2 * have.kept
    assert len(lines(log)) == samples + 2 * (samples - have.kept) + 1


def test_a_sample_larger_than_the_limit_is_an_error():
    """A sample that never fits is an error, not an empty cache."""
    samples = cseq.cached(Decoded(4, None, 10**5), "90 kB")
    with pytest.raises(ValueError, match="sample 2 takes 100"):
        samples[2]


NO_ROOM = r"limit=\d+ is too small: the index of 900 samples alone"


@pytest.mark.parametrize(
    ("make", "limit", "error", "match"),
    [
        (7, "1 MB", TypeError, r"make=7 has no __getitem__; pass a data set"),
        (Decoded(900), 100, ValueError, NO_ROOM),
        (Decoded(900), "20 kB", ValueError, NO_ROOM),
        (Decoded(0), "1 MB", ValueError, r"len\(make\)=0 is below 1"),
        (Decoded(), "many", ValueError, r"limit='many' is not a size"),
        (Decoded(log=sys.stdout), "1 MB", TypeError, r"make\.log"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make, limit, error, match):
    """An error names the argument, its value and the remedy."""
    with pytest.raises(error, match=match):
        cseq.cached(make, limit)


def test_a_full_disk_keeps_no_sample(monkeypatch, caplog, tmp_path):
    """On a full disk, samples are made each time, and the log says so; cached ones stay."""
    samples = cseq.cached(Decoded(), "2 MB", folder=str(tmp_path / "cache"))
    assert is_right(samples[0], 0)
    write = os.pwrite

    def full(fd, data, offset):
        if len(data) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "cseq"):
        patch.setattr(os, "pwrite", full)
        assert all(is_right(samples[k], k) for k in range(3))
    assert "a sample could not be stored in" in caplog.text
    assert all(is_right(samples[k], k) for k in range(20))
    assert samples.stats().kept == 20


def killed_at(write, share):
    """Return a `pwrite` that ends its process at a given call, after writing part of the data."""
    calls = [0]
    real = os.pwrite

    def pwrite(fd, data, offset):
        calls[0] += 1
        if calls[0] == write:
            real(fd, bytes(data)[: int(share * len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, data, offset)

    return pwrite


def filled(folder, order):
    """Make and check samples."""
    samples = cseq.cached(Decoded(6, None, 1000), "1 MB", folder=folder)
    return all(is_right(samples[k], k, 1000) for k in order)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_kill_at_any_write_leaves_samples_whole(share, tmp_path):
    """In turn, a process is killed at each of its writes.

    Another one finds no half-written sample, and makes the missing ones. No two samples overlap.
    """
    for write in range(1, 100):
        folder = f"{tmp_path}/{write}"

        def die(write=write, folder=folder):
            os.pwrite = killed_at(write, share)
            return filled(folder, [4, 1, 3])

        ended = in_child(die)
        assert in_child(lambda folder=folder: filled(folder, [*range(6), 4, 1, 3]))  # type: ignore[misc]
        if ended:
            break
    assert 8 < write < 99
    assert cseq.cached(Decoded(6, None, 1000), "1 MB", folder=folder).stats().kept == 6


def test_random_kills_leave_samples_whole(tmp_path):
    """Pairs of processes that fill one cache are killed, each after some samples."""
    folder, choose = str(tmp_path / "cache"), np.random.default_rng(7)

    def fill(seed, told=None):
        samples = cseq.cached(Decoded(300, None, 5000), "4 MB", folder=folder)
        for k in np.random.default_rng(seed).permutation(300).tolist():
            if not is_right(samples[k], k, 5000):
                return False
            if told is not None:
                os.write(told, b"x")
        return True

    killed = 0
    for seed in range(0, 60, 2):
        told, tell = os.pipe()
        children = []
        for turn in range(2):
            children.append(os.fork())
            if not children[turn]:
                os._exit(not fill(seed + turn, tell))
        os.close(tell)
        for _ in range(int(choose.integers(1, 40))):
            os.read(told, 1)
        for child in children:
            os.kill(child, signal.SIGKILL)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        os.close(told)
        assert all(os.WIFSIGNALED(status) or status == 0 for status in statuses)
        killed += sum(map(os.WIFSIGNALED, statuses))
    assert killed > 40
    assert in_child(lambda: fill(1))
    samples = cseq.cached(Decoded(300, None, 5000), "4 MB", folder=folder)
    assert samples.stats().kept == 300
    assert samples.stats().hits > 100


def test_a_claim_of_a_killed_process_ends_with_it(tmp_path):
    """Another process makes and caches the sample that a killed process was making."""
    folder = str(tmp_path / "cache")

    class Dying(Decoded):
        def __getitem__(self, index):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    parent = os.getpid()
    samples = cseq.cached(Dying(), "2 MB", folder=folder, version="1")
    assert not in_child(lambda: is_right(samples[5], 5))
    assert is_right(samples[5], 5)
    assert samples.stats().made == 1


SCRIPT = """
import os, sys, time
import numpy as np
import cseq

class Decoded:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        print("made", index, flush=True)
        return np.full(1000, index)

if __name__ == "__main__":
    samples = cseq.cached(Decoded(), "1 MB", folder=sys.argv[1] if len(sys.argv) > 1 else None)
    total = sum(int(samples[k][0]) for k in range(8))
    print("total", total, samples.stats().kept)
    print(str(samples).partition(" in ")[2].partition(";")[0], file=sys.stderr)
"""


def test_a_folder_is_kept_for_the_next_run(run_anew, tmp_path):
    """The next run finds all samples; it makes one for comparison."""
    first, second = (run_anew(SCRIPT, str(tmp_path / "cache")) for _ in range(2))
    assert first.stdout.splitlines() == [*(f"made {k}" for k in range(8)), "total 28 8"]
    assert second.stdout.splitlines() == ["made 0", "total 28 8"]


def test_changed_code_does_not_read_old_samples(run_anew, tmp_path):
    """If the code that makes samples has changed, the folder is refused, with the remedy."""
    run_anew(SCRIPT, str(tmp_path / "cache"))
    changed = run_anew(SCRIPT.replace("index)\n\n", "index + 1)\n\n"), str(tmp_path / "cache"))
    assert changed.returncode == 1
    assert "pass a different folder, or delete this one. With version=" in changed.stderr


def test_shared_memory_is_gone_with_the_last_process(run_anew):
    """Without a folder, nothing is left at the end."""
    done = run_anew(SCRIPT)
    assert done.stdout.endswith("total 28 8\n")
    assert os.path.basename(done.stderr.strip()).startswith("cseq-cache-")
    assert not os.path.exists(done.stderr.strip())


def test_what_a_killed_process_left_is_removed_by_the_next(run_anew):
    """A killed process cannot remove its memory; the next cache of the same user does."""
    killed = run_anew(SCRIPT + "    sys.stderr.flush(); os.kill(os.getpid(), 9)\n")
    assert os.path.exists(killed.stderr.strip())
    cseq.cached(Decoded(5), "1 MB")
    assert not os.path.exists(killed.stderr.strip())


RANKS = """
    if "MADE" not in os.environ:
        import subprocess
        os.environ["MADE"] = "no"
        subprocess.run([sys.executable, __file__], check=True)
    else:
        have = samples.stats()
        print("found", have.hits, "others", have.others)
"""


def test_ranks_share_one_copy(run_anew):
    """Another process with the same cache finds the samples made here, and compares one."""
    said = run_anew(SCRIPT + RANKS).stdout.splitlines()
    assert said[8:] == ["total 28 8", "made 0", "total 28 8", "found 8 others 0"]


def test_a_copy_by_pickle_is_the_same_cache():
    """A pickled cache gives access to the same entries; its repr has their number and the hits."""
    samples = cseq.cached(Decoded(), "2 MB")
    assert is_right(samples[7], 7)
    again = pickle.loads(pickle.dumps(samples))
    assert is_right(again[7], 7)
    assert samples.stats().hits == again.stats().hits == 1
    assert repr(samples).startswith("<Cached: 1 of 20 samples, ")
    assert repr(samples).endswith("; 1 hits>")


def test_samples_that_differ_each_time_are_an_error():
    """Random numbers in `make` would be drawn once for all epochs; an error says so."""
    samples = cseq.cached(Noisy(), "2 MB")
    samples[1]
    with pytest.raises(ValueError, match=r"make\[1\] returned a sample that differs from the"):
        samples[1]


@pytest.mark.parametrize(
    ("limit", "version", "name"), [("3 MB", "1", "limit"), ("2 MB", "2", "version")]
)
def test_a_folder_of_something_else_is_refused(limit, version, name, tmp_path):
    """If a folder's cache has another limit or version, an error names both values."""
    folder = str(tmp_path / "cache")
    kept = cseq.cached(Decoded(), "2 MB", folder=folder, version="1")
    with pytest.raises(ValueError, match=rf"was created with {name}="):
        cseq.cached(Decoded(), limit, folder=folder, version=version)
    assert is_right(kept[0], 0)


def test_a_class_in_a_function_needs_a_version():
    """The pickle of such a class differs between processes, so each rank would have a cache."""

    class Local(Decoded):
        pass

    with pytest.raises(ValueError, match=r"define the class in a module, or pass version="):
        cseq.cached(Local(), "2 MB")
    assert len(cseq.cached(Local(), "2 MB", version="1")) == 20
