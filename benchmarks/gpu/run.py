"""Test and measure cseq on a GPU: `run.py [--device D] [--rounds N] [CASE …]`; see ../README.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any

# Remove this folder from the path: its modules are imported from the package.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gpu
from harness.case import TINY, Case
from harness.report import as_json, head, machine, row, section, short
from harness.runner import run_case

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER.parent / "results"
TESTS = ("tests/gpu",)
REHEARSED = (*TESTS, "tests/unit/converter/test_cuda.py::test_converters_without_a_device")
FIGURES = ("passed", "failed", "skipped")


def main() -> int:
    """Run the tests, then the cases. Return 1 if a test or a contender failed."""
    options = parser().parse_args()
    os.environ[gpu.DEVICE] = options.device
    if options.tiny:
        os.environ[TINY] = "1"
    # Import these only now, because they read the environment.
    from gpu.cases import CASES

    cases = chosen(CASES, options.cases)
    if options.list:
        print(*(f"{case.name:16} {case.title}" for case in cases), sep="\n")
        return 0
    device = described()
    about = machine()
    about["commit"] = options.commit or about["commit"]
    report: dict[str, Any] = {
        "machine": about,
        "device": device,
        "rounds": options.rounds,
        "tests": None if options.no_tests else tested(options.device),
        "cases": [],
    }
    print(head_of(report), flush=True)
    name = name_of(device, partial=bool(options.cases or options.only or options.no_tests))
    write(report, options.output, name)
    for case in cases:
        contenders = [one for one in case.contenders if options.only in one.name]
        if not contenders:
            continue
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else nan
        results = run_case(case, contenders, options.rounds)
        report["cases"].append(as_json(case, results, load))
        print(section(report["cases"][-1]), flush=True)
        write(report, options.output, name)
    print(*converters(report["cases"]), sep="\n")
    print(f"\n{options.output / name}.json, {name}.md")
    failed = [one for case in report["cases"] for one in case["contenders"] if one["error"]]
    for one in failed:
        print(f"\n{one['name']} failed: {one['error']}", file=sys.stderr)
    tests = report["tests"]
    return 1 if failed or (tests and (tests["failed"] or tests["exit_code"])) else 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("cases", nargs="*", help="names or prefixes of cases (default: all)")
    result.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="'cpu' stands in for a GPU"
    )
    result.add_argument("--rounds", type=int, default=5, help="measured rounds per contender")
    result.add_argument("--only", default="", help="run only contenders with this in the name")
    result.add_argument("--no-tests", action="store_true", help="leave out tests/gpu")
    result.add_argument("--tiny", action="store_true", help="do little work, to test the program")
    result.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    result.add_argument("--commit", default="", help="the commit, if git cannot tell")
    result.add_argument("--list", action="store_true", help="list the cases")
    return result


def chosen(cases: tuple[Case, ...], beginnings: list[str]) -> list[Case]:
    """Find the cases that the command line names."""
    for beginning in beginnings:
        if not any(case.name.startswith(beginning) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise SystemExit(f"unknown case {beginning!r}; pass some of {names}")
    return [case for case in cases if case.name.startswith(tuple(beginnings) or "")]


def described() -> dict[str, Any]:
    """Describe the device in a separate process, so that this one takes no memory on it."""
    code = "import json; from gpu.device import describe; print(json.dumps(describe()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parent, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


# -- the tests


def tested(device: str) -> dict[str, Any]:
    """Run the tests of the device, or without a device, the ones that run on the CPU."""
    chosen = TESTS if device == "cuda" else REHEARSED
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        command += ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
        done = subprocess.run([*command, f"--junitxml={file}"], cwd=ROOT, check=False)
        counted = counts(file) if file.exists() else dict.fromkeys(FIGURES, 0)
    return {"tests": list(chosen), "exit_code": done.returncode, **counted}


def counts(file: Path) -> dict[str, Any]:
    """Read the counts of the tests, and the names of those that failed."""
    cases = list(ET.parse(file).iter("testcase"))
    bad = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = sum(one.find("skipped") is not None for one in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "seconds": round(sum(float(one.get("time", 0)) for one in cases), 1),
        "failures": [f"{one.get('classname')}::{one.get('name')}" for one in bad],
    }


# -- the results


def name_of(device: dict[str, Any], *, partial: bool) -> str:
    """Name the results so that a rehearsal is not mistaken for a GPU result."""
    return ("gpu-rehearsal" if device["stands_in"] else "gpu") + ("-partial" if partial else "")


def head_of(report: dict[str, Any]) -> str:
    """Describe the measurement, the machine, and the results of the tests."""
    device = dict(report["device"])
    name = device.pop("name")
    lines = [head(report["machine"], report["rounds"]), ""]
    if device.pop("stands_in"):
        lines += ["**There was no GPU: the CPU stood in for it. This shows that everything runs,"]
        lines += ["and no figure here says anything about a GPU.**"]
    else:
        lines += [f"Device: **{name}**; {', '.join(f'{k} {v}' for k, v in device.items())}."]
    tests = report["tests"]
    if tests is None:
        return "\n".join([*lines, "", "The tests were left out."])
    lines += ["", row(["tests", *FIGURES, "exit code"]), row(["---", *["---:"] * 4])]
    cells = (tests[key] for key in (*FIGURES, "exit_code"))
    lines += [row([", ".join(tests["tests"]), *map(str, cells)])]
    failures = [f"- failed: {name}" for name in tests.get("failures", ())]
    return "\n".join([*lines, *([""] if failures else []), *failures])


def converters(cases: list[dict[str, Any]]) -> list[str]:
    """Compare converters in processes and in threads, in the cases that have both."""
    from gpu.cases import PROCESSES, THREADS

    lines = ["", "## Converters in processes and in threads", ""]
    lines += [row(["case", "unit", "processes", "threads", "threads are", "CPU time, threads"])]
    lines += [row(["---", "---", *["---:"] * 4])]
    for case in cases:
        found = {one["name"]: one for one in case["contenders"] if "median" in one}
        if PROCESSES in found and THREADS in found:
            one, other = found[PROCESSES], found[THREADS]
            key = "cpu_us_per_batch" if other.get("cpu_us_per_batch") else "cpu_seconds"
            cells = [case["name"], case["unit"], short(one["median"]), short(other["median"])]
            cells += [f"{short(one['ratios'][THREADS])} × as good"]
            cells += [f"{short(other[key] / one[key])} ×" if one[key] else "–"]
            lines.append(row(cells))
    return lines


def write(report: dict[str, Any], folder: Path, name: str) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = report["cases"]
    text = "\n".join([head_of(report), *converters(cases), *map(section, cases), ""])
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
