"""A run on one page of HTML: why its loop waits, what would help, and all figures.

No script, nothing from a network; light, dark and on paper::

    Part (stats, facts, slowest batches) ──► section: verdict, tiles, figures ──► page
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import sys
import threading
import time
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.check import count as checked
from cseq.observe import doctor
from cseq.observe.figures import FONT, Chart, duration, number, style
from cseq.pools.base import BatchPool
from cseq.remake import locate
from cseq.run import on_close, present
from cseq.tracing import full, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cseq.advice import Advice, Window
    from cseq.remake import Remade
    from cseq.run import Run
    from cseq.sequence import MSequence
    from cseq.stats import SlowBatch, Stats

__all__ = ["Part", "Recorder", "in_notebook", "of_loader", "of_manager", "page", "write"]

WIDTH, HEIGHT = 540, 240  # of a figure
INTERVALS = 120  # in which a run is drawn over time
LEAST_POINTS = 4  # of a history, for figures over time
PAUSE = 0.02  # part of an interval; if epochs take less of it, it is a pause
SORTED_FROM, MOST_ROWS = 16, 64  # workers in a heat map
SHOWN_ROWS = 32  # of more than that, those that differ most
SLOWEST = 8  # batches in the table
INDICES = 6  # samples that a batch of it begins with
GOOD = ("loop", "none")
NAMES = {"thread": "MTSequence"}
FULL = ("cores", "gil")  # causes with which there is no room for more workers
LITTLE = 0.2  # part of the time that a loop may wait without a red edge

RULES = (
    "{0}{{color:var(--ink);background:var(--paper);font:16px/1.5 {1};padding:1.2em;"
    "box-sizing:border-box;overflow-wrap:anywhere}}"
    "{0} h1{{font-size:1.3em;margin:0}}{0} h2{{font-size:1.15em;margin:2em 0 .5em}}"
    "{0} h3{{font-size:1em;margin:0 0 .2em}}{0} p{{margin:.3em 0}}"
    "{0} .about{{color:var(--faint);font-size:.85em}}"
    "{0} .verdict{{border-left:6px solid var(--edge);padding:.3em 0 .3em 1em;margin:1em 0}}"
    "{0} .verdict b{{font-size:1.6em;line-height:1.25;display:block}}"
    "{0} .grid{{display:grid;gap:1.6em 2em;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,28em),1fr))}}"
    "{0} .tiles{{display:grid;gap:.6em;margin:1em 0;"
    "grid-template-columns:repeat(auto-fit,minmax(min(47%,10em),1fr))}}"
    "{0} .tiles div{{border:1px solid var(--line);border-radius:6px;padding:.5em .8em}}"
    "{0} .tiles b{{font-size:1.2em;display:block}}"
    "{0} figure{{margin:0;break-inside:avoid}}{0} svg{{width:100%;height:auto;display:block}}"
    "{0} table{{border-collapse:collapse;width:auto;font-size:.9em}}"
    "{0} th{{text-align:left;font-weight:600}}"
    "{0} th,{0} td{{padding:.25em 1.2em .25em 0;vertical-align:top;background:none;color:inherit;"
    "border-bottom:1px solid var(--line)}}"
    "{0} th{{overflow-wrap:normal}}{0} .n{{text-align:right}}"
    "{0} td.n,{0} code{{white-space:nowrap}}"
    "@media(max-width:600px){{{0} table{{font-size:.8em}}{0} th,{0} td{{padding-right:.8em}}}}"
    "@media print{{{0}{{font-size:11px}}}}"
    "{0} code{{font:.95em ui-monospace,Menlo,Consolas,monospace;color:inherit;background:none}}"
    "{0} .scroll{{overflow-x:auto}}{0} summary{{cursor:pointer;margin:.4em 0}}"
    "{0} .good{{--edge:var(--first)}}{0} .fair{{--edge:var(--warm)}}{0} .poor{{--edge:var(--bad)}}"
    "{0} .open{{--edge:var(--other)}}"
)


class Part(NamedTuple):
    """What the page shows of one manager, loader or stream.

    Attributes
    ----------
    name : str
    facts : str
        A line about it.
    stats : Stats
    slowest : sequence of (SlowBatch, str)
        With what is known of each: its first samples, the line that makes it again, as HTML.
    history : numpy.ndarray
        Of the whole run: see `Stats.history`.
    """

    name: str
    facts: str
    stats: Stats
    slowest: Sequence[tuple[SlowBatch, str]]
    history: NDArray[Any]


def write(path: str | os.PathLike[str], parts: Sequence[Part], title: str | None = None) -> None:
    """Write a page; in one step, so that no half of it is ever there.

    Parameters
    ----------
    path : str or path
    parts : sequence of Part
    title : str, optional
        The script's name, if it is left out.

    Raises
    ------
    TypeError
        `path` is no path, or `title` no text.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"path={path!r} is not a str; give a name such as 'loader.html'")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title={title!r} is not a str; give the page's heading")
    content = page(parts, title)
    with whole(name) as file:
        file.write(content)


