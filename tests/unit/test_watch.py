"""`python -m cseq watch` leaves torch's loaders as they are, and says what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from typing import TYPE_CHECKING

import pytest

from cseq.observe.processes import queued_seconds
from cseq.observe.watch import Watched, judge, tell

if TYPE_CHECKING:
    from pathlib import Path

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


def run(path: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a script, as it is or with a command of cseq."""
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, *before, str(path), "--lr", "0.1"],
        capture_output=True, text=True, check=False, env=environ,
    )  # fmt: skip


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize(
    "options", ["{}", "{'num_workers': 2}", "{'num_workers': 1, 'persistent_workers': True}"]
)
def test_the_script_does_what_it_did(tmp_path: Path, options: str) -> None:
    """Same batches, same output; each kind of loader has its lines on stderr."""
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace("{OPTIONS}", options))
    plain, watched = run(path), run(path, "-m", "cseq", "watch")
    assert watched.returncode == plain.returncode == 0, watched.stderr
    assert watched.stdout == plain.stdout
    assert not plain.stderr
    lines = watched.stderr.splitlines()
    assert all(line.startswith("cseq: ") for line in lines)
    (rows,) = [line for line in lines if "DataLoader of Rows, 64 samples, batch_size=2" in line]
    assert rows.endswith("65 batches in 3 epochs")  # of 32, 32 and 1
    assert any(line.endswith(": 5 batches") and "of Rows, 9 samples" in line for line in lines)
    assert any(line.endswith(": 5 batches") and "of Unsized, batch_size" in line for line in lines)
    (stream,) = [line for line in lines if "DataLoader of Stream" in line]
    assert stream.endswith("6 batches")
    assert sum("the loop waits" in line for line in lines) == 1


@pytest.mark.parametrize("wait", [0.0001, 0.01])
def test_cseq_is_named_where_it_can_help(wait: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that waits for nothing gets no advice."""
    tell({0: watched(wait, 0.02, 2)}, os.getpid())
    _, said = capsys.readouterr()
    assert ("python -m cseq run" in said) is (wait > 0.001)


def test_a_script_without_a_loader(tmp_path: Path) -> None:
    """That is said, too, and so is the script's own failure."""
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(3)")
    done = run(path, "-m", "cseq", "watch")
    assert done.returncode == 3
    assert "no DataLoader of torch" in done.stderr


def watched(
    wait: float, step: float, workers: int = 0, computed: float = 0.0, first: float = 0.01
) -> Watched:
    """Return a loader of 200 batches in two epochs."""
    times = (array("d", [seconds] * 198) for seconds in (wait, step))
    one = Watched("Images", 3200, 32, workers, persistent=False, computed=computed)
    one.firsts = array("d", [first] * 2)
    one.waits, one.steps = times
    return one


@pytest.mark.parametrize(
    ("loader", "children", "said"),
    [
        # it makes a batch in 10 ms and waits for a disk; 6 workers would hide that
        (watched(0.01, 0.002), 0.0, "6.0 times as fast. num_workers=6"),
        # the same, but it computes: 3 workers have a core each
        (
            watched(0.01, 0.002, computed=1.9),
            0.0,
            "num_workers=3: at most 3.6 times as fast; 6 would keep up, but there are 4 cores",
        ),
        # 2 workers, each of which takes 10 ms for a batch
        (watched(0.003, 0.002, 2), 0.1, "2.5 times as fast. num_workers=6"),
        (watched(0.003, 0.002, 2), 1.8, "2.5 times as fast. num_workers=3: at most 1.5 times"),
        (watched(0.003, 0.002, 3), 2.8, "3 workers compute on 4 cores"),
        (watched(0.0001, 0.02, 2), 0.0, "nothing is to be gained"),
    ],
)
def test_what_would_help(loader: Watched, children: float, said: str) -> None:
    """As many workers as keep up, as far as there are cores for those that compute."""
    assert said in "\n".join(judge(loader, 4, children))


def test_others_compute_here() -> None:
    """Who waits for a core half of the time computes; it does not wait for a disk."""
    loader = watched(0.01, 0.002, computed=0.8)
    assert "num_workers=6" in judge(loader, 4)[-1]
    assert "num_workers=3: at most" in judge(loader, 4, crowd=2.5)[-1]


@pytest.mark.needs("Linux")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_waiting_for_a_core(request: pytest.FixtureRequest) -> None:
    """Two processes on one core wait for each other; one that sleeps does not."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", script])
        for script in (spin, spin, "import time; time.sleep(600)")
    ]
    for each in processes:
        request.addfinalizer(each.wait)
        request.addfinalizer(each.kill)
    pids = [each.pid for each in processes]
    deadline = time.monotonic() + 60
    while min(queued_seconds([pid]) for pid in pids[:2]) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert queued_seconds(pids) >= 2
    assert queued_seconds([2**22 + 1]) == 0  # there is none


def test_epochs_that_begin_slowly() -> None:
    """Workers that are started for each epoch are named, if that takes a while."""
    assert "persistent_workers=True" in judge(watched(0.001, 0.02, 2, first=0.5), 4)[-1]
    assert "persistent_workers" not in judge(watched(0.001, 0.02, 2), 4)[-1]
