"""The doctor finds what was broken on purpose, and nothing on a sound machine."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cseq.memory.memory_limit import GIB
from cseq.observe import doctor
from cseq.observe.doctor import Finding, Machine, Rates, judge_data

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GROUP = "sys/fs/cgroup/pod"
SOUND = {
    "proc/self/cgroup": "0::/pod\n",
    "proc/meminfo": f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {60 * GIB >> 10} kB\n",
    "proc/pressure/cpu": "some avg10=1.50 avg60=1.00 avg300=0.50 total=1\n",
    f"{GROUP}/cpu.max": "max 100000\n",
    f"{GROUP}/cpu.stat": "usage_usec 5\nnr_periods 1000\nnr_throttled 3\n",
    f"{GROUP}/memory.max": "max\n",
    f"{GROUP}/memory.current": f"{GIB}\n",
    f"{GROUP}/memory.events": "oom 0\noom_kill 0\n",
    f"{GROUP}/pids.max": "4096\n",
    f"{GROUP}/pids.current": "12\n",
}


def machine(folder: Path, cores: int = 8, environ: dict[str, str] | None = None) -> Machine:
    """Write the files of a sound machine."""
    for name, text in SOUND.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return Machine(folder, environ or {}, cores)


def wrong(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return what is not fine: each such finding says what to do."""
    found = [each for each in findings if each.level != "fine"]
    assert all(each.remedy for each in found)
    return [(each.about, each.level) for each in found]


def test_nothing_is_wrong_on_a_sound_machine(tmp_path: Path) -> None:
    """All that looks at a machine is fine there."""
    sound = machine(tmp_path)
    for check in (doctor.quota, doctor.pressure, doctor.memory, doctor.threads, doctor.processes):
        assert wrong(check(sound)) == []


@pytest.mark.parametrize(
    ("check", "about", "cores", "changed"),
    [
        ("quota", "cores", 8, {f"{GROUP}/cpu.max": "600000 100000\n"}),
        ("quota", "cores", 1, {}),
        ("quota", "throttled", 8, {f"{GROUP}/cpu.stat": "nr_periods 1000\nnr_throttled 180\n"}),
        ("pressure", "pressure", 8, {"proc/pressure/cpu": "some avg10=35.00 avg60=9 total=1\n"}),
        ("memory", "memory", 8, {f"{GROUP}/memory.max": f"{GIB + GIB // 20}\n"}),
        ("memory", "killed", 8, {f"{GROUP}/memory.events": "oom_kill 2\n"}),
        ("processes", "processes", 8, {f"{GROUP}/pids.max": "40\n"}),
    ],
)
def test_what_a_container_lacks(
    tmp_path: Path, check: str, about: str, cores: int, changed: dict[str, str]
) -> None:
    """Quotas, throttling, other programs, little memory, kills and few processes are found."""
    broken = machine(tmp_path, cores)
    for name, text in changed.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert wrong(getattr(doctor, check)(broken)) == [(about, "warning")]


