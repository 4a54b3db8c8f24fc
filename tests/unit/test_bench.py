"""`cseq bench` measures a loader as it is and with cseq, and says which one to take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cseq.observe import bench
from cseq.observe.bench import Figures, Made, advise, digest, seconds_of

if TYPE_CHECKING:
    from pathlib import Path

TORCH = """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index

class Noisy(Rows):
    def __getitem__(self, index):
        return torch.rand(8), index

def rows():
    return DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2)

def noisy():
    return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
"""
PLAIN = """
import os, time
from pathlib import Path
import numpy as np
import cseq

class Slow:
    def __getitem__(self, indices):
        with open(Path(__file__).with_name("pids"), "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)

def rows():
    return cseq.MTSequence(np.arange(640), batch_size=8, num_workers=2, out_type="null")

def alone():
    return cseq.MTSequence(np.arange(640), batch_size=8, num_workers=0, out_type="null")

def left_to_it():
    return cseq.MTSequence(np.arange(640), batch_size=8, num_workers="auto", out_type="null")

def hangs():
    return cseq.MPSequence(Slow, 640, batch_size=8, num_workers=2, out_type="null")

def number():
    return 3

def fails():
    raise OSError("no disk")

def empty():
    return [1, 2, 3][:0]
"""


def run(folder: Path, source: str, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command on a file."""
    (folder / "data.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "cseq", "bench", target, *options],
        capture_output=True, text=True, check=False, cwd=folder, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize(("name", "same"), [("rows", True), ("noisy", False)])
def test_a_loader_of_torch(tmp_path: Path, name: str, same: bool) -> None:
    """All four loaders, over several epochs; threads draw other random numbers than processes."""
    pytest.importorskip("torch")
    options = "--step", "1ms", "--seconds", "0.1", "--json", "told.json"
    done = run(tmp_path, TORCH, f"data.py:{name}", *options)
    assert done.returncode == 0, done.stderr
    kind = "Rows" if same else "Noisy"
    first = f"{name}() returned a torch DataLoader, {kind}: 160 samples, batches of 8"
    assert done.stdout.startswith(f"{first}, num_workers=2\n")
    told = json.loads((tmp_path / "told.json").read_text())
    rows = told["rows"]
    assert [*rows] == [
        "torch DataLoader, 2", "no loader, in process", "cseq.DataLoader, 2", "cseq threads, 2"
    ]  # fmt: skip
    for each in rows.values():
        assert not each["error"]
        assert each["rate"] > 0
        assert each["first"] > 0
        assert 0 <= each["waits"] <= 1
        assert len(each["prints"]) > 1
        assert (each["memory"] > 0) == sys.platform.startswith("linux")
    assert [each["same"] for each in rows.values()] == [None, same, True, same]
    assert told["advice"]
    assert all(f" → {line}" in done.stdout for line in told["advice"])


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize("name", ["rows", "alone", "left_to_it"])
def test_a_manager(tmp_path: Path, name: str) -> None:
    """It is tried with processes and with threads, which make what test mode makes."""
    told = tmp_path / "told.json"
    done = run(tmp_path, PLAIN, f"data.py:{name}", "--seconds", "0.1", "--json", str(told))
    assert done.returncode == 0, done.stderr
    rows = json.loads(told.read_text())["rows"]
    count = [*rows][-1].rpartition(" ")[2]
    assert count == "2" or name != "rows"
    names = {"no loader, in process", f"cseq processes, {count}", f"cseq threads, {count}"}
    assert {*rows} == names
    assert [each["same"] for each in rows.values()] == [None, True, True]
    assert "--step 30ms" in done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("data.py", "'data.py' is not FILE.py:make"),
        ("none.py:rows", "there is no file none.py"),
        ("data.py:row", "has no function 'row'; it has Slow, rows, alone, left_to_it, hangs"),
        ("data.py:number", "make() returned an object of int; let it return"),
        ("data.py:fails", "OSError: no disk"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, target: str, said: str) -> None:
    """A message says what is wrong, and the status is not 0."""
    done = run(tmp_path, PLAIN, target)
    assert done.returncode == 2
    assert said in done.stderr
    assert "cseq/observe" not in done.stderr  # no frames of ours
    assert not done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--step", "3 days"], "'3 days' is no duration"), (["--json", "a/b"], "a/b")],
)
def test_bad_options(tmp_path: Path, options: list[str], said: str) -> None:
    """They are refused before anything is measured."""
    done = run(tmp_path, PLAIN, "data.py:rows", *options)
    assert done.returncode == 1
    assert said in done.stderr
    assert not done.stdout


@pytest.mark.needs("quick processes")
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes")
def test_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loader that hangs is given up, with its workers; the others are measured all the same."""
    monkeypatch.setattr(bench, "DEADLINE", 4.0)
    path = tmp_path / "data.py"
    path.write_text(PLAIN)
    assert bench.bench(f"{path}:hangs") == 0
    said, _ = capfd.readouterr()
    assert said.count("not done after 4 s") == 3
    assert "nothing could be measured" in said
    pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    assert len(pids) >= 2
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def figures(rate: float, waits: float | None = None, same: bool = True) -> Figures:
    """Return what was measured of a loader that computes all the time."""
    return Figures(rate, cpu=1 / rate, waits=waits, same=same)


LOADER = Made("", bench.LOADER, "torch", 2)


@pytest.mark.parametrize(
    ("measured", "step", "free", "said"),
    [
        # torch waits, cseq does not
        ({"torch": figures(50, 0.5), "cseq": figures(110, 0.02)}, 0.01, 2.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 2% of the time, not "
          "50%: 2.0 times as fast")),
        # both keep up
        ({"torch": figures(105, 0.04), "cseq": figures(110, 0.0)}, 0.01, 1.0,
         "leave it as it is: a loop of 10 ms waits 4% of the time"),
        # no worker is needed
        ({"none": figures(1000, 0.01), "torch": figures(900, 0.2), "cseq": figures(900, 0.0)}, 0.01,
         1.2, "num_workers=0: a loop of 10 ms waits 1% of the time, not 20%: 1.2 times as fast"),
        # little is left to be gained: no other number
        ({"torch": figures(50, 0.5), "cseq": figures(80, 0.07)}, 0.01, 2.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 7% of the time, not "
          "50%: 1.9 times as fast")),
        # threads, but their batches are others
        ({"torch": figures(50, 0.5), "cseq": figures(80, 0.2), "threads": figures(99, 0, False)},
         0.01, 2.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 20% of the time, not "
           "50%: 1.6 times as fast; num_workers=3 may do better")),
        # more than there are cores for
        ({"torch": figures(40, 0.9), "cseq": figures(80, 0.8)}, 0.01, 10.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 80% of the time, not "
          "90%: 2.0 times as fast; more workers need more than 2 cores: "
          "a batch costs 12 ms of CPU")),
        # the same batches, but they wait for a disk
        ({"torch": figures(10, 0.9), "cseq": Figures(20, 0.001, waits=0.8, same=True)}, 0.01, 10.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 80% of the time, not "
          "90%: 2.0 times as fast; num_workers=8 may do better")),
        # they wait for a core, since others compute here
        ({"torch": figures(10, 0.9), "cseq": Figures(20, 0.001, 0.06, 0.8, same=True)}, 0.01, 10.0,
         ("from cseq import DataLoader, num_workers=2: a loop of 10 ms waits 80% of the time, not "
          "90%: 2.0 times as fast; more workers need more than 2 cores: "
          "a batch costs 1 ms of CPU")),
        # without a step, by the rate
        ({"torch": figures(50), "cseq": figures(54)}, 0.0, 0.0,
         "leave it as it is: no other one has 1.1 times its rate"),
    ],
)  # fmt: skip
def test_the_advice(measured: dict[str, Figures], step: float, free: float, said: str) -> None:
    """What free data would gain; the first loader that is about as good as the best."""
    told = advise(LOADER, measured, step, 2 if len(measured) < 3 else 4)
    assert said in told
    other = f"would be {free:.1f} times as fast" if free else "with --step 30ms"
    assert [other in line for line in told if line != said] == [True]


def test_nothing_was_measured() -> None:
    """The errors are in the table."""
    failed = {"torch": Figures(error="it fails")}
    assert advise(LOADER, failed, 0.0, 4) == ["nothing could be measured: see above"]


def test_the_advice_for_a_manager() -> None:
    """It says which kind of workers."""
    made = Made("", bench.MANAGER, "cseq", 2)
    said = advise(made, {"cseq": figures(50, 0.5), "threads": figures(200, 0.0)}, 0.01, 4)
    assert said[1].startswith("thread_type='thread', num_workers=2: ")


def test_digests() -> None:
    """They tell structure, types and bits, and nothing else."""
    array = np.arange(6, dtype=np.float32)
    batches = [
        array, array.astype(np.float64), array.reshape(2, 3), [array], (array,), {"x": array},
        {"y": array}, [array, array], array[::-1], "text", b"text", None, 1, 1.0, True, [],
    ]  # fmt: skip
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest(array[::2]) == digest(array[::2].copy())
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0)
    assert digest(tensor.view(2, 3).T) == digest(tensor.view(2, 3).T.contiguous())
    assert digest(tensor) != digest(tensor.bfloat16())
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))


def test_durations() -> None:
    """Seconds are plain numbers."""
    found = [seconds_of(each) for each in ("30ms", "0.5s", "800us", "2")]
    assert found == pytest.approx([0.03, 0.5, 8e-4, 2])
    for text in ("", "s", "-1", "0", "nan", "1e9", "30 m"):
        with pytest.raises(ValueError, match="no duration"):
            seconds_of(text)
