"""Writes an HTML page about a run.

The page contains no scripts and loads nothing from the network::

    Part (stats, facts, slowest batches) ──► section: verdict, tiles, figures ──► page
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import sys
import time
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.files import whole
from cseq.measure.stats import WorkerStats
from cseq.report import doctor
from cseq.report.figures import STYLE, Chart, duration, number
from cseq.system import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from cseq.measure.stats import Stats

__all__ = ["Part", "in_notebook", "page", "write"]

# Figures over time have at most `INTERVALS` intervals and at least `LEAST_POINTS` points.
INTERVALS, LEAST_POINTS = 120, 4
# Maximum number of rows in the figure that shows workers over time.
MOST_ROWS = 16
SLOWEST = 8
RANKS = ("RANK", "WORLD_SIZE")

RULES = """
.cseq{color:var(--ink);background:var(--paper);padding:1.2em;overflow-wrap:anywhere;
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.cseq h1,.cseq h2,.cseq h3{font-size:1.1em;margin:1.2em 0 .3em}
.cseq p,.cseq figure{margin:.3em 0}
.cseq .about{color:var(--faint);font-size:.85em}
.cseq .verdict{border-left:6px solid var(--warm);padding:.3em 1em;margin:1em 0}
.cseq .verdict.good{border-color:var(--first)}
.cseq .verdict b{font-size:1.6em}
.cseq .grid{display:grid;gap:1em 2em;
grid-template-columns:repeat(auto-fit,minmax(min(100%,28em),1fr))}
.cseq .tiles{display:grid;gap:.6em;grid-template-columns:repeat(auto-fit,minmax(9em,1fr))}
.cseq .tiles div{border:1px solid var(--line);border-radius:6px;padding:.5em .8em}
.cseq .tiles b{font-size:1.2em;display:block}
.cseq figure{break-inside:avoid}
.cseq svg{width:100%;height:auto;display:block}
.cseq table{border-collapse:collapse;font-size:.9em;width:auto}
.cseq th,.cseq td{padding:.25em .9em .25em 0;text-align:left;vertical-align:top;
background:none;color:inherit;border-bottom:1px solid var(--line)}
.cseq code{color:inherit;background:none}
.cseq .scroll{overflow-x:auto}
@media print{.cseq{font-size:11px}}
"""
SHEET = STYLE + RULES


class Part(NamedTuple):
    """A manager, loader or stream on the page. If `has_remake`, show how to remake batches."""

    name: str
    facts: str
    stats: Stats
    has_remake: bool = False


def write(path: str | os.PathLike[str], parts: Sequence[Part], title: str | None = None) -> None:
    """Write a page atomically.

    The title defaults to the name of the script. Raise TypeError if an argument has the wrong type.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"path={path!r} is not a str; pass a name such as 'loader.html'")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title={title!r} is not a str; pass the page's heading")
    content = page(parts, title)
    with whole(name) as file:
        file.write(content)


def page(parts: Sequence[Part], title: str | None = None) -> str:
    """Return the whole page as HTML."""
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    title = escape(title or script or "cseq")
    sections = "".join(section(part) for part in parts)
    about = f"{script}, {time.strftime('%Y-%m-%d %H:%M')}"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>:root{{color-scheme:light dark}}{SHEET}"
        "body.cseq{max-width:75em;margin:0 auto}</style></head>"
        f'<body class="cseq"><h1>{title}</h1><p class="about">{escape(about)}</p>'
        f"{sections}{_machine()}</body></html>\n"
    )


def section(part: Part) -> str:
    """Return the HTML section for a manager, loader or stream."""
    stats = part.stats
    figures = "".join(
        f"<figure><h3>{heading}</h3>{chart.inline()}"
        f'<figcaption class="about">{caption}</figcaption></figure>'
        for heading, chart, caption in drawn(stats)
    )
    rows = [
        (f"{epoch} / {batch}", duration(seconds), worker)
        + (f"<code>manager.remake({epoch}, {batch})</code>",) * part.has_remake
        for epoch, batch, seconds, worker in stats.slowest[:SLOWEST]
    ]
    slowest = _table(rows, ("slowest: epoch / batch", "took", "worker", ""))
    return (
        f'<h2>{escape(part.name)}</h2><p class="about">{escape(part.facts)}</p>'
        f'{verdict(stats)}{tiles(stats)}<div class="grid">{figures}</div>'
        f"{slowest if rows else ''}{_details(stats)}"
    )


