"""Figures of the pages: bars drawn from committed results, and drawings made by hand.

Both are SVG in the page itself, in the colours of the page: light or dark. The table of
the data formats, and the sentences about it, are made of the same results.
"""

from __future__ import annotations

import functools
import html
import importlib.util
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx.util.docutils import SphinxDirective

from cseq.report.figures import Drawing, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
FORMATS = HERE.parent / "benchmarks" / "results" / "formats.json"
RUNNER = HERE.parent / "benchmarks" / "formats" / "run.py"

# The widths of a figure, its names and its longest bar, and the height of a line.
WIDTH, LABEL, BAR, ROW = 500, 168, 205, 26


def bars(rows: Sequence[tuple[str, float | None, str]], caption: str) -> str:
    """Draw a bar for each (name, value, words); ours are colored, and None means that it failed."""
    most = max(value for _, value, _ in rows if value is not None)
    drawing = Drawing(WIDTH, ROW * len(rows) + 4, caption)
    for row, (name, value, words) in enumerate(rows):
        y = ROW * row
        drawing.text(LABEL - 10, y + 17, name, "end")
        length = 0 if value is None else max(2.0, BAR * value / most)
        if length:
            kind = "ours" if name.startswith("cseq") else "theirs"
            drawing.rect(LABEL, y + 5, length, 16, kind)
        drawing.text(LABEL + length + 8, y + 17, words, "faint")
    return figure(drawing.inline(), caption)


def figure(svg: str, caption: str, kind: str = "") -> str:
    """Put a drawing and what it shows into the page; a 'wide' one has more room."""
    shown = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="cseq-figure {kind}">{svg}{shown}</figure>'


def median(way: dict[str, Any] | None, what: str) -> float | None:
    """Return the median of the rounds, or None if all failed."""
    values = [one[what] for one in (way or {}).get("rounds", [])]
    return statistics.median(values) if values else None


@functools.cache
def runner() -> Any:
    """Import the program that made the results: its table, and what it compares with what."""
    spec = importlib.util.spec_from_file_location("formats_run", RUNNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results() -> dict[str, Any]:
    """Read the committed results of `make check-formats`."""
    return json.loads(FORMATS.read_text(encoding="utf-8"))


def rounds_of(report: dict[str, Any]) -> str:
    """Say of how many rounds the figures are."""
    return "one round" if report["rounds"] == 1 else f"medians of {report['rounds']} rounds"


def formats() -> tuple[dict[str, dict[str, Any]], str]:
    """Return the committed results: name → ways, and when and where they were made."""
    report = results()
    about = report["machine"]
    where = f"{about['cpu']}, {about['cores']} cores, {about['date'][:10]}, {rounds_of(report)}"
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
    "DataLoader forkserver": "torch's, fork server",
    "cseq.DataLoader forkserver": "cseq's, fork server",
}
# The forked loader if it was measured, else the other one.
TORCH = ("DataLoader", "DataLoader forkserver")


def base_of(ways: dict[str, Any], what: str, first: Sequence[str] = ()) -> float | None:
    """Return the figure of torch's DataLoader: of those in `first`, or of one that there is."""
    figures = (median(ways.get(name), what) for name in (*first, *TORCH))
    return next((figure for figure in figures if figure), None)


def short(title: str) -> str:
    """Shorten a format's title to its first words."""
    title = title.rstrip(".").partition(". ")[2].split(":")[0].split(",")[0]
    return title.replace("`", "").split(" (")[0]


def of_format(name: str) -> str:
    """Draw the rates of a data format: each way that was measured."""
    found, where = formats()
    ways = {way: one for way, one in found[name].items() if way != "title"}
    base = base_of(ways, "samples_per_s")
    rows: list[tuple[str, float | None, str]] = []
    for way, one in ways.items():
        rate = median(one, "samples_per_s")
        if rate is None:
            if one["errors"]:
                rows.append((NAMES.get(way, way), None, "failed"))
            continue
        times = f" · {rate / base:.3g} ×" if base and way not in TORCH else ""
        rows.append((NAMES.get(way, way), rate, number(rate) + times))
    caption = "Samples per second with two workers, and the speed-up over torch's DataLoader"
    return bars(rows, f"{caption}. {where}.")