def of_manager(manager: MSequence, remake: int = 0) -> Part:
    """Look at a manager; of so many of its slowest batches, time the samples."""
    times, stats = checked("remake", remake, least=0), manager.stats()
    name, *facts = repr(manager).removesuffix(")").split("(", 1)
    slowest = list(_rows(stats, lambda slow: manager.indices(slow.epoch, slow.batch)))
    for k, (slow, about) in enumerate(slowest[:times]):
        made = _again(partial(manager.remake, slow.epoch, slow.batch)) if about else ""
        slowest[k] = slow, f'{about}<div class="about">{escape(made)}</div>'
    return Part(name, "".join(facts), stats, slowest, stats.history)


def _rows(
    stats: Stats, indices: Callable[[SlowBatch], NDArray[np.int64]]
) -> Iterator[tuple[SlowBatch, str]]:
    """Say of the slowest batches of a manager what makes them again, and their first samples."""
    for slow in stats.slowest[:SLOWEST]:
        try:
            samples = indices(slow)
        except IndexError:  # the epoch was resumed elsewhere since, and is numbered otherwise
            yield slow, ""
            continue
        shown = ", ".join(map(str, samples[:INDICES].tolist()))
        more = f" … ({len(samples)})" if len(samples) > INDICES else ""
        again = f"<code>manager.remake({slow.epoch}, {slow.batch})</code>"
        yield slow, f'{again}<div class="about">samples {shown}{more}</div>'


def of_loader(name: str, facts: str, stats: Stats) -> Part:
    """Look at a loader of torch's interface, whose batches nothing makes once more."""
    slowest = [(slow, "") for slow in stats.slowest[:SLOWEST]]
    return Part(name, facts, stats, slowest, stats.history)


def of_run(run: Run[Any]) -> Part:
    """Look at what runs, whatever it belongs to."""
    pool, stats = run.pool, run.pool.stats()
    if not isinstance(pool, BatchPool):
        return of_loader("DataLoader" if run.about else "Streams", run.about, stats)
    sampler, place = pool.sampler, pool.feed.place

    def indices(slow: SlowBatch) -> NDArray[np.int64]:
        consumed = place.consumed if place is not None and place.first == slow.epoch else 0
        return locate(sampler, slow.epoch, slow.batch, consumed)[0].samples(0)[0]

    facts = f"samples={sampler.dset_size:,}, batches={sampler.length:,}, "
    facts += f"batch_size={sampler.batch_size:,}, workers={stats.num_workers}, seed={sampler.seed}"
    name = "RaySequence" if stats.agents else NAMES.get(pool.lanes.kind, "MPSequence")
    return Part(name, facts, stats, list(_rows(stats, indices)), stats.history)


