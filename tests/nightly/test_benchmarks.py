"""The benchmarks run if they need no other loader; their results are not judged."""

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
from checkout import import_path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
GROUPS = {path.stem for path in (FOLDER / "cases").glob("[!_]*.py")}
# These lack a contender that needs nothing.
GROUPS_OF_PEERS = {
    "adapters",
    "dataloader",
    "keys",
    "picture",
    "threads",
}

pytestmark = pytest.mark.needs("Linux")


def run(*args):
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, FOLDER / "run.py", *args],
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
    )


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