def in_notebook(stats: Stats, rows: Sequence[tuple[str, str]]) -> str:
    """Return HTML for a notebook."""
    facts = _table((escape(name), escape(value)) for name, value in rows)
    if not stats.batches:
        return facts
    figures = (
        f"<figure><h3>{name}</h3>{chart.inline()}</figure>" for name, chart, _ in drawn(stats)
    )
    shown = f"{verdict(stats)}{tiles(stats)}{next(figures, '')}{facts}"
    return f'<div class="cseq"><style>{SHEET}.cseq figure{{max-width:40em}}</style>{shown}</div>'


def verdict(stats: Stats) -> str:
    """Return the advice as HTML, with the cause in large type."""
    advice, waits = stats.advice(), f"waits {stats.loop_waiting:.0%}: " * (stats.elapsed > 0)
    action = f"<p><strong>→ {escape(advice.remedy)}</strong></p>" if advice.action else ""
    start = f"<p>Start: {escape(advice.start)}.</p>" if advice.start else ""
    sentence = advice.sentence[:1].upper() + advice.sentence[1:]
    kind = "good" if advice.cause == "loop" else ""
    words = f"<b>{waits}{advice.cause}</b><p>{escape(sentence)}.</p>{action}"
    return f'<div class="verdict {kind}">{words}</div>{start}'


def tiles(stats: Stats) -> str:
    """Return the key figures as a row of tiles."""
    rates, count = stats.as_dict(""), stats.num_workers
    shown = [
        (number(rates["batches_per_s"]), "batches a second"),
        (f"{stats.loop_waiting:.0%}", "loop waiting"),
        (f"{rates['worker_busy']:.0%}", f"busy, {count} worker{'s' * (count != 1)}"),
        (duration(stats.start_waited), "wait for the first batch"),
        (f"{stats.restarts} / {stats.copies} / {stats.skips}", "restarts / copies / skips"),
    ]
    if asked := stats.cache_hits + stats.cache_misses:
        held = f"samples from caches of {number(stats.cache_nbytes / 1e6)} MB"
        shown.append((f"{stats.cache_hits / asked:.0%}", held))
    return f'<div class="tiles">{"".join(f"<div><b>{a}</b>{b}</div>" for a, b in shown)}</div>'


def _table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    lines = ["".join(f"<th>{head}</th>" for head in heads)] if heads else []
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _details(stats: Stats) -> str:
    workers = [[f"{x:.3g}" if isinstance(x, float) else x for x in row] for row in stats.workers]
    figures = _table((name, f"{value:.6g}") for name, value in stats.as_dict("").items())
    table = _table(workers, WorkerStats._fields)
    return f"<details><summary>All figures</summary>{figures}{table}</details>"