def test_a_quota_says_how_many_workers(tmp_path: Path) -> None:
    """The quota of the narrowest group counts, in both versions of control groups."""
    broken = machine(tmp_path)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n", encoding="ascii")
    assert "2.5" in next(doctor.quota(broken)).text
    assert "num_workers=1" in next(doctor.quota(broken)).remedy
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,cpuacct:/pod\n", encoding="ascii")
    folder = tmp_path / "sys/fs/cgroup/cpu/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("400000\n", encoding="ascii")
    (folder / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert "num_workers=3" in next(doctor.quota(broken)).remedy
    (folder / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")  # none
    assert wrong(doctor.quota(broken)) == []


def test_variables_of_many_threads(tmp_path: Path) -> None:
    """One thread in each worker is what cseq would set."""
    environ = {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "1"}
    found = list(doctor.threads(machine(tmp_path, environ=environ)))
    assert wrong(found) == [("threads", "warning")]
    assert "OMP_NUM_THREADS=64" in found[0].text


def test_a_slow_clock(tmp_path: Path) -> None:
    """A clock whose reading takes long is named."""
    where = machine(tmp_path)
    folder = tmp_path / "sys/devices/system/clocksource/clocksource0"
    folder.mkdir(parents=True)
    (folder / "current_clocksource").write_text("hpet\n", encoding="ascii")

    def slow() -> int:
        return sum(range(10_000))

    found = list(doctor.clock(where, slow, 10))
    assert wrong(found) == [("clock", "warning")]
    assert "hpet" in found[0].text


@pytest.mark.needs("Linux")
def test_a_sandbox_without_anonymous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where batches have to lie in files, their folder is named."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = list(doctor.shared_memory(machine(tmp_path)))
    assert wrong(found) == [("shared memory", "warning")]


def test_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails, one that takes long, and one that starts threads."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "quick.py").write_text("print('a banner')\n")
    (tmp_path / "failing.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "running.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    assert wrong(doctor.imported("quick")) == []
    assert wrong(doctor.imported("quick", slow=0)) == [("import quick", "warning")]
    (failing,) = doctor.imported("failing")
    assert wrong([failing]) == [("import failing", "problem")]
    assert "a_module_that_is_not_there" in failing.text
    if sys.platform == "linux":
        assert "starts threads" in next(doctor.imported("running")).text


def test_data(tmp_path: Path) -> None:
    """Files are read; a folder that is not there, or is empty, is a problem."""
    assert wrong(doctor.read_data(str(tmp_path))) == [("data", "problem")]
    assert wrong(doctor.read_data(str(tmp_path / "gone"))) == [("data", "problem")]
    (tmp_path / "images").mkdir()
    for k in range(3):
        (tmp_path / "images" / f"{k}.raw").write_bytes(os.urandom(50_000))
    (found,) = doctor.read_data(str(tmp_path))
    assert "3 files" in found.text


@pytest.mark.parametrize(
    ("rates", "remedy"),
    [
        (Rates(9, 300, 300e6), "shards"),
        (Rates(9, 300, 2e6), "disk"),
        (Rates(9, 8000, 300e6), ""),
    ],
)
def test_how_fast_data_are_read(rates: Rates, remedy: str) -> None:
    """Reads that wait for a disk or a network, at random alone or always, have other remedies."""
    found = judge_data("images", "nfs4", rates)
    assert found.level == ("warning" if remedy else "fine")
    assert remedy in found.remedy
    assert "nfs4" in found.text


@pytest.mark.needs("POSIX")
def test_the_program_where_descriptors_are_few() -> None:
    """The limit is a problem, and so are the workers that it keeps from starting."""
    code = (
        "import resource, sys\n"
        "import numpy\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "from cseq.__main__ import main\n"
        "main(['doctor', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = [Finding(**each) for each in json.loads(done.stdout)]
    problems = [each.about for each in found if each.level == "problem"]
    assert problems == ["descriptors", "workers"]


def test_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    """Each finding has a line, and the last line counts what is wrong; workers were measured."""
    done = subprocess.run(
        [sys.executable, "-m", "cseq", "doctor", "nosuch"],
        stdout=None, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    *lines, last = capfd.readouterr().out.splitlines()
    assert done.returncode == 1
    assert all(line[:3] in (" ✓ ", " ! ", " ✗ ") for line in lines)
    counts = [sum(line[1] == mark for line in lines) for mark in "!✗"]
    assert counts[1] == 1
    assert "1 problem" in last
    assert (f"{counts[0]} warning" in last) == bool(counts[0])
    (measured,) = [line for line in lines if "worker processes" in line]
    assert "µs a small batch" in measured


def test_signs_for_any_terminal() -> None:
    """Where the terminal's encoding lacks the signs, there are others."""
    done = subprocess.run(
        [sys.executable, "-m", "cseq", "doctor"],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii:replace"},
    )  # fmt: skip
    first, *_ = done.stdout.decode("ascii").splitlines()
    assert first.startswith(" ok Python")
    assert not list(itertools.filterfalse(str.isascii, first))
