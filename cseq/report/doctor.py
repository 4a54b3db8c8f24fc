"""``cseq doctor``: checks a machine for common causes of slow loading.

Each check yields findings. A finding with a remedy is a warning.
"""

from __future__ import annotations

import os
import sys
import time
from os.path import join
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns
from cseq.system import ROOT, VARIABLES, cores, fields, groups, lines, number, oom_kills
from cseq.system import quota as quota_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "look", "report"]

# Warn if more than this fraction of the CPU quota's periods were throttled.
THROTTLED = 0.05
# Warn if a task was waiting for a core during more than this percentage of the last 10 s.
PRESSED = 20.0
# The number of clock readings to average, and the ns per reading above which to warn.
READINGS, SLOW_CLOCK = 1000, 250
# Warn if fewer processes than this can still be started: a base number, plus a number per core.
PROCESSES = 32, 4


class Finding(NamedTuple):
    """A finding, with a remedy if it is a problem."""

    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f" ! {self.text}: {self.remedy}" if self.remedy else f"   {self.text}"


def look() -> Iterator[Finding]:
    """Run all checks and yield their findings."""
    for check in (quota, pressure, threads, kills, clock, processes):
        yield from check()


def quota() -> Iterator[Finding]:
    """Check the CPU quota and how often it throttles this container."""
    most = quota_of(ROOT)
    if most is not None and most < cores():
        yield Finding(
            f"this machine has {cores()} cores, but this container may use only {most:g} at a time",
            "base num_workers on that number, as 'auto' does",
        )
    counts = [fields(join(group, "cpu.stat")) for group, _ in groups(ROOT, "cpu", "", "")]
    seen = [(stat.get("nr_throttled", 0), stat.get("nr_periods", 0)) for stat in counts]
    throttled, periods = max(seen, default=(0, 0))
    if periods and throttled / periods > THROTTLED:
        yield Finding(
            f"the CPU quota has paused this container in {throttled / periods:.0%} of its time "
            "slices so far",
            "start fewer workers, or ask for a larger quota",
        )


def pressure() -> Iterator[Finding]:
    """Check whether tasks are waiting for cores."""
    for line in lines(join(ROOT, "proc/pressure/cpu")):
        kind, *pairs = line.split()
        share = float(dict(pair.split("=") for pair in pairs).get("avg10", 0))
        if kind == "some" and share > PRESSED:
            yield Finding(
                f"the cores are overloaded: a task waited for a core during {share:.0f} % of the "
                "last 10 s",
                "use fewer workers, or expect uneven batch times",
            )


def threads() -> Iterator[Finding]:
    """Check the environment variables that set the number of library threads."""
    for name in VARIABLES:
        value = os.environ.get(name, "1")
        if value.isdigit() and int(value) > 1:
            yield Finding(
                f"{name}={value} makes each worker compute with {value} threads",
                "unset it; cseq then sets it to 1 for workers, and the loop can use all cores",
            )


def kills() -> Iterator[Finding]:
    """Check for processes that were killed because memory ran out."""
    killed = oom_kills(ROOT)
    if killed:
        yield Finding(
            f"the system has killed {killed} processes of this container because memory ran out",
            "use fewer workers, a smaller buffer or memory_limit, or a larger container",
        )


def clock() -> Iterator[Finding]:
    """Measure how long it takes to read the clock."""
    best = min(_reading() for _ in range(5))
    folder = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = " ".join(lines(join(ROOT, folder))) or "the system's"
    slow = "choose tsc, if the machine has it (kernel option clocksource=tsc)"
    text = f"clock: {source}, {best:.0f} ns per reading"
    yield Finding(text, slow if best > SLOW_CLOCK else "")


def _reading() -> float:
    begun = time.perf_counter_ns()
    for _ in range(READINGS):
        now_ns()
    return (time.perf_counter_ns() - begun) / READINGS


def processes() -> Iterator[Finding]:
    """Check the number of processes and threads that can still be created."""
    left = []
    for group, name in groups(ROOT, "pids", "pids.max", "pids.max"):
        most, now = number(join(group, name)), number(join(group, "pids.current"))
        if most is not None and now is not None:
            left.append(most - now)
    base, per_core = PROCESSES
    if left and min(left) < base + per_core * cores():
        yield Finding(
            f"this container can start only {max(0, min(left))} more processes and threads",
            "raise its pids limit (docker run --pids-limit)",
        )


def report() -> int:
    """Print the findings. Return 1 if there are warnings."""
    wrong = 0
    for finding in look():
        print(finding)  # noqa: T201
        wrong += bool(finding.remedy)
    warnings = "1 warning" if wrong == 1 else f"{wrong} warnings"
    print(warnings if wrong else "no problems found", file=sys.stdout)  # noqa: T201
    return int(wrong > 0)
