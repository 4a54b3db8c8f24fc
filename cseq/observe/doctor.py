"""``cseq doctor``: what slows a machine down, and no other tool shows.

Each check is a function that returns findings; a finding that is not fine says what to do.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from os.path import join
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns
from cseq.cgroup import ROOT, Folder, fields, groups, lines, number
from cseq.compute import VARIABLES, cores
from cseq.compute import quota as quota_of
from cseq.memory.memory_limit import oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Finding", "Machine", "look", "report"]

THROTTLED = 0.05  # part of the periods of a quota
PRESSED = 20.0  # per cent of the last 10 s in which some task waited for a core
SLOW_CLOCK = 250  # ns a reading, with the call of it
PROCESSES = 32, 4  # room for others, and for each core


class Finding(NamedTuple):
    """What a check has found.

    Attributes
    ----------
    text : str
    remedy : str
        What to do; empty where all is fine.
    """

    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f" ! {self.text}: {self.remedy}" if self.remedy else f"   {self.text}"


@dataclass(frozen=True)
class Machine:
    """Where the checks look.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    environ : mapping of str to str
    cores : int
        That the process may run on.
    """

    root: Folder = ROOT
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: int = field(default_factory=cores)


def look(machine: Machine) -> Iterator[Finding]:
    """Make all checks; none takes time.

    Parameters
    ----------
    machine : Machine

    Yields
    ------
    Finding
    """
    for check in (quota, pressure, threads, kills, clock, processes):
        yield from check(machine)


def quota(machine: Machine) -> Iterator[Finding]:
    """Compare the cores with what the control groups allow, and look whether they throttle."""
    most = quota_of(machine.root)
    if most is not None and most < machine.cores:
        yield Finding(
            f"{machine.cores} cores, but this container may use {most:g} of them at a time",
            "count these for num_workers, as 'auto' does",
        )
    counts = [fields(join(group, "cpu.stat")) for group, _ in groups(machine.root, "cpu", "", "")]
    seen = [(each.get("nr_throttled", 0), each.get("nr_periods", 0)) for each in counts]
    throttled, periods = max(seen, default=(0, 0))
    if periods and throttled / periods > THROTTLED:
        yield Finding(
            f"the quota of this container stopped it in {throttled / periods:.0%} of the time "
            "slices so far",
            "start fewer workers, or ask for a larger quota",
        )


def pressure(machine: Machine) -> Iterator[Finding]:
    """Look whether tasks wait for cores at this moment."""
    for line in lines(join(machine.root, "proc/pressure/cpu")):
        kind, *pairs = line.split()
        share = float(dict(pair.split("=") for pair in pairs).get("avg10", 0))
        if kind == "some" and share > PRESSED:
            yield Finding(
                f"others compute here, too: in {share:.0f} % of the last 10 s, some task waited "
                "for a core",
                "leave them cores (fewer workers), or expect uneven times",
            )


def threads(machine: Machine) -> Iterator[Finding]:
    """Look for variables that make libraries of each worker compute with many threads."""
    for name in VARIABLES:
        value = machine.environ.get(name, "1")
        if value.isdigit() and int(value) > 1:
            yield Finding(
                f"{name}={value} is set: each worker will compute with {value} threads",
                "unset it: cseq then sets 1 for workers, and the loop has all cores",
            )


def kills(machine: Machine) -> Iterator[Finding]:
    """Look for processes that were killed for lack of memory."""
    killed = oom_kills(machine.root)
    if killed:
        yield Finding(
            f"{killed} processes of this container were killed for lack of memory so far",
            "give fewer workers, a smaller buffer or memory_limit, or a larger limit",
        )


def clock(
    machine: Machine, read: Callable[[], int] = now_ns, times: int = 1000
) -> Iterator[Finding]:
    """Measure what a reading of the clock takes."""
    best = min(_duration(read, times) for _ in range(5)) / times
    folder = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = " ".join(lines(join(machine.root, folder))) or "the system's"
    slow = "choose tsc, if the machine has it (kernel option clocksource=tsc)"
    text = f"clock: {source}, {best:.0f} ns a reading"
    yield Finding(text, slow if best > SLOW_CLOCK else "")


def _duration(function: Callable[[], object], times: int) -> int:
    """Return the nanoseconds of some calls."""
    begun = time.perf_counter_ns()
    for _ in range(times):
        function()
    return time.perf_counter_ns() - begun


def processes(machine: Machine) -> Iterator[Finding]:
    """Look how many more processes and threads the control groups allow."""
    left = []
    for group, name in groups(machine.root, "pids", "pids.max", "pids.max"):
        most, now = number(join(group, name)), number(join(group, "pids.current"))
        if most is not None and now is not None:
            left.append(most - now)
    base, each = PROCESSES
    if left and min(left) < base + each * machine.cores:
        yield Finding(
            f"this container may have {max(0, min(left))} more processes and threads",
            "raise its limit of pids (docker run --pids-limit)",
        )


def report() -> int:
    """Print what is found; return the exit status: 1 if something is to be done."""
    wrong = 0
    for finding in look(Machine()):
        print(finding)  # noqa: T201
        wrong += bool(finding.remedy)
    warnings = "1 warning" if wrong == 1 else f"{wrong} warnings"
    print(warnings if wrong else "nothing is wrong", file=sys.stdout)  # noqa: T201
    return int(wrong > 0)
