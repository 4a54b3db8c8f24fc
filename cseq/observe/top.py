"""``python -m cseq top``: what the loaders of running programs do, live, from outside.

`Watcher` finds the runs and keeps what it has read; `ranks` and `detail` write it as lines, for a
terminal without any library, and for the screen of `screen.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from cseq._core import now_ns
from cseq.advice import advise
from cseq.observe.attached import Attached, UnreadableError, attach, quantiles, stacks
from cseq.observe.processes import resident, tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cseq.advice import Advice
    from cseq.observe.attached import Task
    from cseq.stats import Stats

__all__ = [
    "Watched",
    "Watcher",
    "bar",
    "cells",
    "detail",
    "dump",
    "foot",
    "head",
    "ranks",
    "spark",
    "top",
    "workers",
]

EVERY = 0.25  # seconds between two readings
LOOK = 2.0  # seconds between two searches for runs
RECENT = 2.0  # seconds that the rate and the share of waiting are of
WINDOW = 5.0, 4  # seconds between readings that are kept whole, and how many are
KEPT = 240  # readings whose numbers are kept
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
ENOUGH = 8  # batches, for an advice


@dataclass
class Watched:
    """A run, and what was read of it.

    Attributes
    ----------
    run : Attached
    points : deque
        Of each reading: the time (s), batches, seconds of the epochs, seconds waited.
    whole : deque of Stats
        Older readings, the first of which the window begins with.
    stats : Stats or None
        The latest reading.
    tasks : dict of int to Task
    place : (int, int) or None
    ended : str
        Why nothing more is read.
    """

    run: Attached
    points: deque[tuple[float, int, float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )
    whole: deque[tuple[float, Stats]] = field(default_factory=lambda: deque(maxlen=WINDOW[1]))
    stats: Stats | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    place: tuple[int, int] | None = None
    ended: str = ""

    def update(self, now: float) -> None:
        """Read it; what is left of one that has ended is kept."""
        if self.ended:
            return
        try:
            if not self.run.is_alive:
                self.ended = "its process has ended"
            self.stats, self.tasks, self.place = self.run.read()
            if self.run.is_closed and not self.ended:
                self.ended = "finished"
        except (UnreadableError, OSError, ArithmeticError, ValueError) as error:
            self.ended = f"cannot be read: {error}"
        if self.stats is not None:
            stats = self.stats
            self.points.append((now, stats.batches, stats.elapsed, stats.loop_waited))
            if not self.whole or now - self.whole[-1][0] >= WINDOW[0]:
                self.whole.append((now, stats))
        if self.ended:
            self.run.close()

    def recent(self, back: int = 0) -> tuple[float, float]:
        """Return batches a second and the share of waiting, lately or so many readings before."""
        points = list(self.points)[: len(self.points) - back]
        if not points:
            return 0.0, 0.0
        last = points[-1]
        first = next(each for each in points if last[0] - each[0] <= RECENT)
        if first is last:  # the only one: since the start
            first = (last[0] - max(last[2], 1e-9), 0, 0.0, 0.0)
        took, elapsed = last[0] - first[0], last[2] - first[2]
        return (
            (last[1] - first[1]) / took if took > 0 else 0.0,
            min(max((last[3] - first[3]) / elapsed, 0.0), 1.0) if elapsed > 0 else 0.0,
        )

    def window(self) -> Stats:
        """Return the counts of the last 15 to 20 s, or since the start if these are few."""
        assert self.stats is not None
        with contextlib.suppress(ValueError):  # it counts less than before
            recent = self.stats.since(self.whole[0][1])
            if recent.batches >= ENOUGH:
                return recent
        return self.stats

    def advice(self) -> Advice:
        """Return the advice for that window, on the cores that the program has."""
        return advise(replace(self.window().window(), cores=max(1, self.run.numbers["cores"])))

    @property
    def title(self) -> str:
        """The script and the process."""
        numbers, told = self.run.numbers, self.run.facts
        rank = f"  rank {numbers['rank']} of {numbers['world_size']}"
        script = os.path.basename(told.get("script", "")) or "python"
        return f"{script}  pid {self.run.pid}" + (rank if numbers["world_size"] > 1 else "")


class Watcher:
    """All runs of a process and its descendants, or of all processes that can be read.

    Attributes
    ----------
    runs : list of Watched
    problems : list of str
        What could not be read.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._found: dict[int, Watched] = {}
        self._looked = 0.0
        self.problems: list[str] = []

    @property
    def runs(self) -> list[Watched]:
        """By rank, and by the time of their start; after these, those that have ended."""
        return sorted(
            self._found.values(),
            key=lambda each: (bool(each.ended), each.run.numbers["rank"], each.run.pid),
        )

    def update(self) -> None:
        """Look for new runs from time to time, and read all."""
        now = now_ns() / 1e9
        if not self._looked or now - self._looked >= LOOK:
            self._looked = now
            self._look()
        for each in self._found.values():
            each.update(now)

    def _look(self) -> None:
        if self._pid is None:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        else:
            pids = tree(self._pid)
        problems: list[str] = []
        there: set[int] = set()
        for pid in pids:
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                new, numbers, said = attach(pid, self._found)
                self._found.update({number: Watched(run) for number, run in new.items()})
                there |= numbers
                problems += said
        for number, each in list(self._found.items()):
            if number not in there and not each.ended:
                each.ended = "finished"
                each.run.close()
            elif each.ended and each.run.is_alive:  # another run takes its place
                del self._found[number]
        self.problems = problems