class Recorder:
    """Keeps of each kind of run of this process the longest one, and writes a page at the end.

    Parameters
    ----------
    path : str
        With %p for the process id, %r for the rank.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = full(path), os.getpid()
        os.stat(os.path.join(os.path.dirname(self._path), ""))  # raises where there is no folder
        self._kept: dict[tuple[str, str], tuple[Part, int]] = {}
        self._guard = threading.RLock()  # runs end on any thread, and in signal handlers
        on_close.append(self.note)

    def note(self, run: Run[Any]) -> None:
        """Keep what a run was."""
        if not run.pool.stats().batches:
            return
        part = of_run(run)
        with self._guard:
            longest, count = self._kept.get((part.name, part.facts), (part, 0))
            if part.stats.elapsed > longest.stats.elapsed:
                longest = part
            self._kept[part.name, part.facts] = longest, count + 1

    def end(self) -> None:
        """Write the page; not in a copy of the process."""
        if os.getpid() != self._pid:
            return
        for run in present():
            self.note(run)
        parts = [
            part
            if count == 1
            else part._replace(facts=f"{part.facts}; the longest of {count} runs")
            for part, count in self._kept.values()
        ]
        said = "no report: nothing was made by workers of cseq's"
        if parts:
            write(self._path, parts)
            said = f"the report is {self._path}"
        if sys.stderr is not None:
            print("cseq:", said, file=sys.stderr)  # noqa: T201


def _again(remake: Callable[..., Remade]) -> str:
    """Make a batch again, and say what its samples take, where they can be timed."""
    try:
        made = remake(samples=True)
    except ValueError:  # its samples are not asked for one by one
        made = remake()
    said = f"made again in {duration(made.seconds)}"
    each = made.sample_seconds
    if each is None or not len(each):
        return said
    longest = np.argsort(-each, kind="stable")[:3]
    found = zip(longest, made.indices[longest], strict=True)
    told = ", ".join(f"{index}: {duration(float(each[k]))}" for k, index in found)
    return f"{said}; its slowest samples are {told}; half of all take {duration(np.median(each))}"


# -- the page


def page(parts: Sequence[Part], title: str | None = None) -> str:
    """Return the whole file."""
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    title = title or script or "cseq"
    sections = "".join(section(part) for part in parts)
    now = time.strftime("%Y-%m-%d %H:%M")
    versions = _versions()
    about = " · ".join(filter(None, (script if script != title else "", now, versions)))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>:root{{color-scheme:light dark}}body{{margin:0}}"
        f"{rules('.cseq')}.cseq>*{{max-width:75em;margin-left:auto;margin-right:auto}}</style>"
        f'</head><body class="cseq"><header><h1>{escape(title)}</h1>'
        f'<p class="about">{escape(about)}</p></header>{sections}{_machine()}</body></html>\n'
    )


def rules(scope: str) -> str:
    """Return the style sheet of a part of a page."""
    return style(scope) + RULES.format(scope, FONT)


def section(part: Part) -> str:
    """Show one manager, loader or stream."""
    stats = part.stats
    window = stats.window()
    figures = "".join(
        f"<figure><h3>{escape(heading)}</h3>{chart.inline()}"
        f'<figcaption class="about">{escape(caption)}</figcaption></figure>'
        for heading, chart, caption in drawn(stats, window, part.history)
    )
    return (
        f'<main><h2>{escape(part.name)}</h2><p class="about">{escape(part.facts)}</p>'
        f'{verdict(stats.advice(), window)}{tiles(stats, window)}<div class="grid">{figures}</div>'
        f"{_slowest(part.slowest)}{_details(stats)}</main>"
    )


def in_notebook(stats: Stats, rows: Sequence[tuple[str, str]]) -> str:
    """Return what a notebook shows: the verdict, the tiles, one figure, and rows of facts."""
    if not stats.batches:
        return _table(rows)
    window = stats.window()
    found = drawn(stats, window, stats.history)
    figures = (
        f"<figure><h3>{escape(name)}</h3>{each.inline()}</figure>" for name, each, _ in found
    )
    shown = f"{verdict(stats.advice(), window)}{tiles(stats, window)}{next(figures, '')}"
    return (
        f'<div class="cseq"><style>{rules(".cseq")}.cseq figure{{max-width:40em}}</style>'
        f"{shown}{_table(rows)}</div>"
    )


def verdict(advice: Advice, window: Window) -> str:
    """Write the advice, large."""
    if advice.cause == "unknown":
        kind = "open"
    else:
        kind = "good" if advice.cause in GOOD else "fair" if window.w < LITTLE else "poor"
    action = f"<p><strong>→ {escape(advice.remedy)}</strong></p>" if advice.action else ""
    start = f"<p>Start: {escape(advice.start)}.</p>" if advice.start else ""
    said = advice.sentence[:1].upper() + advice.sentence[1:]
    words = f"waits {window.w:.0%}: {advice.cause}" if window.elapsed else advice.cause
    told = f"<b>{escape(words)}</b><p>{escape(said)}.</p>{action}"
    return f'<div class="verdict {kind}">{told}</div>{start}'


def tiles(stats: Stats, window: Window) -> str:
    """Write the five figures that matter most."""
    rate = stats.batches / stats.elapsed if stats.elapsed else 0.0
    each = stats.samples / stats.batches if stats.batches else 0.0
    samples = f"{number(rate * each)} samples/s" if each > 1 else f"{stats.batches:,} batches"
    lost = f"{stats.restarts} / {stats.copies} / {stats.skips}"
    busy = "busy, the worker" if stats.num_workers == 1 else f"busy, {stats.num_workers} workers"
    shown = (
        (f"{number(rate)} batches/s" if rate else "–", samples),
        (f"{window.w:.0%}", "waiting of the loop"),
        (f"{window.busy:.0%}" if stats.num_workers else "–", busy),
        (duration(stats.start_waited), "until the first batch"),
        (lost, "restarts / copies / skips"),
    )
    found = (f"<div><b>{escape(of)}</b>{escape(what)}</div>" for of, what in shown)
    return f'<div class="tiles">{"".join(found)}</div>'


def _slowest(slowest: Sequence[tuple[SlowBatch, str]]) -> str:
    """Write the table of the slowest batches."""
    if not slowest:
        return ""
    rows = "".join(
        f'<tr><td class="n">{slow.epoch} / {slow.batch}</td><td class="n">{duration(slow.seconds)}'
        f'</td><td class="n">{slow.worker}</td><td>{about}</td></tr>'
        for slow, about in slowest
    )
    heads = "".join(f'<th class="n">{head}</th>' for head in ("epoch / batch", "took", "worker"))
    made = "<th>to make it again</th>" if any(about for _, about in slowest) else "<th></th>"
    return f"<h2>Slowest batches</h2><table><tr>{heads}{made}</tr>{rows}</table>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Write names and values."""
    return (
        "<table>"
        + "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
        + "</table>"
    )


