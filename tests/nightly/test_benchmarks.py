"""The benchmarks run if they need no other loader; their results are not judged.

The data formats are delivered correctly. One whose libraries are not installed is skipped;
`make check-formats` has them all.
"""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

import pytest
from checkout import import_path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
GROUPS = {path.stem for path in (FOLDER / "cases").glob("[!_]*.py")}
# These lack a contender that needs nothing.
GROUPS_OF_PEERS = {"adapters", "dataloader", "keys", "picture", "threads"}

pytestmark = pytest.mark.needs("Linux")


def run(*words, **variables):
    """Run a program of the folder to its end."""
    env = os.environ | {"PYTHONPATH": import_path()} | variables
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


# For cases that are one declaration with several numbers, one of each number is enough.
SELECTED = {
    "advice": ("causes",),
    "small": ("small_processes_touched", "small_threads", "large_buffer", "test_mode"),
    "large": ("large_uint8_touched", "large_float32_touched"),
    "brief": ("brief_0_cpu", "brief_40_cpu", "brief_10_sleeps"),
    "structure": ("dict_113_touched", "parts_null_1", "parts_null_2"),
    "computing": ("computing_uneven",),
    "peers": ("peers_workers_8_busy", "peers_tfdata", "peers_epochs_forkserver"),
    "epochs": ("epoch_boundary_slow", "first_batch", "resume"),
    "permutation": ("permutation_1e5", "permutation_1e8"),
}


@pytest.mark.parametrize("group", sorted(GROUPS - GROUPS_OF_PEERS))
def test_contenders_that_need_no_peer_give_numbers(group, tmp_path):
    """Every contender that needs no peer runs a tiny round and reports numbers, in both forms."""
    if group == "cached":
        pytest.importorskip("PIL", reason="its pictures are JPEG files")
    cases = SELECTED.get(group, (group,))
    options = ("--tiny", "--no-peers", "--rounds", "1", "--output", tmp_path)
    done = run(FOLDER / "run.py", *options, *cases)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "partial.json").read_text(encoding="utf-8"))
    assert report["cases"]
    assert group not in SELECTED or len(report["cases"]) == len(cases)
    for case in report["cases"]:
        assert f"## {case['name']}" in done.stdout
        for one in case["contenders"]:
            assert not one["error"]
            assert all(isfinite(one[key]) for key in ("median", "min", "max"))
            assert one["cpu_seconds"] >= 0
            assert case["rounds"] or (one["peak_mb"] > 0 and one["descriptors"] > 0)
    assert (tmp_path / "partial.md").read_text(encoding="utf-8").startswith("# Results")


GPU_PROGRAM = f"""
import runpy, sys
sys.argv[0] = {str(FOLDER / "gpu" / "run.py")!r}
sys.path[0] = {str(FOLDER / "gpu")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rehearsal_of_the_gpu_says_that_it_is_one(run_prepared, tmp_path):
    """With the CPU as the device, a GPU's case gives numbers, and says where they come from."""
    pytest.importorskip("torch", reason="the device is torch's")
    done = run_prepared(
        GPU_PROGRAM,
        *("--device", "cpu", "--tiny", "--rounds", "1", "--no-tests"),
        *("--output", str(tmp_path), "--commit", "of-a-test", "gpu_small"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu-rehearsal-partial.json").read_text(encoding="utf-8"))
    assert report["device"]["stands_in"]
    assert report["machine"]["commit"] == "of-a-test"
    (case,) = report["cases"]
    assert len(case["contenders"]) == 6
    assert all(isfinite(one["median"]) for one in case["contenders"])
    text = (tmp_path / "gpu-rehearsal-partial.md").read_text(encoding="utf-8")
    assert "**There was no GPU" in text
    assert "| gpu_small | µs/batch |" in text


PROGRAMS = ("measuring", "run", "torchvision_cpu")
FORMATS = sorted(p for p in (FOLDER / "formats").glob("*.py") if p.stem not in PROGRAMS)
TINY = {"CSEQ_BENCHMARKS_TINY": "1", "CSEQ_FORMATS_SECONDS": "0.1", "CUDA_VISIBLE_DEVICES": ""}


def missing(script):
    """Return the missing libraries that a script imports at any place."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in names} - {"measuring"}
    return sorted(name for name in tops if find_spec(name) is None)


@pytest.mark.parametrize("script", FORMATS, ids=[path.stem for path in FORMATS])
def test_every_format_gives_each_sample_once(script, tmp_path):
    """Each sample arrives once and unchanged, for any workers and after a resume."""
    if lacking := missing(script):
        pytest.skip(f"not installed: {', '.join(lacking)}")
    done = run(script, "check", tmp_path, **TINY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all right\n")


def test_the_runner_knows_every_format():
    """The runner's list has each script of the folder; an unknown name is refused."""
    done = run(FOLDER / "formats" / "run.py", "no_such_format", **TINY)
    assert done.returncode == 1
    listed = done.stderr.partition("; pass some of ")[2].strip().split(", ")
    assert sorted(listed) == [path.stem for path in FORMATS]