def rates_of_threads() -> tuple[list[tuple[str, float | None]], str]:
    """Return, for each format, the rate from threads over that from processes; when and where."""
    found, where = formats()
    rows = []
    for one in found.values():
        processes = median(one.get("cseq"), "samples_per_s")
        threads = median(one.get("cseq threads"), "samples_per_s")
        ratio = threads / processes if threads and processes else None
        rows.append((short(one["title"]), ratio))
    return rows, where


def of_processes_and_threads() -> str:
    """Draw, for each format, the rate from threads over that from processes, in logarithms."""
    rows, where = rates_of_threads()
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
        drawing.rect(min(middle, end), y + 5, length, 16, "ours" if ratio > 1 else "other")
        words = f"{max(ratio, 1 / ratio):.2g} ×"
        if ratio > 1:
            drawing.text(end + 6, y + 17, words, "faint")
        else:
            drawing.text(end - 6, y + 17, words, "faint end")
    return figure(drawing.inline(), caption, "wide")


# -- the table of the formats, and the sentences about it


def table_of_formats() -> str:
    """Write the table of all formats and ways, below when and where it was measured."""
    program, report = runner(), results()
    about = report["machine"]
    libraries = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    made = f"Measured on {about['date']}, {rounds_of(report)} of each way: {about['cpu']}, "
    made += f"{about['cores']} cores, {about['memory_gib']} GiB; {libraries}."
    lines = [
        made,
        "",
        program.row(["format", "way", *program.FIGURES.values()]),
        program.row(["---", "---", *["---:"] * len(program.FIGURES)]),
    ]
    for one in report["formats"]:
        lines += program.lines_of(one)
    failed = [f"- {line}" for line in program.failures(report)]
    return "\n".join([*lines, "", *(["What failed:", "", *failed] if failed else [])])


