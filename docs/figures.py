"""Figures of the pages: bars drawn from committed results, and drawings made by hand.

Both are SVG in the page itself, whose colours are those of the page: light or dark.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives

from cseq.observe.figures import Drawing, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
FORMATS = HERE.parent / "benchmarks" / "results" / "formats.json"

WIDTH, LABEL, BAR, ROW = 500, 168, 205, 26  # of a figure, its names, its longest bar, its lines


def bars(rows: Sequence[tuple[str, float | None, str]], caption: str) -> str:
    """Draw a bar for each (name, value, words); ours have the colour. None: what failed."""
    most = max(value for _, value, _ in rows if value is not None)
    drawing = Drawing(WIDTH, ROW * len(rows) + 4, caption)
    for row, (name, value, words) in enumerate(rows):
        y = ROW * row
        drawing.text(LABEL - 10, y + 17, name, "end")
        length = 0 if value is None else max(2.0, BAR * value / most)
        if length:
            kind = "ours" if name.startswith("cseq") else "theirs"
            drawing.bar(LABEL, LABEL + length, y + 5, 16, kind)
        drawing.text(LABEL + length + 8, y + 17, words, "faint")
    return figure(drawing.inline(), caption)


def figure(svg: str, caption: str, kind: str = "") -> str:
    """Put a drawing and what it shows into the page; a 'wide' one has more room."""
    shown = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="cseq-figure {kind}">{svg}{shown}</figure>'


def median(way: dict[str, Any] | None, what: str) -> float | None:
    """Return the median of what was measured; None: each round failed."""
    values = [one[what] for one in (way or {}).get("rounds", [])]
    return statistics.median(values) if values else None


def formats() -> tuple[dict[str, dict[str, Any]], str]:
    """Read the committed results of `make check-formats`: name → ways, and when and where."""
    report = json.loads(FORMATS.read_text(encoding="utf-8"))
    about = report["machine"]
    rounds = "one round" if report["rounds"] == 1 else f"medians of {report['rounds']} rounds"
    where = f"{about['cpu']}, {about['cores']} cores, {about['date'][:10]}, {rounds}"
    found = {
        one["name"]: {way["way"]: way for way in one["ways"]} | {"title": one["title"]}
        for one in report["formats"]
    }
    return found, where


NAMES = {
    "cseq": "cseq, processes",
    "cseq fork": "cseq, forked",
    "cseq threads": "cseq, threads",
    "DataLoader": "torch's DataLoader",
}


def of_format(name: str) -> str:
    """Draw the rates of a data format: each way that was measured."""
    found, where = formats()
    ways = {way: one for way, one in found[name].items() if way != "title"}
    base = median(ways.get("DataLoader"), "samples_per_s")
    rows: list[tuple[str, float | None, str]] = []
    for way, one in ways.items():
        rate = median(one, "samples_per_s")
        if rate is None:
            rows.append((NAMES.get(way, way), None, "failed"))
            continue
        times = f" · {rate / base:.3g} ×" if base and way != "DataLoader" else ""
        rows.append((NAMES.get(way, way), rate, number(rate) + times))
    return bars(rows, f"Samples a second, two workers; × torch's DataLoader. {where}.")


def of_processes_and_threads() -> str:
    """Draw, for each format, the rate from threads over that from processes, in logarithms."""
    found, where = formats()
    rows = []
    for one in found.values():
        processes = median(one.get("cseq"), "samples_per_s")
        threads = median(one.get("cseq threads"), "samples_per_s")
        title = one["title"].rstrip(".").partition(". ")[2].split(":")[0].split(",")[0]
        title = title.replace("`", "").split(" (")[0]
        ratio = threads / processes if threads and processes else None
        rows.append((title, ratio))
    most = max(1.0, *(abs(math.log2(ratio)) for _, ratio in rows if ratio))
    middle, half, label = 470, 105, 308
    caption = f"Rate of the same indexer from two processes and from two threads. {where}."
    drawing = Drawing(640, ROW * len(rows) + 30, caption)
    drawing.rect(middle - 0.75, 22, 1.5, ROW * len(rows) + 4, "head")
    drawing.text(middle - 8, 14, "◄ processes faster", "faint end")
    drawing.text(middle + 8, 14, "threads faster ►", "faint")
    for row, (title, ratio) in enumerate(rows):
        y = 22 + ROW * row
        drawing.text(label, y + 17, title, "end")
        if ratio is None:
            drawing.text(middle + 8, y + 17, "threads: not measured", "faint")
            continue
        length = max(2.0, half * abs(math.log2(ratio)) / most)
        end = middle + length if ratio > 1 else middle - length
        drawing.bar(middle, end, y + 5, 16, "ours" if ratio > 1 else "other")
        words = f"{max(ratio, 1 / ratio):.2g} ×"
        if ratio > 1:
            drawing.text(end + 6, y + 17, words, "faint")
        else:
            drawing.text(end - 6, y + 17, words, "faint end")
    return figure(drawing.inline(), caption, "wide")


def by_hand(name: str) -> str:
    """Put a drawing of docs/drawings into the page."""
    return figure((HERE / "drawings" / f"{name}.svg").read_text(encoding="utf-8"), "")


class Figure(Directive):
    """`{format-figure} jpeg_folder`, `{drawing} journey`, `{threads-figure}`."""

    optional_arguments = 1
    option_spec: ClassVar = {"alt": directives.unchanged}
    draw: ClassVar[Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        """Make the node; Sphinx builds the page again if the file behind it changes."""
        env = self.state.document.settings.env
        env.note_dependency(str(FORMATS))
        for argument in self.arguments:
            env.note_dependency(str(HERE / "drawings" / f"{argument}.svg"))
        return [nodes.raw("", type(self).draw(*self.arguments), format="html")]


def setup(app: Sphinx) -> None:
    """Name the directives."""
    from order_figures import of_order

    for name, draw in {
        "format-figure": of_format,
        "threads-figure": of_processes_and_threads,
        "drawing": by_hand,
        "order-figure": of_order,
    }.items():
        app.add_directive(name, type(name, (Figure,), {"draw": staticmethod(draw)}))
