"""Run cases and write the results: `run.py [--rounds N] [CASE …]`; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cases import all_cases
from harness.case import TINY, Case
from harness.chart import as_svg
from harness.report import as_json, as_markdown, machine, section
from harness.runner import run_case

RESULTS = Path(__file__).parent / "results"
CHARTED = (
    "small_processes",
    "small_threads",
    "large_uint8",
    "dict_113",
    "start",
    "permutation_1e7",
)


def main() -> int:
    """Run what the command line asks for; 1 if a contender failed."""
    options = parser().parse_args()
    if options.tiny:
        os.environ[TINY] = "1"
    cases = chosen(options.cases)
    if options.list:
        print(*(f"{case.name:28} {case.title}" for case in cases), sep="\n")
        return 0
    report = {"machine": machine(), "rounds": options.rounds, "cases": []}
    for case in cases:
        report["cases"].append(measured(case, options))
        print(section(report["cases"][-1]), flush=True)
        write(report, options.output, "partial" if options.cases or options.only else "latest")
    failed = [one for case in report["cases"] for one in case["contenders"] if one["error"]]
    for one in failed:
        print(f"\n{one['name']} failed: {one['error']}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("cases", nargs="*", help="names, their beginnings or patterns; all")
    result.add_argument("--rounds", type=int, default=5, help="measured rounds of a contender")
    result.add_argument("--only", default="", help="contenders with this in their names")
    result.add_argument("--no-peers", action="store_true", help="those that need nothing else")
    result.add_argument("--tiny", action="store_true", help="hardly any work: see that all runs")
    result.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    result.add_argument("--list", action="store_true", help="name the cases")
    return result


def chosen(patterns: list[str]) -> list[Case]:
    """Find the cases that the command line names."""
    cases = all_cases()
    for pattern in patterns:
        if not any(matches(name, pattern) for name in cases):
            raise SystemExit(f"no case {pattern!r}; there are {', '.join(cases)}")
    return [
        case
        for name, case in cases.items()
        if not patterns or any(matches(name, pattern) for pattern in patterns)
    ]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names this case or begins its name."""
    return name.startswith(pattern) or fnmatch(name, pattern)


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case; a contender whose distributions are missing is left out, and said so."""
    contenders = []
    for contender in case.contenders:
        if options.only not in contender.name or (options.no_peers and contender.needs):
            continue
        if contender.missing:
            missing = ", ".join(contender.missing)
            print(f"{case.name}: no {contender.name}, for want of {missing}", file=sys.stderr)
            continue
        contenders.append(contender)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return as_json(case, run_case(case, contenders, options.rounds), load)


def write(report: dict[str, Any], folder: Path, name: str) -> None:
    """Write what there is so far."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"json": json.dumps(report, indent=1) + "\n", "md": as_markdown(report)}
    charted = [case for case in report["cases"] if case["name"] in CHARTED]
    if charted:
        about = report["machine"]
        files["svg"] = as_svg(charted, f"{about['cpu']}, {about['cores']} cores, {about['date']}")
    for suffix, content in files.items():
        (folder / f"{name}.{suffix}").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
