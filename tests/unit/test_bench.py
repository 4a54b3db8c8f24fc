"""`cseq bench` measures a loader with and without cseq, and says which one to use."""

import io
import re
import sys

import pytest

from cseq.__main__ import main
from cseq.observe.bench import Figures, said, seconds_of

TORCH = """
import torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index

def rows():
    return DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2)
"""
PLAIN = """
import numpy as np
import cseq
class Broken:
    def __getitem__(self, indices):
        raise OSError("no disk")

def rows(num_workers=2):
    return cseq.MTSequence(np.arange(640), batch_size=8, num_workers=num_workers, out_type="null")

def alone():
    return rows(0)

def left_to_it():
    return rows("auto")

def breaks():
    return cseq.MTSequence(Broken, 640, batch_size=8, num_workers=2, out_type="null")

def number():
    return 3

def fails():
    raise OSError("no disk")
"""


@pytest.fixture
def run(run_command, tmp_path):
    """Return a function that runs the command on a file."""

    def run(source, target, *options):
        (tmp_path / "data.py").write_text(source)
        return run_command(tmp_path, "bench", target, *options)

    return run


@pytest.mark.needs("quick processes")
def test_a_loader_of_torch(run):
    """It is measured over several epochs."""
    pytest.importorskip("torch")
    done = run(TORCH, "data.py:rows", "--step", "1ms", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    first, _, *rows = done.stdout.splitlines()
    made = "rows() returned a torch DataLoader of Rows: 160 samples, batches of 8"
    assert first == f"{made}, num_workers=2"
    cells = [re.split("  +", row.strip()) for row in rows[:3]]
    names = ["torch DataLoader, 2", "no workers, in process", "cseq.DataLoader, 2"]
    assert [row[0] for row in cells] == names
    assert all(row[-1].endswith("%") for row in cells)
    assert rows[3].startswith(" → if data were free, a loop of 1 ms would be ")
    assert rows[4].startswith(" → cseq.DataLoader: ")
    assert "the loop waits" in rows[4]


@pytest.mark.needs("quick processes")
@pytest.mark.parametrize(
    # Each row is a process, which may import torch.
    "name", ["rows", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("alone", "left_to_it"))]
)  # fmt: skip
def test_a_manager(run, name):
    """It is measured as given, and in test mode."""
    done = run(PLAIN, f"data.py:{name}", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    first, _, *rows, last = done.stdout.splitlines()
    assert first.startswith(f"{name}() returned MTSequence(samples=640")
    assert rows[0].startswith(" no workers, in process  ")
    assert rows[1].startswith(" the manager's workers  ")
    assert len(rows) == 2
    assert "--step 30ms" in last


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("data.py", "'data.py' is not of the form FILE.py:make"),
        ("none.py:rows", "there is no file none.py"),
        ("data.py:row", "has no function 'row'; it has Broken, rows, alone, left_to_it, breaks"),
        ("data.py:number", "make() returned an object of type int; return"),
        ("data.py:fails", "OSError: no disk"),
    ],
)
def test_what_cannot_be_measured(run, target, told):
    """A message says what is wrong, and the status is not 0."""
    done = run(PLAIN, target)
    assert done.returncode == 1
    assert told in done.stderr
    assert "cseq/observe" not in done.stderr
    assert not done.stdout


def test_a_file_that_parses_arguments(run):
    """It sees only its own name, as if run without arguments."""
    source = "import argparse\nargparse.ArgumentParser().parse_args()\n" + PLAIN
    done = run(source + "import sys\nprint(sys.argv)\n", "data.py:rows", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['data.py']\nrows() returned")


def test_an_error_in_the_file_has_its_own_frames_alone(run):
    """It lacks the frames of the import that runs the file."""
    done = run("\nimport json\njson.loads('?')\n", "data.py:rows")
    assert done.returncode == 1
    first, second, *_ = (line for line in done.stderr.splitlines() if line.startswith("  File"))
    assert "data.py" in first
    assert "json" in second
    assert "importlib" not in done.stderr


def test_rows_that_fail(tmp_path, monkeypatch):
    """Each row says why; without arrows in the encoding, there is a question mark."""
    (tmp_path / "data.py").write_text(PLAIN)
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="cp1252"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", f"{tmp_path / 'data.py'}:breaks"])
    sys.stdout.flush()
    printed = file.getvalue()
    assert printed.count(b"OSError: no disk") >= 2
    assert printed.rstrip().endswith(b" ? nothing could be measured: see above")


def test_what_is_said():
    """The text has the gain of free data for the given loader, and the advice of cseq's workers."""
    torch = Figures(50, waits=0.5)
    measured = {"torch": torch, "cseq": Figures(80, waits=0.1, advice="workers: …")}
    assert said(measured, "torch", 0.01) == [
        "if data were free, a loop of 10 ms would be 2.0 times as fast",
        "cseq.DataLoader: workers: …",
    ]
    assert said({"torch": torch._replace(waits=None)}, "torch", 0.01) == []
    (hint,) = said(measured, "torch", 0.0)
    assert hint.startswith("pass, for example, --step 30ms")
    failed = {"torch": Figures(error="it fails")}
    assert said(failed, "torch", 0.0) == ["nothing could be measured: see above"]


def test_durations():
    """Seconds are plain numbers."""
    found = [seconds_of(each) for each in ("30ms", "0.5s", "800us", "2")]
    assert found == pytest.approx([0.03, 0.5, 8e-4, 2])
    for text in ("", "s", "-1", "0", "nan", "1e9", "30 m"):
        with pytest.raises(ValueError, match="not a valid duration"):
            seconds_of(text)