def _details(stats: Stats) -> str:
    """Write all figures, folded."""
    figures = [(name, f"{value:.6g}") for name, value in stats.as_dict("").items()]
    heads = ("worker", "pid", "batches", "busy", "cores", "p50", "p99")
    cells = "".join(f'<th class="n">{head}</th>' for head in heads)
    rows = [f"<tr>{cells}</tr>"]
    for one in stats.workers:
        cpu = "–" if one.cpu is None else f"{one.cpu * one.busy:.2f}"
        shown = (one.number, one.pid or "–", one.batches, f"{one.busy:.0%}", cpu)
        values = (*shown, duration(one.p50), duration(one.p99))
        rows.append("<tr>" + "".join(f'<td class="n">{value}</td>' for value in values) + "</tr>")
    workers = f'<div class="scroll"><table>{"".join(rows)}</table></div>' if rows[1:] else ""
    return f"<details><summary>All figures</summary>{_table(figures)}{workers}</details>"


def _versions() -> str:
    """Say which versions there are, without importing what is not needed."""
    found = [f"Python {sys.version.split()[0]}"]
    for name in ("cseq-loader", "numpy", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def _machine() -> str:
    """Write where it ran, folded: the environment, and what the doctor finds."""
    rank = os.environ.get("RANK")
    rows = [
        ("command", " ".join(sys.argv)),
        ("Python", f"{sys.version.split()[0]}, {sys.executable}"),
        ("system", platform.platform()),
        ("cores", str(doctor.Machine().cores)),
        *([("rank", f"{rank} of {os.environ.get('WORLD_SIZE', '?')}")] if rank else []),
        *((name, value) for name, value in os.environ.items() if name.startswith("CSEQ_")),
    ]
    found = [(each.text, each.remedy) for each in doctor.look(doctor.Machine())]
    return (
        f"<footer><details><summary>Environment</summary>{_table(rows)}</details>"
        f"<details><summary>What the doctor finds</summary>{_table(found)}</details></footer>"
    )


# -- figures

Drawn = tuple[str, Chart, str]  # its heading, itself, what it says


def drawn(stats: Stats, window: Window, history: NDArray[Any]) -> Iterator[Drawn]:
    """Draw all figures that there are measurements for."""
    over = Over.of(history)
    if over is not None:
        yield waiting(over)
    if window.index > 0 and stats.elapsed > 0 and stats.num_workers:
        yield enough(stats, window)
    if stats.index_seconds.count:
        yield batch_times(stats)
    if over is not None:
        yield ready(over, stats.buffer)
        yield rate(over)
        if len(over.busy):
            yield heat(over)


class Over(NamedTuple):
    """A run in intervals of the same length.

    Attributes
    ----------
    edges : numpy.ndarray
        Seconds since the start, one more than intervals.
    waiting, rate : numpy.ndarray
        In each interval: part of the time, NaN in a pause; batches a second.
    ready : numpy.ndarray
        At the edges.
    busy : numpy.ndarray
        Parts of the time: a row for each worker.
    """

    edges: NDArray[np.float64]
    waiting: NDArray[np.float64]
    rate: NDArray[np.float64]
    ready: NDArray[np.float64]
    busy: NDArray[np.float64]

    @classmethod
    def of(cls, history: NDArray[Any]) -> Over | None:
        """Cut a history into intervals; None: it is too short."""
        if len(history) < LEAST_POINTS:
            return None
        at = history["seconds"]
        edges = np.linspace(at[0], at[-1], min(len(at), INTERVALS + 1))
        if edges[-1] <= edges[0]:
            return None

        def grown(values: NDArray[Any]) -> NDArray[np.float64]:
            return np.diff(np.interp(edges, at, values))

        waited, stepped = grown(history["waited"]), grown(history["stepped"])
        took = np.diff(edges)
        there = waited + stepped > PAUSE * took
        share = np.divide(waited, waited + stepped, out=np.full(len(took), np.nan), where=there)
        ran = np.flatnonzero(history["busy"][-1])  # with 'auto' there may be room for more
        workers = history["busy"].T[: ran[-1] + 1 if len(ran) else None]
        busy = [np.clip(grown(each) / took, 0, 1) for each in workers]
        return cls(
            edges,
            share,
            grown(history["batches"]) / took,
            np.interp(edges, at, history["ready"]),
            np.array(busy).reshape(-1, len(took)),
        )

    def chart(self, title: str, most: float, left: float = 56) -> Chart:
        """Make a chart over time."""
        span = (float(self.edges[0]), float(self.edges[-1]))
        return Chart(WIDTH, HEIGHT, title, span, (0, most), left=left, times=True)


def percent(value: float) -> str:
    """Write a part of the time."""
    return f"{value:.0%}"


def waiting(over: Over) -> Drawn:
    """Draw the part of the time that the loop waits."""
    chart = over.chart("Part of the time that the loop waits, over time", 1)
    chart.grid(duration, percent)
    chart.steps(over.edges.tolist(), over.waiting.tolist(), "warm")
    return "Waiting over time", chart, "Part of the time that the loop waits. Gaps are pauses."


def rate(over: Over) -> Drawn:
    """Draw the batches a second."""
    chart = over.chart("Batches a second, over time", float(over.rate.max()) * 1.05 or 1)
    chart.grid(duration)
    chart.steps(over.edges.tolist(), over.rate.tolist(), "second")
    return "Batches a second", chart, "That the loop took."


def ready(over: Over, buffer: int) -> Drawn:
    """Draw how many batches were ready."""
    most = max(float(over.ready.max()) * 1.1, 5.0)
    chart = over.chart("Batches that are ready for the loop, over time", most)
    chart.grid(duration)
    chart.steps(over.edges.tolist(), over.ready[:-1].tolist(), "cold")
    of = f" At most {buffer:,} batches are ahead of the loop (buffer)." if buffer else ""
    return "Batches ready", chart, f"Waiting for the loop: 0 starves it.{of}"


def heat(over: Over) -> Drawn:
    """Draw who worked when."""
    names, rows = np.arange(len(over.busy)), over.busy
    means, about = rows.mean(axis=1), ""
    if len(rows) >= MOST_ROWS:
        differing = np.argsort(-abs(means - np.median(means)), kind="stable")[:SHOWN_ROWS]
        about = f" Of {len(rows)} workers, the {SHOWN_ROWS} that differ most."
        names, rows, means = names[differing], rows[differing], means[differing]
    if len(over.busy) >= SORTED_FROM:
        order = np.argsort(-means, kind="stable")
        names, rows = names[order], rows[order]
        about += " The busiest are on top."
    chart = over.chart("Part of the time that each worker works, over time", 1)
    chart.grid(duration, None)
    chart.heat(rows.tolist(), [str(name) for name in names], "first")
    return (
        "Workers over time",
        chart,
        f"A row for each worker: the stronger the colour, the busier.{about}",
    )


def batch_times(stats: Stats) -> Drawn:
    """Draw what batches take a worker."""
    times = stats.index_seconds
    found = times.buckets()
    low, high = found[0][0], found[-1][1]
    if high < 4 * low:
        low, high = low / 2, high * 2
    most = max(count for _, _, count in found) * 1.25
    title = "What batches take a worker"
    chart = Chart(WIDTH, HEIGHT, title, (low, high), (0, most), logarithmic=True)
    chart.grid(duration)
    bars = (
        (start, end, count, f"{duration(start)} to {duration(end)}: {count:,}")
        for start, end, count in found
    )
    chart.bars(bars, "first")
    half, rare = times.quantile(0.5), times.quantile(0.99)
    chart.marks([(half, f"p50 {duration(half)}"), (rare, f"p99 {duration(rare)}")])
    said = f"{times.count:,} batches; half of them take at most {duration(half)}, 99 in 100 "
    return title, chart, f"{said}{duration(rare)}. From left to right, times are logarithmic."


def enough(stats: Stats, window: Window) -> Drawn:
    """Draw the rate that more or fewer workers would give, from what was measured."""
    now, advice = window.workers, stats.advice()
    wanted = advice.change.get("num_workers")
    if wanted is None and advice.cause in GOOD:
        wanted = min(window.fewest, now)
    most = max(2 * now, math.ceil(1.3 * (wanted or 0)), 4)
    measured = stats.batches / stats.elapsed
    alone = 1 / window.step if window.step > 0 else math.inf
    counts = sorted({*range(most + 1), *np.linspace(0, most, 60).tolist()})
    line = [(n, min(window.rate(n), alone)) for n in counts]
    highest = max(measured, *(value for _, value in line)) * 1.25
    title = "How many workers would be enough"
    chart = Chart(WIDTH, HEIGHT, title, (0, most), (0, highest))
    chart.grid(number)
    chart.line(line, "second")
    at = window.saturating
    if at < most:
        full = "1 core is full" if window.cores == 1 else f"{window.cores} cores are full"
        chart.marks([(at, full)], "faint")
    said = f"A batch takes a worker {duration(window.index)}, the loop {duration(window.step)}. "
    said += "The line: batches a second of workers that never wait."
    if wanted == now:
        chart.dot(now, measured, f"{now} now, enough", "first")
    else:
        chart.dot(now, measured, f"{now} now", "warm")
    if wanted is None:
        if advice.cause in FULL:
            said += " More of them would not help here."
        elif advice.cause != "unknown":
            said += " Something else than their number holds the loop up: see the advice."
    elif wanted != now:
        reached = min(window.rate(wanted), alone)
        word = "enough" if reached > 0.95 * alone else "advised"
        chart.dot(wanted, reached, f"{wanted} {word}", "first")
    return title, chart, said
