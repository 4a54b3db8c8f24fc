"""The harness of run_torch.py: what it must refuse, with other tests in the place of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import stand_in
from torch_plugin import read

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

HERE = Path(__file__).resolve().parent

# A module of loaders: one without workers, one that gives batches in reverse, and torch's.
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

TESTS = """
import subprocess, sys
from torch.utils.data import DataLoader

def test_order():
    assert [int(batch) for batch in DataLoader(range(4), num_workers=1)] == [0, 1, 2, 3]

def asked(script):
    return subprocess.check_output([sys.executable, "-c", script], text=True).strip()

def test_child():
    assert asked("from torch.utils.data import DataLoader as D; print(D.__module__)") == "loaders"

def test_loaders_first():
    "The module of the class is what an interpreter imports first."
    script = "import loaders; from torch.utils.data import DataLoader as D; print(D.__module__)"
    assert asked(script) == "loaders"

def test_old():
    assert False

def test_with_gpu():
    import pytest
    pytest.skip("no GPU")
"""

TABLE = """
must passed test_it.py::test_order
must passed test_it.py::test_child
own  passed test_it.py::test_loaders_first
skew failed test_it.py::test_old  # an assertion of an older version
cuda passed|skipped test_it.py::test_with_gpu  # needs a GPU
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run the tests with a class; return the exit status and what is printed."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(name: str, *options: str, table: str = TABLE) -> tuple[int, str]:
        (tmp_path / "table.txt").write_text(table)
        variables = {
            stand_in.STAND_IN: f"torch=loaders:{name}",
            stand_in.ENTERED: str(tmp_path / "entered.txt"),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "site", HERE, tmp_path))),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            ".",
            "-p",
            "torch_plugin",
        ]
        command += [
            "-p",
            "no:cacheprovider",
            "--table",
            "table.txt",
            "--outcomes",
            "outcomes.txt",
            *options,
        ]
        done = subprocess.run(
            [*command, "test_it.py"],
            cwd=tmp_path,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_outcomes_as_expected(run, tmp_path):
    status, output = run("Inline")
    assert status == 0, output
    assert "in place: loaders:Inline" in output
    assert "entered 0 times" in output
    lines = [line.split() for line in (tmp_path / "outcomes.txt").read_text().splitlines()]
    assert [(tag, outcome) for tag, outcome, *_ in lines] == [
        ("must", "passed"),
        ("must", "passed"),
        ("own", "passed"),
        ("skew", "failed"),
        ("cuda", "skipped"),
    ]


def test_wrong_order_is_refused(run):
    status, output = run("Reversed", "-k", "test_order")
    assert status == 1
    assert "WRONG test_it.py::test_order: failed, not passed" in output


def test_torchs_engine_is_refused(run):
    status, output = run("Engine", "-k", "test_order")
    assert status == 1
    assert (
        "WRONG test_it.py::test_order: entered _MultiProcessingDataLoaderIter.__init__, 1 times"
        in output
    )
    assert "WRONG test_it.py::test_order: entered _worker_loop, 1 times" in output


def test_table_and_tests_must_agree(run):
    moved = TABLE.replace("test_order", "test_gone").replace("skew failed", "skew passed")
    status, output = run("Inline", "--tags", "must,skew", table=moved)
    assert status == 1
    assert "WRONG test_it.py::test_gone: not found" in output
    assert "WRONG test_it.py::test_order: passed, and not in the table" in output
    assert "WRONG test_it.py::test_old: failed, not passed" in output
    assert "test_with_gpu" not in output


def test_table_of_run_torch_can_be_read():
    table = read(HERE / "torch_tests.txt")
    assert {row.tag for row in table.values()} == {"own", "must", "skew", "internal", "cuda"}
    for name, row in table.items():
        assert row.right == ("passed",) or row.reason, name
