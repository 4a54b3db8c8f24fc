"""Limits are read from numbers and texts, and from control groups of both versions."""

import os

import numpy as np
import pytest
from sharded import written

from cseq import system
from cseq.system import GIB, memory_limit_of


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(0, 0), (10**12, 10**12), (np.int64(5), 5), ("2GiB", 2 * GIB), ("500 MB", 500 * 10**6),
     ("1.5 KiB", 1536), ("7B", 7), ("3 TiB", 3 << 40), ("1kB", 1000)],
)  # fmt: skip
def test_memory_limits(value, nbytes):
    """A limit is a number of bytes, or a text with a unit."""
    assert memory_limit_of(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [-1, "2", "GiB", "2 gib", "-1GiB", "2GiB ram", "1e9B", "", 2.5, True, [], b"2GiB"],
)
def test_wrong_memory_limits(value):
    """An invalid limit is an error that shows it; one of another type is named by its type."""
    is_wrong = type(value) in (int, str)
    error, said = (ValueError, "memory_limit") if is_wrong else (TypeError, type(value).__name__)
    with pytest.raises(error, match=said):
        memory_limit_of(value)


def files(root, contents):
    """Write files below a folder."""
    return written({name: text.encode() for name, text in contents.items()}, root)


@pytest.mark.needs("POSIX")
def test_the_default_is_a_quarter_of_the_machine(tmp_path):
    """Without control groups, the machine's memory counts."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert system.default_memory_limit(tmp_path) == ram // 4
    assert 0 < memory_limit_of(None) <= ram // 4


@pytest.mark.parametrize("name", system.LOCAL_SIZES)
def test_ranks_share_the_default(name, monkeypatch):
    """A machine's eight ranks share a quarter of its memory; an explicit limit is for each rank."""
    for each in system.LOCAL_SIZES:
        monkeypatch.delenv(each, raising=False)
    alone = memory_limit_of(None)
    monkeypatch.setenv(name, "8")
    assert abs(8 * memory_limit_of(None) - alone) < 8
    assert memory_limit_of("2GiB") == 2 * GIB


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("contents", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "4000\n"}, 1000),
        ({"proc/self/cgroup": "0::/a b/c\n", f"{V2}/a b/memory.max": "4000\n",
          f"{V2}/a b/c/memory.max": "max\n"}, 1000),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/memory.max": "8000\n",
          f"{V2}/a/b/memory.max": "4000\n"}, 1000),
        ({"proc/self/cgroup": "2:cpu:/x\n1:memory:/a\n",
          f"{V1}/a/memory.limit_in_bytes": "4000\n"}, 1000),
        ({"proc/self/cgroup": "1:hugetlb,memory:/host/path\n",
          f"{V1}/memory.limit_in_bytes": "4000\n"}, 1000),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "1:memory:/\n",
          f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)  # fmt: skip
def test_the_default_obeys_control_groups(tmp_path, contents, limit):
    """The smallest limit of all groups above this process counts, in both versions."""
    expected = system.default_memory_limit(tmp_path) if limit is None else limit
    assert system.default_memory_limit(files(tmp_path, contents)) == expected


def test_available_memory(tmp_path):
    """Available memory is what is free in the machine and in every group, including file pages."""
    assert system.available_memory(tmp_path) is None
    machine = {"proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 40 kB\nSwapFree: 10 kB\n"}
    assert system.available_memory(files(tmp_path, machine)) == 50 * 1024
    group = {
        "proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.max": "10000\n",
        f"{V2}/a/memory.current": "9000\n",
        f"{V2}/a/memory.stat": "anon 5\ninactive_file 500\n",
    }
    assert system.available_memory(files(tmp_path, group)) == 1500
    older = {
        "proc/self/cgroup": "1:memory:/a\n",
        f"{V1}/a/memory.limit_in_bytes": "10000\n",
        f"{V1}/a/memory.usage_in_bytes": "10500\n",
        f"{V1}/a/memory.stat": "inactive_file 1\ntotal_inactive_file 400\n",
    }
    assert system.available_memory(files(tmp_path, older)) == 0


def test_kills_for_want_of_memory(tmp_path):
    """The innermost control group with a count supplies it, in both versions."""
    assert system.oom_kills(tmp_path) is None
    older = {
        "proc/self/cgroup": "1:memory:/a/b\n",
        f"{V1}/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    assert system.oom_kills(files(tmp_path, older)) == 3
    newer = {
        "proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.events": "low 0\nmax 9\noom 8\noom_kill 7\noom_group_kill 0\n",
    }
    assert system.oom_kills(files(tmp_path, newer)) == 7


@pytest.mark.needs("POSIX")
def test_what_a_process_has_for_itself(tmp_path):
    """It is its resident pages without the shared ones; 0 where this is unknown."""
    root = files(tmp_path, {"proc/7/statm": "900 50 20 1 0 300 0\n", "proc/8/statm": "\n"})
    assert system.private_memory(7, root) == 30 * os.sysconf("SC_PAGE_SIZE")
    assert (
        system.private_memory(8, root)
        == system.private_memory(9, root)
        == system.private_memory(None, root)
        == 0
    )
