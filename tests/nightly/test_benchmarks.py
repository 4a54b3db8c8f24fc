"""The benchmarks run, as far as they need no other loader; what they measure is not judged."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
from conftest import import_path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
GROUPS = {path.stem for path in (FOLDER / "cases").glob("[!_]*.py")}
GROUPS_OF_PEERS = {
    "adapters",
    "dataloader",
    "keys",
    "picture",
    "threads",
}  # without a contender that needs nothing

pytestmark = pytest.mark.needs("Linux")


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, FOLDER / "run.py", *args],
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_picture_has_the_faster_mode_of_a_peer():
    """Of contenders that differ behind a comma, the fastest is drawn, and the picture says so."""
    medians = {"MPSequence": 1.0, "SPDL, threads": 2.0, "SPDL, processes": 4.0, "torch": 8.0}
    contenders = [
        {"name": name, "median": median, "ours": name == "MPSequence"}
        for name, median in medians.items()
    ]
    case = {"name": "a", "title": "A", "more_is_better": False, "contenders": contenders}
    draw = runpy.run_path(str(FOLDER / "harness" / "chart.py"))["as_svg"]
    both = draw([case], "torch", "Title", "")
    assert ("SPDL, threads" in both, "SPDL, processes" in both) == (True, False)
    assert "faster mode" in both
    one = draw([case | {"contenders": contenders[:2] + contenders[3:]}], "torch", "Title", "")
    assert "faster mode" not in one


# Of cases that are one declaration with several numbers: enough that each number is there once.
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
    cases = SELECTED.get(group, (group,))
    done = run("--tiny", "--no-peers", "--rounds", "1", "--output", tmp_path, *cases)
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


def test_a_run_can_add_to_the_results_of_another(tmp_path):
    """Cases of both are in the files, in order; one that ran again is there once."""
    for cases in (("permutation_1e6", "interpreted"), ("permutation_1e5", "permutation_1e6")):
        done = run("--tiny", "--rounds", "1", "--add", "--output", tmp_path, "--no-peers", *cases)
        assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "partial.json").read_text(encoding="utf-8"))
    names = [case["name"] for case in report["cases"]]
    assert names == ["interpreted", "permutation_1e5", "permutation_1e6"]


def test_a_run_adds_nothing_to_results_of_other_versions(tmp_path):
    """It ends at once, and says what differs."""
    about = {"commit": "of-a-test", "cpu": "", "cores": 2, "versions": {}}
    (tmp_path / "partial.json").write_text(json.dumps({"machine": about, "cases": []}))
    done = run("--tiny", "--add", "--output", tmp_path, "permutation_1e5")
    assert done.returncode != 0
    assert "partial.json is of-a-test, now it is" in done.stderr


def test_another_python_runs_the_same(tmp_path):
    """Contenders run in another Python as well, which is said."""
    options = ("--tiny", "--rounds", "1", "--only", "2 threads", "--output", tmp_path)
    done = run(*options, "--python", sys.executable, "interpreted")
    assert done.returncode == 0, done.stderr
    ((one, other),) = (
        case["contenders"] for case in json.loads((tmp_path / "partial.json").read_text())["cases"]
    )
    assert (one["name"], one["ours"]) == ("cseq, 2 threads", True)
    assert (other["name"], other["ours"]) == ("cseq, 2 threads (other Python)", False)
    assert isfinite(other["median"])


GPU_PROGRAM = f"""
import runpy, sys
sys.argv[0] = {str(FOLDER / "gpu" / "run.py")!r}
sys.path[0] = {str(FOLDER / "gpu")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rehearsal_of_the_gpu_says_that_it_is_one(run_prepared, tmp_path):
    """With the CPU as the device, a case for a GPU gives numbers, and says where from."""
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
    assert len(case["contenders"]) == 5
    assert all(isfinite(one["median"]) for one in case["contenders"])
    text = (tmp_path / "gpu-rehearsal-partial.md").read_text(encoding="utf-8")
    assert "**There was no GPU" in text
    assert "| gpu_small | µs/batch |" in text
