"""Runs the loops of examples/slow, before and after their remedy, for the page of that name.

    python docs/slow_loops.py [NAME ...]

For each, on a machine with nothing else to do: what `advice()` says, and how long the loop waits
over time, into docs/drawings/slow. The page shows what is committed.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from cseq.report.page import drawn

if TYPE_CHECKING:
    from cseq.measure.stats import Stats

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "examples" / "slow"
FOUND = HERE / "drawings" / "slow"


def draw(stats: Stats, name: str) -> None:
    """Draw the waiting over time."""
    heading, chart, _ = next(drawn(stats))
    if heading != "Waiting over time":
        raise SystemExit(f"{name} was over too soon to be drawn")
    (FOUND / f"{name}.svg").write_text(chart.file(), encoding="utf-8")


def measure(name: str) -> None:
    """Run a script twice, and write down what was seen."""
    script = importlib.import_module(name)
    said = []
    for moment, options in (("before", {}), ("after", script.AFTER)):
        loader = script.train(**options)
        stats = loader.stats()
        draw(stats, f"{name}-{moment}")
        rate = stats.batches / (stats.start_waited + stats.elapsed)
        text = f"{moment}, {rate:.3g} batches a second. {loader.advice()}"
        said += [textwrap.fill(line, 88, subsequent_indent="  ") for line in text.splitlines()]
    (FOUND / f"{name}.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    print(name, *said, sep="\n", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPTS))
    FOUND.mkdir(exist_ok=True)
    for each in sys.argv[1:] or sorted(path.stem for path in SCRIPTS.glob("*.py")):
        measure(each)
