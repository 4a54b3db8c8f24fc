"""The data formats of the benchmark: cseq delivers each of them correctly.

Formats whose libraries are not installed are skipped; `make check-formats` has them all.
"""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkout import import_path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "formats"
PROGRAMS = ("measuring", "run", "torchvision_cpu")
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in PROGRAMS)

pytestmark = pytest.mark.needs("Linux")


def missing(script):
    """Return the missing libraries that a script imports at any place."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in names} - {"measuring"}
    return sorted(name for name in tops if find_spec(name) is None)


def run(script, *args):
    """Run a script on little data."""
    environment = {"PYTHONPATH": import_path(), "CSEQ_BENCHMARKS_TINY": "1"}
    return subprocess.run(
        [sys.executable, script, *map(str, args)],
        env=os.environ | environment | {"CUDA_VISIBLE_DEVICES": "", "CSEQ_FORMATS_SECONDS": "0.1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_every_sample_once_and_the_same_after_a_resume(script, tmp_path):
    """Each sample arrives once and unchanged, for any workers and after a resume."""
    if lacking := missing(script):
        pytest.skip(f"not installed: {', '.join(lacking)}")
    done = run(script, "check", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all right\n")


def test_the_runner_knows_every_format():
    """The runner's list has each script of the folder; an unknown name is refused."""
    done = run(FOLDER / "run.py", "no_such_format")
    assert done.returncode == 1
    listed = done.stderr.partition("there are ")[2].strip().split(", ")
    assert sorted(listed) == [path.stem for path in SCRIPTS]
