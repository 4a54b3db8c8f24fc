"""Formats the output of `cseq top` as lines of text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from cseq._core import now_ns
from cseq.observe.attached import RECENT
from cseq.observe.processes import resident
from cseq.report.figures import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cseq.measure.stats import Stats
    from cseq.observe.attached import AttachedRun, Watcher

__all__ = ["foot", "head", "overview", "ranks", "workers"]

# Table columns and their names. Narrow terminals cut off the rightmost columns.
RANKS = " {:>4} {:>5} {:<10} {:>7} {:>7} {:>5} {:>16} {:>12} {:<16} {:<14}"
OF_RANKS = "rank", "waits", "cause", "batch/s", "pid", "epoch", "batch", "workers", "script", "data"
WORKERS = " {:>6} {:<5} {:>4} {:>10} {:>7} {:>7} {:>7} {:>4} {:>7} {:>8}"
OF_WORKERS = "worker", "state", "busy", "batch", "since", "p50", "p99", "cpu", "pid", "memory"


def _filled(phrases: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for phrase in phrases:
        if lines[-1] and len(lines[-1]) + 2 + len(phrase) > width:
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ' '}{phrase}"
    return [line[:width] for line in lines]


def ranks(watcher: Watcher, width: int) -> list[str]:
    """Return one line per run, longest wait first. A > marks the run shown in full."""
    lately = {run: run.since(RECENT) for run in watcher.runs}
    runs = sorted(lately, key=lambda run: (bool(run.ended), -lately[run].loop_waiting))
    rows: list[Sequence[str]] = [OF_RANKS]
    for run in runs:
        rate, waits = _rate(lately[run]), lately[run].loop_waiting
        rows.append((
            str(run.fact("rank")), f"{waits:.0%}", run.ended or run.advice().cause,
            f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}", str(run.pid), *_position(run),
            _kind(run), run.script[:16], _data(run),
        ))  # fmt: skip
    names, *lines = (RANKS.format(*row).rstrip()[:width] for row in rows)
    marks = [">" if run is watcher.shown else " " for run in runs]
    return [names, *(mark + line[1:] for mark, line in zip(marks, lines, strict=True))]


def _rate(stats: Stats) -> float:
    return stats.batches / stats.elapsed if stats.elapsed else 0.0


def _data(run: AttachedRun) -> str:
    """Return the number of samples and the batch size."""
    return f"{run.fact('dset_size'):,} / {run.fact('batch_size'):,}" if run.fact("length") else ""


def _kind(run: AttachedRun) -> str:
    count, threads = run.stats.num_workers, run.fact("threads")
    if count == 1:
        return "1 thread" if threads else "1 process"
    return f"{count} {'threads' if threads else 'processes'}"


def _position(run: AttachedRun) -> tuple[str, str]:
    """Return the epoch and the batch ("3 of 10"). For a stream, return the number of batches."""
    if run.next_batch is None:
        return "–", "–"
    epoch, batch = run.next_batch
    if run.fact("length"):
        return str(epoch), f"{batch:,} of {run.fact('length'):,}"
    return str(epoch), f"{run.stats.batches:,}"


def head(run: AttachedRun, width: int) -> list[str]:
    """Return lines with a run's name, position and rates."""
    stats, window, lately = run.stats, run.window(), run.since(RECENT)
    phrases = [*run.title, _kind(run)]
    if run.fact("length"):
        phrases += [f"{run.fact('dset_size'):,} samples in batches of {run.fact('batch_size'):,}"]
        phrases += [f"seed {run.fact('seed')}"]
    lines = _filled(phrases, width)
    if not stats.batches:
        return lines + _filled([run.ended or "no batch so far; the workers are starting"], width)
    epoch, batch = _position(run)
    phrases = [f"epoch {epoch}"]
    if run.fact("length") and run.next_batch is not None:
        phrases += [f"batch {batch}"]
    phrases += [f"{_rate(lately):,.1f} batches/s"]
    if window.nbytes and window.elapsed:
        phrases += [f"{window.nbytes / 1e6 / window.elapsed:,.1f} MB/s"]
    phrases += [f"the loop waits {lately.loop_waiting:.0%}"]
    phrases += [f"step {duration(window.step_seconds.mean)}"]
    lines += _filled(phrases, width)
    posted, middle, ready = stats.depths
    phrases = [f"to make {posted}", *([f"to convert {middle}"] if stats.num_converters else [])]
    phrases += [f"ready {ready} of {stats.buffer}" if stats.buffer else f"ready {ready}"]
    phrases += [f"{stats.batches:,} batches so far"]
    if stats.start_waited:
        phrases += [f"first after {duration(stats.start_waited)}"]
    return lines + _filled([*phrases, *filter(None, [run.ended])], width)


def workers(run: AttachedRun, width: int) -> list[str]:
    """Return one line per worker."""
    now = now_ns()
    rows: list[Sequence[str]] = [OF_WORKERS]
    for worker in run.window().workers[: run.stats.num_workers]:
        epoch, batch, since = run.tasks.get(worker.number, (0, 0, 0))
        memory = resident(run.process(worker.pid)) if run.process(worker.pid) else 0
        rows.append((
            str(worker.number),
            "index" if since else "idle" if worker.pid else "start",
            f"{worker.busy:.0%}",
            f"{epoch}/{batch}" if since else "",
            duration(max(now - since, 0) / 1e9) if since else "",
            duration(worker.p50),
            duration(worker.p99),
            f"{(worker.cpu or 0.0) * worker.busy:.2f}",
            str(worker.pid or ""),
            f"{memory / 1e6:,.0f} MB" if memory else "",
        ))  # fmt: skip
    return [WORKERS.format(*row).rstrip()[:width] for row in rows]


def foot(run: AttachedRun, width: int) -> list[str]:
    """Return lines with the slowest batches and the advice."""
    if not run.stats.batches:
        return []
    slow = [
        f"{batch.epoch}/{batch.batch} {duration(batch.seconds)}" for batch in run.window().slowest
    ]
    advice = textwrap.wrap(str(run.advice()), width - 1)
    return [*(_filled(["slowest:", *slow[:3]], width) if slow else []), *(f" {a}" for a in advice)]


def overview(watcher: Watcher, width: int, height: int = 0) -> list[str]:
    """Return a line per run, then one run in full. Show only workers that fit `height` (0: all)."""
    shown = watcher.shown
    if shown is None:
        why = watcher.problems or ["none of the processes that you can read has one"]
        return textwrap.wrap(f"no run of cseq was found: {'; '.join(why)}", width)
    several = [*ranks(watcher, width), ""] if len(watcher.runs) > 1 else []
    top, rows, end = head(shown, width), workers(shown, width), foot(shown, width)
    room = max(height - len(several) - len(top) - len(end) - 2, 3) if height else len(rows)
    more = [f" and {len(rows) - room} more"] if len(rows) > room else []
    return [*several, *top, *rows[:room], *more, *end]
