"""What `cseq top` shows, as lines of text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cseq._core import now_ns
from cseq.meters import quantiles
from cseq.observe.attached import stacks
from cseq.observe.figures import duration
from cseq.observe.processes import resident

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cseq.observe.attached import Watched, Watcher

__all__ = ["bar", "foot", "head", "overview", "ranks", "worker_stacks", "workers"]

EIGHTHS = " ▏▎▍▌▋▊▉█"


class Column(NamedTuple):
    """A column of a table. Where there is no room for all, those with the lowest `order` stay."""

    name: str
    width: int
    order: int
    align: str = ">"


RANKS = (
    Column("rank", 4, 0), Column("pid", 7, 4), Column("script", 16, 8, "<"),
    Column("data", 14, 9, "<"), Column("workers", 12, 7, "<"), Column("epoch", 5, 5),
    Column("batch", 16, 6), Column("batch/s", 7, 3), Column("waits", 5, 1),
    Column("cause", 10, 2, "<"),
)  # fmt: skip
WORKERS = (
    Column("worker", 6, 0), Column("pid", 7, 7), Column("state", 7, 2, "<"),
    Column("batch", 10, 3), Column("since", 7, 4), Column("busy", 4, 1), Column("", 10, 9, "<"),
    Column("cpu", 4, 8), Column("p50", 7, 6), Column("p99", 7, 5), Column("memory", 8, 10),
)  # fmt: skip


def bar(share: float, width: int) -> str:
    """Draw a part of a whole."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def _table(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """Write the names and the cells of the columns that there is room for."""
    shown: set[Column] = set()
    for each in sorted(columns, key=lambda column: column.order):
        if sum(column.width + 1 for column in {*shown, each}) <= width:
            shown.add(each)
    return [
        "".join(
            f" {cell:{each.align}{each.width}}"
            for cell, each in zip(row, columns, strict=True)
            if each in shown
        ).rstrip()[:width]
        for row in ([each.name for each in columns], *rows)
    ]


def _filled(said: Iterable[str], width: int) -> list[str]:
    """Write what is said side by side, on as many lines as it takes."""
    lines = [""]
    for each in said:
        if lines[-1] and len(lines[-1]) + 2 + len(each) > width:
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ' '}{each}"
    return [line[:width] for line in lines]


def ranks(watcher: Watcher, width: int) -> list[str]:
    """Write a line for each run, the one whose loop waits most first; > marks the one shown."""
    runs = sorted(watcher.runs, key=lambda run: (bool(run.ended), -run.recent()[1]))
    rows = []
    for each in runs:
        rate, waits = each.recent()
        cause = each.ended or (each.advice().cause if each.stats is not None else "")
        rows.append((
            watcher.label(each), str(each.run.pid), each.script[:16], _data(each), _kind(each),
            *_place(each), f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}", f"{waits:.0%}", cause,
        ))  # fmt: skip
    names, *lines = _table(RANKS, rows, width)
    marks = [">" if each is watcher.shown else " " for each in runs]
    return [names, *(mark + line[1:] for mark, line in zip(marks, lines, strict=True))]


def _data(watched: Watched) -> str:
    """Return samples and batch size, by which the managers of a program are told apart."""
    run = watched.run
    return f"{run.fact('dset_size'):,} / {run.fact('batch_size'):,}" if run.length else ""


def _kind(watched: Watched) -> str:
    count, threads = watched.run.workers, watched.run.threads
    if count == 1:
        return "1 thread" if threads else "1 process"
    return f"{count} {'threads' if threads else 'processes'}"


def _place(watched: Watched) -> tuple[str, str]:
    """Return the epoch, and the batch with the number of all; of streams, how many there were."""
    if watched.place is None or watched.stats is None:
        return "–", "–"
    epoch, batch = watched.place
    if watched.run.length:
        return str(epoch), f"{batch:,} of {watched.run.length:,}"
    return str(epoch), f"{watched.stats.batches:,}"


def head(watched: Watched, width: int) -> list[str]:
    """Write what a run is, where it is, and its rates."""
    run, stats = watched.run, watched.stats
    said = [*watched.title, _kind(watched)]
    if run.length:
        said += [f"{run.fact('dset_size'):,} samples in batches of {run.fact('batch_size'):,}"]
        said += [f"seed {run.fact('seed')}"]
    lines = _filled(said, width)
    if stats is None or not stats.meters or not stats.meters.begun:
        return lines + _filled([watched.ended or "no batch so far: workers start"], width)
    (rate, waits), window, (epoch, batch) = watched.recent(), watched.window(), _place(watched)
    said = [f"epoch {epoch}"]
    if run.length and watched.place is not None:
        said += [f"batch {batch}", bar(watched.place[1] / run.length, 20).replace(" ", "░")]
    said += [f"{rate:,.1f} batches/s"]
    if window.nbytes and window.elapsed:
        said += [f"{window.nbytes / 1e6 / window.elapsed:,.1f} MB/s"]
    said += [f"the loop waits {waits:.0%}", f"step {duration(window.step_seconds.mean)}"]
    lines += _filled(said, width)
    posted, middle, ready = stats.depths
    said = [f"to make {posted}", *([f"to convert {middle}"] if stats.num_converters else [])]
    said += [f"ready {ready} of {stats.buffer}" if stats.buffer else f"ready {ready}"]
    said += [f"{stats.batches:,} batches so far"]
    if stats.start_waited:
        said += [f"first after {duration(stats.start_waited)}"]
    return lines + _filled([*said, *filter(None, [watched.ended])], width)


def workers(watched: Watched, width: int) -> list[str]:
    """Write a line for each worker."""
    stats = watched.stats
    if stats is None or stats.meters is None:
        return []
    window = watched.window()
    assert window.meters is not None
    count, elapsed = stats.num_workers, max(window.elapsed, 1e-9)
    records = window.meters.runners[:count]
    p50, p99 = (quantiles(records["work"]["bucket"], p) for p in (0.5, 0.99))
    busy = np.clip(window.meters.busy[:count] / elapsed, 0.0, 1.0)
    now, rows = now_ns(), []
    for number in range(count):
        task, thread = watched.tasks.get(number), int(records["thread"][number])
        pid = watched.run.process(thread)
        state = ("idle" if thread else "start") if task is None else task.stage.removesuffix("ing")
        rows.append((
            str(number),
            str(pid or thread or ""),
            state,
            "" if task is None else f"{task.epoch}/{task.batch}",
            "" if task is None or not task.since else duration(max(now - task.since, 0) / 1e9),
            f"{busy[number]:.0%}",
            bar(float(busy[number]), 10),
            f"{float(records['cpu'][number]) / 1e9 / elapsed:.2f}",
            duration(float(p50[number])),
            duration(float(p99[number])),
            f"{memory / 1e6:,.0f} MB" if pid and (memory := resident(pid)) else "",
        ))  # fmt: skip
    return _table(WORKERS, rows, width)


def foot(watched: Watched, width: int) -> list[str]:
    """Write the slowest batches and the advice."""
    if watched.stats is None or not watched.stats.batches:
        return []
    slow = [
        f"{each.epoch}/{each.batch} {duration(each.seconds)}" for each in watched.window().slowest
    ]
    said = textwrap.wrap(str(watched.advice()), width - 1)
    return [*(_filled(["slowest:", *slow[:3]], width) if slow else []), *(f" {a}" for a in said)]


def worker_stacks(runs: Sequence[Watched]) -> Iterator[str]:
    """Yield the stacks of all worker processes."""
    for each in runs:
        title = "  ".join(each.title)
        if each.run.threads:
            yield (
                f"{title}: its workers are threads; py-spy dump --pid {each.run.pid} shows "
                "their stacks\n"
            )
        elif each.stats is not None and each.stats.meters is not None:
            pids = [each.run.process(int(one)) for one in each.stats.meters.runners["thread"]]
            for number, (pid, text) in enumerate(zip(pids, stacks(pids), strict=True)):
                yield f"{title}, worker {number}, pid {pid or 'not known'}:\n"
                yield text or "(no stacks: it has not begun, or it has ended)\n"


def overview(watcher: Watcher, width: int, height: int = 0) -> list[str]:
    """Write a line for each run, if there are several, and all about one, with so many lines."""
    shown = watcher.shown
    if shown is None:
        why = watcher.problems or ["there is none among the processes that you may read"]
        return textwrap.wrap(f"no run of cseq's was found: {'; '.join(why)}", width)
    several = [*ranks(watcher, width), ""] if len(watcher.runs) > 1 else []
    top, rows, end = head(shown, width), workers(shown, width), foot(shown, width)
    room = max(height - len(several) - len(top) - len(end) - 2, 3) if height else len(rows)
    more = [f" and {len(rows) - room} more"] if len(rows) > room else []
    return [*several, *top, *rows[:room], *more, *end]