def ratios(way: str, what: str, like: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Return the ratio of a way's figure and torch's like DataLoader's, for each format with both.

    `like`: the DataLoaders to compare with, the first that there is; as in the table if not given.
    """
    found, _ = formats()
    rows = []
    for one in found.values():
        ours = median(one.get(way), what)
        theirs = [median(one.get(name), what) for name in like or runner().LIKE[way]]
        base = next((value for value in theirs if value), None)
        if ours and base:
            rows.append((short(one["title"]), ours / base))
    return rows


def between(rows: Sequence[tuple[str, float]]) -> str:
    """Say from what to what."""
    values = [ratio for _, ratio in rows]
    least, most = (factor(value) for value in (min(values), max(values)))
    return f"{least} to {most}" if len(rows) > 1 else least


def factor(ratio: float) -> str:
    """Write a ratio with as many digits as its size allows."""
    if ratio >= 10:
        return f"{ratio:.0f}"
    return f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"


def words_of_cpu() -> str:
    """Say how much less CPU time a sample takes with cseq."""
    found, _ = formats()
    rows = []
    for one in found.values():
        ours = median(one.get("cseq"), "cpu_us")
        theirs = base_of(one, "cpu_us", runner().LIKE["cseq"])
        if ours and theirs:
            rows.append((theirs / ours, short(one["title"])))
    less = [ratio for ratio, _ in rows if ratio > 1]
    where = "each format" if len(less) == len(rows) else f"{len(less)} of {len(rows)} formats"
    (least, first), (most, last) = min(rows), max(rows)
    return (
        "**CPU time.** In this run cseq's processes took less CPU per sample than the "
        f"DataLoader's in {where}: the DataLoader took {least:.1f} times as much ({first}) to "
        f"{factor(most)} times as much ({last})."
    )


STARTS = {
    "cseq": "The fork server (*cseq* against *DataLoader forkserver*{}) starts",
    "cseq fork": '`start_method="fork"` (*cseq fork* against the like DataLoader{}) starts',
    "cseq threads": "Threads (*cseq threads* against the like DataLoader{}) start",
}


def words_of_start() -> str:
    """Say, for each way, what its start and memory are beside the like DataLoader's."""
    lines = []
    for way, words in STARTS.items():
        starts, memory = ratios(way, "first_ms"), ratios(way, "memory_mb")
        if not starts:
            continue
        count = f", {len(starts)} formats" if len(starts) < len(results()["formats"]) else ""
        above = [f"{title} {ratio:.2f}" for title, ratio in memory if ratio >= 1.005]
        lines.append(
            f"- {words.format(count)} in {between(starts)} times the time, with "
            f"{between(memory)} times the memory."
            + (f" Above 1: {', '.join(above)}." * bool(above))
        )
    forked = ratios("cseq", "first_ms", TORCH[:1])
    if forked:
        lines.append(
            f"- cseq's *fork server* takes {between(forked)} times as long to start as a *forked* "
            "DataLoader, since the one imports and the other does not; "
            '`start_method="fork"` and `MTSequence` avoid the import.'
        )
    return "\n".join(lines)


# Why a way of a format has failed, with its last words, where that is understood.
KNOWN = {
    ("arrow_text", "AttributeError: type object 'tqdm' has no attribute '_lock'"): (
        "Two threads loaded the data set at the same time; in today's cseq, threads make their "
        "indexers in turn."
    )
}


def words_of_threads() -> str:
    """Say where processes had the higher rate, and which formats have no bar."""
    rows, _ = rates_of_threads()
    both = [(title, ratio) for title, ratio in rows if ratio]
    faster = [title for title, ratio in both if ratio > 1]
    said = "each" if not faster else f"{len(both) - len(faster)}"
    text = (
        f"In this run, processes had the higher rate with {said} of the {len(both)} kinds of data"
    )
    text += f"; threads with: {', '.join(faster)}." if faster else "."
    found, _ = formats()
    for line in runner().failures(results()):
        name, _, why = line.partition(", cseq threads: ")
        if why and not found[name]["cseq threads"]["rounds"]:
            last = why.partition(" rounds: ")[2]
            text += f" {short(found[name]['title'])} has no bar: threads ended with `{last}`."
            text += f" {KNOWN[name, last]}" if (name, last) in KNOWN else ""
    return text


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


class Text(SphinxDirective):
    """`{formats-table}`, `{formats-cpu}`, `{formats-start}`, `{threads-words}`."""

    write: ClassVar[Callable[[], str]]

    def run(self) -> list[nodes.Node]:
        """Parse what is written, as Markdown."""
        for path in (FORMATS, RUNNER):
            self.env.note_dependency(str(path))
        return self.parse_text_to_nodes(type(self).write())


class SlowLoop(SphinxDirective):
    """`{slow-loop} one_worker`: a script of examples/slow, and what docs/slow_loops.py saw."""

    required_arguments = 1
    MARKDOWN = """
````{{dropdown}} {0}.py
```{{literalinclude}} ../../examples/slow/{0}.py
:language: python
```
````

```{{literalinclude}} ../drawings/slow/{0}.txt
:language: text
```

::::{{grid}} 1 2 2 2
:::{{grid-item}}
Before

```{{image}} ../drawings/slow/{0}-before.svg
:alt: The share of waiting over time, before the remedy.
```
:::
:::{{grid-item}}
After

```{{image}} ../drawings/slow/{0}-after.svg
:alt: The share of waiting over time, after the remedy.
```
:::
::::
"""

    def run(self) -> list[nodes.Node]:
        """Parse it, as Markdown."""
        return self.parse_text_to_nodes(self.MARKDOWN.format(*self.arguments))


def setup(app: Sphinx) -> None:
    """Name the directives."""
    from order_figures import of_order

    app.add_directive("slow-loop", SlowLoop)
    for name, draw in {
        "format-figure": of_format,
        "threads-figure": of_processes_and_threads,
        "drawing": by_hand,
        "order-figure": of_order,
    }.items():
        app.add_directive(name, type(name, (Figure,), {"draw": staticmethod(draw)}))
    for name, write in {
        "formats-table": table_of_formats,
        "formats-cpu": words_of_cpu,
        "formats-start": words_of_start,
        "threads-words": words_of_threads,
    }.items():
        app.add_directive(name, type(name, (Text,), {"write": staticmethod(write)}))
