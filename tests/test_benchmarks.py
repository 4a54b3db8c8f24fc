"""The benchmarks run, as far as they need no other loader; what they measure is not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
from conftest import import_path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
GROUPS = {path.stem for path in (FOLDER / "cases").glob("[!_]*.py")}
GROUPS_OF_PEERS = {"adapters", "dataloader", "keys"}  # without a contender that needs nothing

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


# Of cases that are one declaration with several numbers: enough that each number is there once.
SELECTED = {
    "small": ("small_processes_touched", "small_threads", "test_mode"),
    "large": ("large_uint8_touched", "large_float32_touched"),
    "structure": ("dict_113_touched", "parts_null_2"),
    "computing": ("computing_uneven",),
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
            assert one["peak_mb"] > 0
            assert one["descriptors"] > 0
    assert (tmp_path / "partial.md").read_text(encoding="utf-8").startswith("# Results")


def test_an_unknown_case_is_refused():
    """A name that is no case ends the program, with the names there are."""
    done = run("--list", "small", "no_such_case")
    assert done.returncode == 1
    assert "no_such_case" in done.stderr
    assert "small_threads" in done.stderr


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
    assert len(case["contenders"]) == 4
    assert all(isfinite(one["median"]) for one in case["contenders"])
    text = (tmp_path / "gpu-rehearsal-partial.md").read_text(encoding="utf-8")
    assert "**There was no GPU" in text
    assert "| gpu_small | µs/batch |" in text


def test_without_a_gpu_its_benchmarks_say_what_to_do(run_prepared):
    """Where there is no CUDA device, nothing is measured, and the remedies are named."""
    torch = pytest.importorskip("torch", reason="the device is torch's")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run_prepared(GPU_PROGRAM)
    assert done.returncode == 1
    assert "finds no CUDA device" in done.stderr
    assert "DEVICE=cpu" in done.stderr


SHARED = """
import mmap, os
from harness.usage import memory_bytes

SIZE = 32 << 20
before = memory_bytes(os.getpid())
file = os.memfd_create("batches")
os.posix_fallocate(file, 0, SIZE)
opened = memory_bytes(os.getpid()) - before
with mmap.mmap(file, SIZE) as memory:
    for at in range(0, SIZE, mmap.PAGESIZE):
        memory[at] = 1
    mapped = memory_bytes(os.getpid()) - before
print(opened / SIZE, mapped / SIZE)
"""


def test_shared_memory_counts_once_whether_mapped_or_not():
    """Shared memory that a process has open counts without a mapping, and not again with one."""
    done = subprocess.run(
        [sys.executable, "-c", SHARED],
        env=os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{import_path()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [float(share) for share in done.stdout.split()] == pytest.approx([1, 1], abs=0.1)
