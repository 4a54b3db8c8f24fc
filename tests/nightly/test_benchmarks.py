"""The benchmarks run, as far as they need no other loader; what they measure is not judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from conftest import import_path

import cseq

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
GROUPS = {path.stem for path in (FOLDER / "cases").glob("[!_]*.py")}
GROUPS_OF_PEERS = {
    "adapters",
    "dataloader",
    "keys",
    "picture",
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


# Of cases that are one declaration with several numbers: enough that each number is there once.
SELECTED = {
    "advice": ("causes",),
    "small": ("small_processes_touched", "small_threads", "large_buffer", "test_mode"),
    "large": ("large_uint8_touched", "large_float32_touched"),
    "brief": ("brief_0_cpu", "brief_5_cpu", "brief_10_sleeps"),
    "structure": ("dict_113_touched", "parts_null_1", "parts_null_2"),
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


def test_another_checkout_runs_beside_this_one(tmp_path):
    """With `--beside`, ours runs with the other cseq as well; what that cannot do is no failure."""
    other = tmp_path / "other"
    shutil.copytree(Path(cseq.__file__).parent, other / "cseq")
    with (other / "cseq" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\ndel MTSequence\n")
    options = ("--tiny", "--no-peers", "--rounds", "1", "--output", tmp_path, "--only", "cseq")
    done = run(*options, "--beside", other, "small_threads", "test_mode")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "partial.json").read_text(encoding="utf-8"))
    threads, inline = report["cases"]
    names = ["cseq, 2 workers", "cseq, 1 worker"]
    want = [name + suffix for name in names for suffix in ("", " (before)")]
    assert [one["name"] for one in threads["contenders"]] == want
    assert [bool(one["error"]) for one in threads["contenders"]] == [False, True, False, True]
    assert "no attribute 'MTSequence'" in threads["contenders"][1]["error"]
    assert "| cseq, 1 worker (before) | cannot be run there: " in done.stdout
    now, before = inline["contenders"]
    assert isfinite(before["median"])
    assert before["name"] == now["name"] + " (before)"
    assert set(before["ratios"]) == {now["name"]}


def test_a_checkout_without_a_built_cseq_is_refused(tmp_path):
    """`--beside` says at once that there is no checkout, or that it is not built."""
    done = run("--beside", tmp_path, "test_mode")
    assert done.returncode != 0
    assert "no checkout of cseq" in done.stderr
    package = Path(cseq.__file__).parent
    shutil.copytree(package, tmp_path / "cseq", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    done = run("--beside", tmp_path, "test_mode")
    assert done.returncode != 0
    assert "build it there" in done.stderr


def test_the_picture_is_drawn(tmp_path):
    """A run of its cases compares them with torch's DataLoader, on light and dark pages."""
    pytest.importorskip("torch", reason="what is drawn is compared with torch's DataLoader")
    arguments = ("--tiny", "--rounds", "1", "--only", "DataLoader", "--name", "drawn")
    done = run(*arguments, "--output", tmp_path, "picture_dicts")
    assert done.returncode == 0, done.stderr
    [case] = json.loads((tmp_path / "drawn.json").read_text(encoding="utf-8"))["cases"]
    mine, torchs = (one["median"] for one in case["contenders"])
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    texts = [element.text for element in ET.fromstring(drawn).iter() if element.text]
    rate = torchs / mine
    assert {case["title"], "cseq.DataLoader"} <= set(texts)
    assert (f"{rate:.0f}×" if rate >= 9.95 else f"{rate:.1f}×") in texts
    assert "prefers-color-scheme:dark" in drawn
    done = run(*arguments[:3], "--only", "cseq.DataLoader", "--output", tmp_path, "picture_dicts")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "partial.svg").exists()  # there is nothing to compare with


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
    assert len(case["contenders"]) == 5
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
