"""The harness of run_torch.py: what it must refuse, with a test that stands for torch's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

HERE = Path(__file__).resolve().parent

# A module of loaders: one without workers, one with reversed batches, and torch's.
LOADERS = """
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

class Inline(DataLoader):
    def _get_iterator(self):
        workers, self.num_workers = self.num_workers, 0
        try:
            return _SingleProcessDataLoaderIter(self)
        finally:
            self.num_workers = workers

class Reversed(Inline):
    def __iter__(self):
        return reversed(list(super().__iter__()))

class Engine(DataLoader):
    pass
"""
TEST = """
from torch.utils.data import DataLoader

def test_order():
    assert [int(batch) for batch in DataLoader(range(4), num_workers=1)] == [0, 1, 2, 3]
"""
ROW = "must passed test_it.py::test_order\n"


@pytest.mark.parametrize(
    ("loader", "table", "wrong"),
    [
        ("Inline", ROW, ""),
        ("Reversed", ROW, "test_order: failed, not passed"),
        ("Engine", ROW, "test_order: entered _worker_loop, 1 times"),
        ("Inline", ROW.replace("order", "gone"), "test_gone: not found"),
        ("Inline", "", "test_order: passed, and not in the table"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, loader, table, wrong):
    """Another order, torch's own engine, or another table is an error; else the status is 0."""
    for name, text in ("loaders.py", LOADERS), ("test_it.py", TEST), ("table.txt", table):
        (tmp_path / name).write_text(text)
    variables = {
        stand_in.STAND_IN: f"torch=loaders:{loader}",
        stand_in.ENTERED: str(tmp_path / "entered.txt"),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "site", HERE, tmp_path))),
    }
    options = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    options += ["-p", "torch_plugin", "--table", "table.txt"]
    command = [sys.executable, "-m", "pytest", *options, "test_it.py"]
    place = {"cwd": tmp_path, "env": os.environ | variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **place)
    assert done.returncode == bool(wrong), done.stdout
    assert f"in place: loaders:{loader}" in done.stdout
    assert (f"WRONG test_it.py::{wrong}" in done.stdout) is bool(wrong)
