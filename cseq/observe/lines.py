"""What `python -m cseq top` shows, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cseq._core import now_ns
from cseq.observe.attached import quantiles, stacks
from cseq.observe.processes import resident

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cseq.observe.attached import Watched, Watcher

__all__ = [
    "HEADS",
    "bar",
    "cells",
    "detail",
    "foot",
    "head",
    "overview",
    "ranks",
    "spark",
    "worker_stacks",
    "workers",
]

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"


def bar(share: float, width: int) -> str:
    """Draw a part of a whole."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def spark(values: Sequence[float], width: int, most: float = 0.0) -> str:
    """Draw the last values, against `most` or the largest of them."""
    shown = values[-width:]
    top = most or max(shown, default=0.0) or 1.0
    return "".join(LEVELS[min(int(each / top * 8), 7) if each > 0 else 0] for each in shown)


def ranks(runs: Sequence[Watched], width: int) -> list[str]:
    """Write a line for each run, the one whose loop waits most first."""
    heads = f"{'rank':>4} {'pid':>8}  {'workers':<12} {'epoch':>5} {'batch':>16}"
    lines = [f"{heads} {'batch/s':>8} {'waits':>5}  cause"]
    for each in sorted(runs, key=lambda run: (bool(run.ended), -run.recent()[1])):
        rate, waits = each.recent()
        numbers = each.run.numbers
        epoch, batch = _place(each)
        cause = each.ended or (each.advice().cause if each.stats is not None else "")
        line = f"{numbers['rank']:>4} {each.run.pid:>8}  {_kind(each):<12} {epoch:>5} {batch:>16}"
        lines.append(f"{line} {rate:>8,.1f} {waits:>5.0%}  {cause}"[:width])
    return lines


def _kind(watched: Watched) -> str:
    numbers = watched.run.numbers
    kind = "thread" if numbers["threads"] else "process"
    plural = {1: kind}.get(watched.run.workers, f"{kind}s" if kind == "thread" else "processes")
    return f"{watched.run.workers} {plural}"


def _place(watched: Watched) -> tuple[str, str]:
    """Return the epoch, and the batch with the number of all."""
    if watched.place is None:
        return "–", "–"
    epoch, batch = watched.place
    if watched.run.numbers["streams"]:
        return str(epoch), "–"
    length = watched.run.facts.get("length", "")
    return str(epoch), f"{batch:,} of {int(length):,}" if length.isdecimal() else f"{batch:,}"


