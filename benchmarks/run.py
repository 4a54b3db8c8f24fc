"""Run cases and write the results: `run.py [--rounds N] [CASE …]`; see README.md."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from math import nan
from pathlib import Path
from typing import Any

import cseq
from cases import groups
from harness import usage
from harness.case import TINY, Case, Contender
from harness.chart import as_svg, medians
from harness.report import as_json, as_markdown, commit, machine, section
from harness.runner import environment, run_case

RESULTS = Path(__file__).parent / "results"
# The prefix of the cases in the chart.
PICTURE = "picture_"
BASE = "torch DataLoader"
TITLE = "Speed-up over torch's DataLoader"


def main() -> int:
    """Run the command line. Return 1 if a contender failed."""
    options = parser().parse_args()
    if options.tiny:
        os.environ[TINY] = "1"
    cases = chosen(options.cases)
    if options.list:
        print(*(f"{case.name:28} {case.title}" for case in cases), sep="\n")
        return 0
    check_checkout(options.beside)
    compile_sources(options.beside)
    if not os.access(usage.COMPACT, os.W_OK):
        print("not root: memory stays fragmented, and the first contender may seem 12 % slower")
    name = options.name or named(options)
    report = {"machine": machine(), "rounds": options.rounds, "cases": []}
    if options.beside is not None:
        report["machine"]["before"] = commit(options.beside)
    if options.add:
        report = added_to(options.output / f"{name}.json", report)
    order = [case.name for case in chosen([])]
    for case in cases:
        contenders = present(case, options)
        if not contenders:
            continue
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else nan
        results = run_case(case, contenders, options.rounds)
        found = as_json(case, results, load)
        others = [one for one in report["cases"] if one["name"] != case.name]
        report["cases"] = sorted([*others, found], key=lambda one: order.index(one["name"]))
        print(section(found), flush=True)
        write(report, options.output, name)
    contenders = [one for case in report["cases"] for one in case["contenders"]]
    failed = [one for one in contenders if one["error"] and not one["before"]]
    for one in failed:
        print(f"\n{one['name']} failed: {one['error']}", file=sys.stderr)
    return 1 if failed else 0


def named(options: argparse.Namespace) -> str:
    """Name the files of the results."""
    return "partial" if options.cases or options.only else "latest"


def added_to(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return the report in a file, if it is from this program on this machine."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else report
    for key in ("commit", "cpu", "cores", "versions"):
        if found["machine"][key] != report["machine"][key]:
            was, now = (one["machine"][key] for one in (found, report))
            raise SystemExit(f"--add: {key} in {path} is {was}, but is now {now}; pass --name")
    return found


def check_checkout(checkout: Path | None) -> None:
    """End the program unless Python finds a built cseq in the checkout."""
    if checkout is None:
        return
    # Check the core as well: if it is not built, an editable install provides this checkout's.
    program = "import cseq._core; print(cseq.__file__, cseq._core.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(checkout), cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = done.stdout.splitlines()
    if done.returncode != 0 or not all(checkout in Path(file).parents for file in found):
        what = " and ".join(found) or done.stderr.strip().rpartition("\n")[2]
        raise SystemExit(
            f"--beside {checkout}: this Python cannot import cseq from there ({what}); build it "
            "there with python setup.py build_ext --inplace"
        )


def compile_sources(checkout: Path | None) -> None:
    """Write the bytecode that an installed package has. Otherwise, every process might compile."""
    folders = [Path(cseq.__file__).parent, Path(__file__).parent]
    for folder in folders if checkout is None else [*folders, checkout / "cseq"]:
        if not compileall.compile_dir(folder, quiet=1):
            print(f"{folder} is not compiled to bytecode, so starts will seem slower")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("cases", nargs="*", help="names, prefixes, patterns, files (default: all)")
    result.add_argument("--rounds", type=int, default=5, help="measured rounds per contender")
    result.add_argument("--only", default="", help="run only contenders with this in the name")
    result.add_argument("--no-peers", action="store_true", help="leave out other libraries")
    result.add_argument("--tiny", action="store_true", help="do little work, to test the program")
    result.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    result.add_argument(
        "--beside",
        type=checkout_at,
        help="another built checkout of cseq, to run ours with as well",
    )
    result.add_argument("--python", default="", help="another Python, to run all in as well")
    result.add_argument("--name", default="", help="name of the files (default: latest or partial)")
    result.add_argument("--add", action="store_true", help="keep the other cases in these files")
    result.add_argument("--list", action="store_true", help="list the cases")
    return result


def checkout_at(path: str) -> Path:
    """Return the path of a checkout that has a folder `cseq`."""
    checkout = Path(path).resolve()
    if not (checkout / "cseq" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{checkout} is not a checkout of cseq")
    return checkout


def chosen(patterns: list[str]) -> list[Case]:
    """Find the cases that the command line names."""
    known = [(group, case) for group, cases in groups().items() for case in cases]
    for pattern in patterns:
        if not any(matches(group, case, pattern) for group, case in known):
            names = ", ".join(case.name for _, case in known)
            raise SystemExit(f"unknown case {pattern!r}; pass some of {names}")
    return [
        case
        for group, case in known
        if not patterns or any(matches(group, case, pattern) for pattern in patterns)
    ]


def matches(group: str, case: Case, pattern: str) -> bool:
    """Return whether a pattern is a case's name, its file, or the beginning of its name."""
    return pattern == group or case.name.startswith(pattern) or fnmatch(case.name, pattern)


def present(case: Case, options: argparse.Namespace) -> list[Contender]:
    """Leave out contenders that are not requested. Report the ones that are not installed."""
    contenders = []
    for contender in case.contenders:
        if options.only not in contender.name or (options.no_peers and contender.needs):
            continue
        if contender.missing:
            missing = ", ".join(contender.missing)
            print(f"{case.name}: {contender.name} is left out; it needs {missing}", file=sys.stderr)
            continue
        contenders.append(contender)
        if contender.ours and options.beside is not None:
            contenders.append(contender.before(options.beside))
        if options.python:
            contenders.append(contender.elsewhere(options.python))
    return contenders


def write(report: dict[str, Any], folder: Path, name: str) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"json": json.dumps(report, indent=1) + "\n", "md": as_markdown(report)}
    drawn = [
        case
        for case in report["cases"]
        if case["name"].startswith(PICTURE) and BASE in medians(case)
    ]
    if drawn:
        about = report["machine"]
        versions = ", ".join(
            f"{name.removesuffix('-core')} {about['versions'][name]}"
            for name in ("torch", "spdl-core", "grain")
            if name in about["versions"]
        )
        files["svg"] = as_svg(
            drawn, BASE, TITLE, f"{about['cores']} cores; {versions}; {about['date'][:10]}"
        )
    for suffix, content in files.items():
        (folder / f"{name}.{suffix}").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
