"""The results as a table: Markdown for reading, JSON for computing."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cseq

if TYPE_CHECKING:
    from harness.case import Case
    from harness.runner import Result

DISTRIBUTIONS = (
    *("numpy", "torch", "spdl-core", "grain", "torchdata", "returnn", "lhotse", "trl", "datasets"),
    *("pillow", "simplejpeg", "opencv-python-headless", "tensorflow-cpu"),
    *("webdataset", "litdata", "mosaicml-streaming"),
)
HOLDINGS = ("peak_mb", "descriptors")


# -- JSON


def machine(libraries: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe the machine and the programs, with the versions of further distributions."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": memory_gib(),
        "system": platform.platform(),
        "versions": versions((*DISTRIBUTIONS, *libraries)),
        "commit": commit(),
    }


def cpu_name() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """Return the machine's memory in GiB."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def python_version() -> str:
    """Return Python's version, and whether it runs without a GIL."""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return platform.python_version() + ("" if has_gil else " without a GIL")


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python, cseq, and the distributions that are installed."""
    found = {"python": python_version(), "cseq": cseq.__version__}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path = Path(__file__).parents[2]) -> str:
    """Return the last commit that changed cseq in a checkout, with a plus sign if files differ."""
    git = ["git", "-C", str(folder)]
    last = ["log", "--max-count=1", "--format=%h", "--", "cseq"]
    changed = ["diff", "--name-only", "HEAD", "--", "cseq"]
    try:
        name, files = (
            subprocess.run(
                [*git, *command], capture_output=True, text=True, check=False
            ).stdout.strip()
            for command in (last, changed)
        )
    except FileNotFoundError:
        return ""
    return name + "+" * bool(files)


def as_json(case: Case, results: list[Result], load: float) -> dict[str, Any]:
    """Return all measurements of a case as JSON values."""
    return {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "more_is_better": case.more_is_better,
        "limit": case.limit,
        "rounds": case.rounds,
        "load_before": round(load, 2),
        "contenders": [contender_as_json(case, result, results) for result in results],
        "goals": goals_as_json(case, results),
    }


def contender_as_json(case: Case, result: Result, results: list[Result]) -> dict[str, Any]:
    """Return a contender's measurements, and how it compares with ours."""
    base = {
        "name": result.contender.name,
        "ours": result.contender.ours,
        "before": result.contender.checkout is not None,
        "error": result.error,
    }
    if not result.figures:
        return base
    return base | {
        "median": result.median,
        "min": min(result.figures),
        "max": max(result.figures),
        "figures": result.figures,
        "round_seconds": number(statistics.median(result.seconds)),
        "cpu_seconds": number(statistics.median(result.cpu_seconds)),
        "cpu_us_per_batch": cpu_microseconds(result),
        "cores_used": number(sum(result.cpu_seconds) / sum(result.seconds)),
        "peak_mb": number(result.peak_bytes / 1e6),
        "descriptors": number(result.descriptors),
        "ratios": {
            mine.contender.name: number(times_as_good(case, mine.median, result.median))
            for mine in results
            if mine.contender.ours and mine.figures
        },
    }


def cpu_microseconds(result: Result) -> float | None:
    """Return the CPU time per batch in all processes, or None if batches are not counted."""
    if not result.batches:
        return None
    return number(statistics.median(result.cpu_seconds) / result.batches * 1e6)


def times_as_good(case: Case, mine: float, other: float) -> float:
    """Return how many times as fast the first figure is."""
    better, worse = (mine, other) if case.more_is_better else (other, mine)
    return better / worse if worse else nan


def goals_as_json(case: Case, results: list[Result]) -> list[dict[str, Any]]:
    """Return the goals and the results, without goals whose contenders are missing."""
    medians = {result.contender.name: result.median for result in results if result.figures}
    goals: list[dict[str, Any]] = []
    if not medians:
        return goals
    for goal in case.goals:
        try:
            value = goal.value(medians)
        except KeyError:
            continue
        goals.append(
            {
                "text": goal.text,
                "value": value,
                "at_most": goal.at_most,
                "at_least": goal.at_least,
                "reached": goal.is_reached(value),
            }
        )
    return goals


def number(value: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return value if isfinite(value) else None


# -- Markdown


def as_markdown(report: dict[str, Any]) -> str:
    """The whole report."""
    return "\n".join(
        [head(report["machine"], report["rounds"]), *map(section, report["cases"]), ""]
    )


def head(about: dict[str, Any], rounds: int, page: str = "../README.md") -> str:
    """Describe the measurement and the machine."""
    programs = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    before = f", before: {about['before']}" if "before" in about else ""
    return (
        f"# Results\n\n"
        f"{about['date']}, {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB; "
        f"{about['system']}; {programs}; commit {about['commit']}{before}. "
        f"{rounds} rounds. How to read this: [README.md]({page})."
    )


def section(case: dict[str, Any]) -> str:
    """One case: its table and its goals."""
    mine = [one["name"] for one in case["contenders"] if one["ours"] and "median" in one]
    titles = ["", "median", "min", "max", *(f"{name} is" for name in mine)]
    counted = any(one.get("cpu_us_per_batch") is not None for one in case["contenders"])
    key = "cpu_us_per_batch" if counted else "cpu_seconds"
    titles += ["cores", "CPU µs/batch" if counted else "CPU s/round", "memory MB", "descriptors"]
    lines = [f"\n## {case['name']}: {case['title']}\n"]
    rounds = f"; rounds: {case['rounds']}" if case["rounds"] else ""
    lines += [f"Figures in {case['unit']}; load before: {case['load_before']}{rounds}.\n"]
    lines += [row(titles), row(["---", *["---:"] * (len(titles) - 1)])]
    lines += [contender_row(one, case, mine, key) for one in case["contenders"]]
    if case["goals"]:
        lines += ["", row(["goal", "wanted", "reached", ""]), row(["---", "---:", "---:", "---"])]
        lines += [goal_row(goal) for goal in case["goals"]]
    return "\n".join(lines)


def contender_row(one: dict[str, Any], case: dict[str, Any], mine: list[str], cpu: str) -> str:
    """One contender. `cpu` names the value for its CPU time."""
    name = one["name"] + (" (limit)" if one["name"] == case["limit"] else "")
    if "median" not in one:
        what = "cannot be run there" if one["before"] else "failed"
        return row([name, f"{what}: {' '.join(one['error'].split())[-200:]}"])
    cells = [f"**{name}**" if one["ours"] else name]
    cells += [short(one[key]) for key in ("median", "min", "max")]
    cells += ["" if name == one["name"] else times(one["ratios"][name]) for name in mine]
    return row([*cells, *(short(one[key]) for key in ("cores_used", cpu, *HOLDINGS))])


def goal_row(goal: dict[str, Any]) -> str:
    """One goal."""
    wanted = [f"≤ {short(goal['at_most'])}"] if goal["at_most"] is not None else []
    wanted += [f"≥ {short(goal['at_least'])}"] if goal["at_least"] is not None else []
    reached = "yes" if goal["reached"] else "**no**"
    return row([goal["text"], ", ".join(wanted), short(goal["value"]), reached])


def row(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def times(ratio: float | None) -> str:
    """Format a ratio as a factor."""
    return "" if ratio is None else f"{short(ratio)} ×"


def short(value: float | None) -> str:
    """Format a number with three digits, or as an integer."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