def head(watched: Watched, width: int) -> list[str]:
    """Write what a run is, where it is, and its rates."""
    told, stats = watched.run.facts, watched.stats
    what = f"{_kind(watched)}"
    if told.get("dset_size", "").isdecimal():
        what += f", {int(told['dset_size']):,} samples in batches of {told['batch_size']}"
        what += f", seed {told['seed']}"
    lines = [f" {watched.title}  {what}"[:width]]
    if stats is None or not stats.meters or not stats.meters.begun:
        return [*lines, f" {watched.ended or 'no batch so far: workers start'}"[:width]]
    rate, waits = watched.recent()
    epoch, batch = _place(watched)
    at = f" epoch {epoch}  batch {batch}"
    if watched.place is not None and told.get("length", "0").isdecimal() and width >= 100:
        at += f"  {bar(watched.place[1] / max(int(told.get('length', 1)), 1), 20)}"
    step = watched.window().step_seconds.mean
    lines.append(
        f"{at}  {rate:,.1f} batches/s  the loop waits {waits:.0%}  step {_time(step)}"[:width]
    )
    count = max(10, (width - 24) // 2)
    history = [watched.recent(back) for back in range(min(len(watched.points), count))][::-1]
    rates, shares = [each[0] for each in history], [each[1] for each in history]
    lines.append(f" batches/s {spark(rates, count)}  waits {spark(shares, count, 1.0)}"[:width])
    posted, middle, ready = stats.depths
    middle_said = f"  to convert {middle}" if stats.num_converters else ""
    of = f" of {stats.buffer}" if stats.buffer else ""
    lines.append(
        f" to make {posted}{middle_said}  ready {ready}{of}  {stats.nbytes / 1e6:,.0f} MB so far"
        f"  first batch after {_time(stats.start_waited)}"[:width]
    )
    if watched.ended:
        lines.append(f" {watched.ended}")
    return lines


HEADS = ("worker", "pid", "state", "batch", "since", "busy", "cpu", "p50", "p99", "memory")


def workers(watched: Watched, width: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each worker's line, as `HEADS` names them."""
    stats = watched.stats
    if stats is None or stats.meters is None:
        return
    window = watched.window()
    assert window.meters is not None
    count, elapsed = stats.num_workers, max(window.elapsed, 1e-9)
    records = window.meters.runners[:count]
    p50, p99 = (quantiles(records["work"]["bucket"], p) for p in (0.5, 0.99))
    busy = np.clip(window.meters.busy[:count] / elapsed, 0.0, 1.0)
    now, room = now_ns(), 8 if width >= 95 else 4
    for number, record in enumerate(stats.meters.runners[:count]):
        task, pid = watched.tasks.get(number), int(record["thread"])
        state = ("work" if pid else "start") if task is None else task.stage.removesuffix("ing")
        state = "idle" if task is None and pid else state
        batch = "" if task is None else f"{task.epoch}/{task.batch}"
        since = "" if task is None or not task.since else _time(max(now - task.since, 0) / 1e9)
        worked = float(busy[number]) * elapsed
        cpu = f"{float(records['cpu'][number]) / 1e9 / worked:.2f}" if worked > 0 else ""
        of_process = pid and not watched.run.numbers["threads"]
        memory = f"{resident(pid) / 1e6:,.0f} MB" if of_process else ""
        yield (
            str(number), str(pid or ""), state, batch, since,
            f"{busy[number]:>4.0%} {bar(float(busy[number]), room)}",
            cpu, _time(float(p50[number])), _time(float(p99[number])), memory,
        )  # fmt: skip


WIDTHS = (6, 9, 7, 10, 7, 0, 5, 7, 7, 8)  # 0: what is left of it


def cells(row: Sequence[str], width: int) -> str:
    """Write a worker's line."""
    rest = 15 if width >= 95 else 11
    shown = (
        f"{cell:>{each}}" if each else f"  {cell:<{rest - 2}}"
        for cell, each in zip(row, WIDTHS, strict=True)
    )
    return "".join(shown).rstrip()[:width]


def foot(watched: Watched) -> list[str]:
    """Write the slowest batches and the advice."""
    if watched.stats is None or not watched.stats.batches:
        return []
    slowest = watched.window().slowest[:3]
    said = "   ".join(f"{slow.epoch}/{slow.batch}  {_time(slow.seconds)}" for slow in slowest)
    return [*([f" slowest: {said}"] if said else []), f" {watched.advice()}"]


def detail(watched: Watched, width: int, most: int = 64) -> list[str]:
    """Write all about a run."""
    lines = [*head(watched, width), cells(HEADS, width)]
    rows = list(workers(watched, width))
    lines += [cells(row, width) for row in rows[:most]]
    if len(rows) > most:
        lines.append(f" and {len(rows) - most} more")
    return [*lines, *foot(watched)]


def _time(seconds: float) -> str:
    """Write a duration with two digits or three."""
    for scale, unit in ((60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.995 * scale:
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.2g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def worker_stacks(runs: Sequence[Watched]) -> Iterator[str]:
    """Yield the stacks of all worker processes."""
    for each in runs:
        if each.run.numbers["threads"]:
            yield (
                f"{each.title}: its workers are threads; py-spy dump --pid {each.run.pid} shows "
                "their stacks\n"
            )
        elif each.stats is not None and each.stats.meters is not None:
            for number, record in enumerate(each.stats.meters.runners):
                pid = int(record["thread"])
                text = stacks(pid) if pid else ""
                yield f"{each.title}, worker {number}, pid {pid or 'not known'}:\n"
                yield text or "(no stacks: it has not begun, or it has ended)\n"


def overview(watcher: Watcher, width: int) -> list[str]:
    """Write all runs, and all about the one that waits most."""
    runs = watcher.runs
    if not runs:
        said = [f"no run of cseq's was found: {problem}" for problem in watcher.problems]
        return said or ["no run of cseq's was found among the processes that you may read"]
    first = max(runs, key=lambda each: (not each.ended, each.recent()[1]))
    return [*(ranks(runs, width) if len(runs) > 1 else []), *detail(first, width)]