# -- as lines


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


def dump(runs: Sequence[Watched]) -> Iterator[str]:
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


# -- the command


def top(pid: int | None, *, plain: bool, once: bool, dump: bool) -> int | str:
    """Show the runs of a process, or all; return the exit status, or why there is nothing to show.

    Parameters
    ----------
    pid : int or None
        None: all processes.
    plain : bool
        Lines of text, once a second, not a screen.
    once, dump : bool
        The same, once; the stacks of all workers.
    """
    if not sys.platform.startswith("linux"):
        return "python -m cseq top needs Linux: it reads the meters through /proc"
    if pid is not None and not os.path.isdir(f"/proc/{pid}"):
        return f"python -m cseq top: there is no process {pid}"
    watcher = Watcher(pid)
    watcher.update()
    if dump:
        return _print_stacks(watcher)
    if once or not sys.stdout.isatty():
        plain = True
    if not plain:
        try:
            from cseq.observe.screen import Screen
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("textual", "rich"):
                raise
            print("a screen needs textual: pip install 'cseq-loader[top]'", file=sys.stderr)  # noqa: T201
        else:
            Screen(watcher).run()
            return 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if watcher.runs or not once:
                time.sleep(1.0)
                watcher.update()
            width = os.get_terminal_size().columns if sys.stdout.isatty() else 120
            print("\n".join(lines(watcher, width)), flush=True)  # noqa: T201
            if once:
                return 0 if watcher.runs else 1
            print()  # noqa: T201
    return 0


def lines(watcher: Watcher, width: int) -> list[str]:
    """Write all runs, and all about the one that waits most."""
    runs = watcher.runs
    if not runs:
        said = [f"no run of cseq's was found: {problem}" for problem in watcher.problems]
        return said or ["no run of cseq's was found among the processes that you may read"]
    first = max(runs, key=lambda each: (not each.ended, each.recent()[1]))
    return [*(ranks(runs, width) if len(runs) > 1 else []), *detail(first, width)]


def _print_stacks(watcher: Watcher) -> int | str:
    if not watcher.runs:
        return lines(watcher, 120)[0]
    for text in dump(watcher.runs):
        print(text, end="", flush=True)  # noqa: T201
    return 0
