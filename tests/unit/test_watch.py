"""`cseq run --watch` leaves torch's loaders unchanged, and reports what they cost."""

import os
import sys

import pytest

from cseq.observe.watch import Watched, tell

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
class Rows(TensorDataset):
    pass
class Unsized(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size
    def __getitem__(self, index):
        return index
    def __len__(self):
        raise NotImplementedError
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))
if __name__ == "__main__":
    torch.manual_seed(1)
    rows, options = Rows(torch.arange(64)), {OPTIONS}
    loader = DataLoader(rows, batch_size=2, shuffle=True, **options)
    for epoch in range(2):
        print([batch[0].tolist() for batch in loader])
    print(next(iter(loader)))
    for data in Rows(torch.arange(9)), Unsized(9):  # other data, in a loader of the same kind
        print(list(DataLoader(data, sampler=range(9), batch_size=2, **options)))
    print(list(DataLoader(Stream(), batch_size=None)))
    print(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Make this process no rank of a group, even if the tests run in one."""
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize(
    "options", ["{}", "{'num_workers': 2}", "{'num_workers': 1, 'persistent_workers': True}"]
)
def test_the_script_does_what_it_did(run_prepared, run_command, tmp_path, options):
    """Batches and output are the same; stderr has lines for each kind of loader."""
    pytest.importorskip("torch")
    plain = run_prepared(TRAIN.replace("{OPTIONS}", options), "--lr", "0.1")
    watched = run_command(tmp_path, "run", "--watch", "script.py", "--lr", "0.1")
    assert watched.returncode == plain.returncode == 0, watched.stderr
    assert watched.stdout == plain.stdout
    assert not plain.stderr
    lines = watched.stderr.splitlines()
    assert all(line.startswith("cseq: ") for line in lines)
    (rows,) = [line for line in lines if "DataLoader of Rows, 64 samples, batch_size=2" in line]
    # The epochs have 32, 32 and 1.
    assert rows.endswith("65 batches in 3 epochs")
    assert any(line.endswith(": 5 batches") and "of Rows, 9 samples" in line for line in lines)
    assert any(line.endswith(": 5 batches") and "of Unsized, batch_size" in line for line in lines)
    (stream,) = [line for line in lines if "DataLoader of Stream" in line]
    assert stream.endswith("6 batches")
    assert sum("the loop waits" in line for line in lines) >= 1


@pytest.mark.parametrize("wait", [0.0001, 0.01])
def test_cseq_is_named_where_it_can_help(wait, capsys):
    """A script that waits for nothing gets no advice."""
    tell({0: watched(wait, 0.02, 2)}, os.getpid())
    _, said = capsys.readouterr()
    assert ("cseq run …" in said) is (wait > 0.001)


def test_a_script_without_a_loader(run_command, tmp_path):
    """The output says so, too, and has the script's own failure."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    done = run_command(tmp_path, "run", "--watch", "train.py")
    assert done.returncode == 3
    assert "no torch DataLoader" in done.stderr


def watched(wait, step, workers=0, computed=0.0, first=0.01, queued=0.0):
    """Return a loader of 200 batches in two epochs."""
    one = Watched("DataLoader of Images", workers, computed=computed, epochs=2, batches=198)
    one.queued, one.started, one.waited, one.stepped = queued, 2 * first, 198 * wait, 198 * step
    return one


CPU = pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of worker processes")


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        # It makes a batch in 10 ms and waits for a disk; 6 workers would hide that.
        (watched(0.01, 0.002), "num_workers=6: at most 6.0 times as fast"),
        # The same loader computes: 3 workers have a core each.
        (watched(0.01, 0.002, computed=1.9), "num_workers=3: at most 3.6 times as fast"),
        # Each of 2 workers takes 10 ms for a batch.
        pytest.param(watched(0.003, 0.002, 2), "num_workers=6: at most 2.5 times", marks=CPU),
        pytest.param(watched(0.003, 0.002, 2, 1.8), "num_workers=3: at most 1.5", marks=CPU),
        pytest.param(watched(0.003, 0.002, 4, 3.8), "4 cores are used up", marks=CPU),
        # They would compute all the time, but have a core only a third of the time.
        pytest.param(watched(0.003, 0.002, 2, 0.6, queued=1.2),
                     "waiting for a core 61%: other programs", marks=CPU),
        (watched(0.0001, 0.02, 2), "the loop is the bottleneck"),
    ],
)  # fmt: skip
def test_what_would_help(loader, said):
    """The advice is as many workers as keep up, limited by the cores for those that compute."""
    lines = "\n".join(loader.lines(4))
    assert said in lines
    assert ("if data were free: " in lines) is ("the loop is" not in said)


COUNTS = """
import os
import time
from cseq.observe import watch
from torch.utils.data import DataLoader, Dataset
class Naps(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return index
class Burns(Naps):  # on one core
    def __getitem__(self, index):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return index
if __name__ == "__main__":
    loaders = {}
    watch.watch(loaders)
    options = {"num_workers": 2, "persistent_workers": PERSISTENT}
    kept = [DataLoader(kind(), **options) for kind in (Naps, Burns)]
    for _ in range(2):
        for batches in zip(*kept):
            pass
    for each in loaders.values():
        for turn in list(each.turns):
            turn.end_epoch()
        print(each.name.split()[2].strip(","), each.computed, each.queued)
"""


@CPU
@pytest.mark.parametrize("persistent", [False, True])
def test_each_loader_has_its_own_workers(run_prepared, persistent):
    """Their CPU time, and their wait for a core, are separate, even while they stay alive."""
    pytest.importorskip("torch")
    done = run_prepared(COUNTS.replace("PERSISTENT", str(persistent)))
    assert not done.returncode, done.stderr
    found = {name: list(map(float, two)) for name, *two in map(str.split, done.stdout.splitlines())}
    (computed, queued), naps = found["Burns"], found["Naps"]
    # All take 0.8 s, some of it before the first batch.
    assert computed > 0.5
    assert naps[0] < computed / 2
    assert queued > 0.1 or not os.path.exists("/proc/self/schedstat")


def test_epochs_that_begin_slowly():
    """Workers that start for each epoch are named if that takes long."""
    assert "persistent_workers=True" in watched(0.001, 0.02, 2, first=0.5).lines(4)[-1]
    assert "persistent_workers" not in watched(0.001, 0.02, 2).lines(4)[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--watch", "--rng", "batch", "train.py"],
         "combined with --rng, --threads, --report or --trace"),
        (["rnu"], "bench"),
    ],
)  # fmt: skip
def test_what_is_not_understood(run_command, tmp_path, words, said):
    """The answer says what to write."""
    done = run_command(tmp_path, *words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