def _machine() -> str:
    rows = [("command", " ".join(sys.argv)), ("system", platform.platform())]
    rows += [("Python", sys.version), ("cores", str(cores()))]
    for name in ("cseq-loader", "numpy", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append((name, importlib.metadata.version(name)))
    rows += [item for item in os.environ.items() if item[0] in RANKS or item[0].startswith("CSEQ_")]
    rows += [("doctor", str(finding)) for finding in doctor.look()]
    table = _table((name, escape(value)) for name, value in rows)
    return f"<details><summary>Environment</summary>{table}</details>"


# -- figures

# A figure's heading, chart and caption.
Drawn = tuple[str, Chart, str]


def drawn(stats: Stats) -> Iterator[Drawn]:
    """Yield each figure that has data."""
    over = Over.of(stats.history)
    if over is not None:
        caption = "The fraction of the time that the loop waits."
        yield over.area("Waiting over time", over.waiting, "warm", caption, is_part=True)
    if stats.index_seconds.count and stats.elapsed > 0 and stats.num_workers:
        yield enough(stats)
    if stats.index_seconds.count:
        yield batch_times(stats)
    if over is not None:
        of = f" At most {stats.buffer:,} batches are ahead of the loop." if stats.buffer else ""
        caption = f"Batches that wait for the loop. If there are none, the loop waits.{of}"
        yield over.area("Batches ready", over.ready[:-1], "cold", caption)
        yield over.area("Batches a second", over.rate, "second", "The rate of the loop.")
        if len(over.busy):
            yield workers(over)


class Over(NamedTuple):
    """The history of a run, divided into intervals of equal length.

    `edges` are in seconds since the start. In each interval, `waiting` and each row of `busy` are
    fractions of the time, and `rate` is in batches per second. `ready` is the number of batches at
    each edge.
    """

    edges: NDArray[np.float64]
    waiting: NDArray[np.float64]
    rate: NDArray[np.float64]
    ready: NDArray[np.float64]
    busy: NDArray[np.float64]

    @classmethod
    def of(cls, history: NDArray[Any]) -> Over | None:
        """Divide a history into intervals. Return None if it is too short."""
        at = history["seconds"]
        if len(history) < LEAST_POINTS or at[-1] <= at[0]:
            return None
        edges = np.linspace(at[0], at[-1], min(len(at), INTERVALS + 1))

        def grown(values: NDArray[Any]) -> NDArray[np.float64]:
            return np.diff(np.interp(edges, at, values))

        took = np.diff(edges)
        # With 'auto', some workers may never have been started.
        ran = np.flatnonzero(history["busy"][-1])
        rows = history["busy"].T[: ran[-1] + 1 if len(ran) else None]
        busy = np.array([np.clip(grown(worked) / took, 0, 1) for worked in rows])
        ready = np.interp(edges, at, history["ready"])
        waited = np.clip(grown(history["waited"]) / took, 0, 1)
        return cls(edges, waited, grown(history["batches"]) / took, ready, busy)

    def chart(self, title: str, most: float, y: Callable[[float], str] | None = number) -> Chart:
        span = (float(self.edges[0]), float(self.edges[-1]))
        chart = Chart(title, span, (0, most), times=True)
        chart.grid(duration, y)
        return chart

    def area(
        self, heading: str, values: NDArray[Any], kind: str, caption: str, *, is_part: bool = False
    ) -> Drawn:
        """Draw a value over time."""
        most = 1.0 if is_part else max(float(values.max()) * 1.1, 1.0)
        chart = self.chart(heading, most, "{:.0%}".format if is_part else number)
        chart.steps(self.edges.tolist(), values.tolist(), kind)
        return heading, chart, caption


def workers(over: Over) -> Drawn:
    """Draw the activity of each worker over time."""
    names, about = np.arange(len(over.busy)), ""
    if len(names) > MOST_ROWS:
        means = over.busy.mean(axis=1)
        names = np.sort(np.argsort(-abs(means - np.median(means)), kind="stable")[:MOST_ROWS])
        about = f" Of {len(over.busy)} workers, these are the {MOST_ROWS} that differ most."
    chart = over.chart("Fraction of the time that each worker is busy", len(names), None)
    every = math.ceil(len(names) / 8)
    for k, name in enumerate(names.tolist()):
        floor = len(names) - 1.0 - k
        chart.steps(over.edges.tolist(), (0.9 * over.busy[name]).tolist(), "first", floor)
        if not k % every:
            chart.text(chart.x.start - 8, chart.y.coordinate(floor), str(name), "faint end")
    caption = f"One row per worker: the higher the area, the busier the worker.{about}"
    return "Workers over time", chart, caption


def batch_times(stats: Stats) -> Drawn:
    """Draw a histogram of the time per batch."""
    times, title = stats.index_seconds, "A worker's time for a batch"
    buckets = times.buckets()
    low, high = buckets[0][0], buckets[-1][1]
    if high < 4 * low:
        low, high = low / 2, high * 2
    most = max(count for _, _, count in buckets) * 1.3
    chart = Chart(title, (low, high), (0, most), logarithmic=True)
    chart.grid(duration)
    chart.bars(buckets, "first")
    half, rare = times.quantile(0.5), times.quantile(0.99)
    chart.marks((half, f"p50 {duration(half)}", "ink"), (rare, f"p99 {duration(rare)}", "ink"))
    return title, chart, f"{times.count:,} batches. The time axis is logarithmic."


def enough(stats: Stats) -> Drawn:
    """Plot the expected rate against the number of workers."""
    window, title = stats.window(), "How many workers would be enough"
    now, wanted = window.workers, stats.advice().change.get("num_workers")
    most = max(2 * now, math.ceil(1.3 * (wanted or 0)), 4)
    measured = stats.batches / stats.elapsed
    alone = 1 / window.step if window.step > 0 else math.inf
    line = [(n, min(window.rate(n), alone)) for n in (*range(most + 1), min(window.room, most))]
    chart = Chart(title, (0, most), (0, 1.5 * max(measured, *(rate for _, rate in line))))
    chart.grid(number)
    chart.line(sorted(line))
    chart.dot(now, measured, "warm")
    marks = [(now, f"{now} now", "ink")]
    if wanted not in (None, now):
        marks.append((wanted, f"{wanted} advised", "ink"))
    if window.room < most:
        marks.append((window.room, f"{window.room} have cores", "faint"))
    chart.marks(*marks)
    caption = (
        f"A worker needs {duration(window.index)} per batch, and the loop {duration(window.step)}. "
        "The line shows the rate with workers that never wait. The dot shows the measured rate."
    )
    return title, chart, caption
