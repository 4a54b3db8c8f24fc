"""The doctor finds every fault made on purpose, and none on a healthy machine."""

import pytest

from cseq.report import doctor
from cseq.system import GIB

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


def write(path, text):
    """Write a file of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


@pytest.fixture(autouse=True)
def _sound(tmp_path, monkeypatch):
    """Write the files of a healthy machine with 8 cores, and inspect that one."""
    for name, text in SOUND.items():
        write(tmp_path / name, text)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def wrong(findings):
    """Return the findings that are not fine."""
    return [each.text for each in findings if each.remedy]


@pytest.mark.parametrize(
    ("check", "about", "name", "changed"),
    [
        ("quota", "may use only 6 at", f"{GROUP}/cpu.max", "600000 100000\n"),
        ("quota", "in 18% of its", f"{GROUP}/cpu.stat", "nr_periods 1000\nnr_throttled 180\n"),
        ("pressure", "during 35 %", "proc/pressure/cpu", "some avg10=35.00 avg60=9 total=1\n"),
        ("kills", "2 processes of", f"{GROUP}/memory.events", "oom_kill 2\n"),
        ("processes", "start only 28 more", f"{GROUP}/pids.max", "40\n"),
    ],
)
def test_what_a_container_lacks(tmp_path, check, about, name, changed):
    """Quotas, throttling, other programs, kills and few processes are found."""
    assert wrong(getattr(doctor, check)()) == []
    write(tmp_path / name, changed)
    (text,) = wrong(getattr(doctor, check)())
    assert about in text


def test_a_quota_of_either_version(tmp_path):
    """The narrowest group's quota counts, in both versions of control groups."""
    write(tmp_path / GROUP / "cpu.max", "400000 100000\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert "2.5" in next(doctor.quota()).text
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/pod\n")
    folder = tmp_path / "sys/fs/cgroup/cpu/pod"
    write(folder / "cpu.cfs_quota_us", "400000\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert "use only 4 at" in next(doctor.quota()).text
    write(folder / "cpu.cfs_quota_us", "-1\n")
    assert wrong(doctor.quota()) == []


def test_many_threads_and_a_slow_clock(tmp_path, monkeypatch):
    """In each worker, cseq would set one thread; a clock with slow readings is named."""
    assert wrong(doctor.threads()) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    (text,) = wrong(doctor.threads())
    assert "OMP_NUM_THREADS=64" in text
    folder = tmp_path / "sys/devices/system/clocksource/clocksource0"
    write(folder / "current_clocksource", "hpet\n")
    monkeypatch.setattr(doctor, "READINGS", 10)
    monkeypatch.setattr(doctor, "now_ns", lambda: sum(range(10_000)))
    (text,) = wrong(doctor.clock())
    assert "hpet" in text


def test_the_program(run_command, tmp_path):
    """Each finding has a line, and the last line counts what needs doing."""
    done = run_command(tmp_path, "doctor")
    *lines, last = done.stdout.splitlines()
    wrong = sum(line.startswith(" ! ") for line in lines)
    assert all(line[:3] in ("   ", " ! ") for line in lines)
    assert done.returncode == bool(wrong)
    assert last.split()[0] == (str(wrong) if wrong else "nothing")
