"""Measure data formats and write the results: `run.py [--rounds N] [FORMAT …]`; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from harness.case import TINY
from harness.report import head, machine, row

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results"
# Each way of ours, and the DataLoaders whose workers get their modules in the same way, if any.
LIKE = {
    "cseq": ("DataLoader forkserver",),
    "cseq fork": ("DataLoader", "DataLoader forkserver"),
    "cseq threads": ("DataLoader", "DataLoader forkserver"),
    "cseq.DataLoader": ("DataLoader",),
    "cseq.DataLoader forkserver": ("DataLoader forkserver",),
}
WAYS = (*LIKE, "DataLoader", "DataLoader forkserver")
# The scripts in the order of their numbers.
SCRIPTS = (
    "jpeg_folder",
    "arrow_text",
    "hdf5_images",
    "zarr_images",
    "parquet_table",
    "lmdb_records",
    "tar_shards",
    "token_windows",
    "wave_files",
    "memory_table",
    "map_dataset",
    "sklearn_jax",
)
LIBRARIES = ("torchvision", "datasets", "h5py", "zarr", "pyarrow", "lmdb", "pillow", "jax")
# The seconds that a round may take.
PATIENCE = 300
FIGURES = {
    "cpu_us": "CPU µs/sample",
    "samples_per_s": "samples/s",
    "first_ms": "first batch ms",
    "memory_mb": "memory MB",
}


def main() -> int:
    """Run the command line. Return 1 if a script failed."""
    options = parser().parse_args()
    if options.tiny:
        os.environ[TINY] = "1"
        os.environ["CSEQ_FORMATS_SECONDS"] = "0.1"
    names = options.formats or list(SCRIPTS)
    unknown = [name for name in names if name not in SCRIPTS]
    if unknown:
        raise SystemExit(f"unknown format {', '.join(unknown)}; pass some of {', '.join(SCRIPTS)}")
    about = machine(LIBRARIES)
    report: dict[str, Any] = {"machine": about, "rounds": options.rounds, "formats": []}
    for name in names:
        report["formats"].append(measured(name, options.rounds))
        write(report, options.output, "formats-partial" if options.formats else "formats")
        print(*lines_of(report["formats"][-1]), sep="\n", flush=True)
    failed = failures(report)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("formats", nargs="*", help="names of scripts, without .py (default: all)")
    result.add_argument("--rounds", type=int, default=5, help="measured rounds of each way")
    result.add_argument("--tiny", action="store_true", help="use little data, to test the program")
    result.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    return result


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Make a format's data, then run each way for a round in turn, each in a fresh process."""
    load = round(os.getloadavg()[0], 2)
    ways: list[dict[str, Any]] = [{"way": way, "rounds": [], "errors": []} for way in WAYS]
    with tempfile.TemporaryDirectory() as folder:
        script(name, "make", folder)
        for number in range(rounds):
            first = number % len(ways)
            for one in ways[first:] + ways[:first]:
                try:
                    output = script(name, "measure", one["way"], folder)
                    figures = json.loads(output.splitlines()[-1])
                    one["rounds"] += [] if figures is None else [figures]
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    # A killed process may have no output.
                    said = str(error.stderr or error)
                    print(said, file=sys.stderr)
                    one["errors"].append(said[-1000:])
    title = (FOLDER / f"{name}.py").read_text(encoding="utf-8").partition("\n")[0].strip('"')
    return {"name": name, "title": title, "load_before": load, "ways": ways}


def script(name: str, *arguments: str) -> str:
    """Run a format's script and return what it printed."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout


# -- the table


def as_markdown(report: dict[str, Any]) -> str:
    """Return the whole report: a line for each way of each format."""
    lines = [head(report["machine"], report["rounds"], "../formats/README.md"), ""]
    lines += [row(["format", "way", *FIGURES.values()])]
    lines += [row(["---", "---", *["---:"] * len(FIGURES)])]
    for one in report["formats"]:
        lines += lines_of(one)
    failed = failures(report)
    if failed:
        lines += ["", "What failed:", "", *(f"- {line}" for line in failed)]
    return "\n".join([*lines, ""])


def failures(report: dict[str, Any]) -> list[str]:
    """List the ways that failed, with the number of failed rounds and the last output."""
    return [
        f"{one['name']}, {way['way']}: {len(way['errors'])} of {report['rounds']} rounds: "
        + (way["errors"][-1].strip().splitlines() or ["no output"])[-1]
        for one in report["formats"]
        for way in one["ways"]
        if way["errors"]
    ]


def lines_of(one: dict[str, Any]) -> list[str]:
    """Return a format's lines, one per way, with start and memory over the comparable way's."""
    ways = {
        way["way"]: medians(way["rounds"]) for way in one["ways"] if way["rounds"] or way["errors"]
    }
    lines = []
    for way, ours in ways.items():
        like = [ways[name] for name in LIKE.get(way, ()) if ways.get(name)]
        cells = [cell(key, ours, like[0] if like else {}) for key in FIGURES]
        title = one["title"].rstrip(".") if way == WAYS[0] else ""
        lines.append(row([title, way, *cells]))
    return lines


def cell(key: str, ours: dict[str, float], like: dict[str, float]) -> str:
    """Return the text of one figure."""
    if not ours:
        return "failed"
    value = figure(ours[key])
    if key in ("first_ms", "memory_mb") and like:
        return f"{value} ({ours[key] / like[key]:.2f} ×)"
    return value


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure, or nothing if all rounds failed."""
    return {
        key: statistics.median(one[key] for one in rounds) for key in (FIGURES if rounds else ())
    }


def figure(value: float) -> str:
    """Format a figure with three digits."""
    if value >= 10_000:
        return f"{value / 1000:.3g} k" if value < 1e6 else f"{value / 1e6:.3g} M"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write(report: dict[str, Any], folder: Path, name: str) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(as_markdown(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
