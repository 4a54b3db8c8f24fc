"""Why a loop waits, and what helps: one table of rules over what was measured.

`advise` is a pure function of a `Window`. The rules are tried from the top; the first one that
holds gives the cause. `docs/how-to/slow.md` has the same table, which a test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES", "Advice", "Rule", "Window", "advise"]

ENOUGH_BATCHES = 8  # for any other answer than 'unknown'
FED = 0.1  # part of the waits; if the GPU runs dry in less, the waits cost nothing
LITTLE = 0.05  # part of the time; if the loop waits less, the loop is the bottleneck
HANDOVER = 50e-6  # seconds a batch; if the loop waits less, nothing is the bottleneck
BUSY = 0.8  # part of the time; workers that work as much cannot do more
START = 2.0  # seconds until the first batch
GIL = 1e-3  # seconds; if one in five waits for the GIL is longer, threads compete for it
ONE_CORE = 1.3  # cores that threads use at most if only one of them runs at a time
NO_CORE = 0.2  # part of the time that something was ready to run
SPARE = 1.1  # workers for one that is needed
MOST_READERS = 4  # workers for each core, where they wait for something else than a core


@dataclass(frozen=True)
class Window:
    """What was measured, in seconds and parts of the time; 0 where nothing was.

    Attributes
    ----------
    elapsed, waited : float
        Of the epochs; what of it the loop waited.
    start : float
        Until the first batch: not a part of `elapsed`, and no cause of what was waited in that.
    step, step_p50, step_p99 : float
        The loop's own time for a batch: the mean without the longest twentieth, quantiles.
    index, index_p50, index_p99 : float
        What a batch takes a worker: mean, quantiles.
    busy : float
        Part of the time that workers worked, the mean of all.
    cpu : float or None
        Part of that in which they computed; None: not known.
    queued, loop_queued : float
        Part of that in which they were ready to run, without a core; the loop's, of all time.
    loop_cpu : float
        Part of all time in which the loop's thread computed.
    cores : int
        For this process: within its container's quota, one part for each rank of the machine.
    gil : float
        What a thread waits that asks for the GIL, in one of five times at least. Not the median:
        where two threads take turns, it is often free. Nor the mean: on a machine that does other
        things, too, single waits are long.
    computed : float
        Cores that all threads together used, where they share a GIL.
    behind, early : float
        Parts of what was waited: with most other batches ready; for the first batches of epochs.
    converting : float
        Part of the time that converters worked.
    agents : int
        Worker processes of a fleet; `workers` are then the threads that ask them.
    dry : float or None
        Part of the waits after which the GPU had nothing left to do; None: CUDA was not in use.
    slowest : str
        Names the slowest batch.
    """

    batches: int = 0
    elapsed: float = 0.0
    waited: float = 0.0
    start: float = 0.0
    step: float = 0.0
    step_p50: float = 0.0
    step_p99: float = 0.0
    index: float = 0.0
    index_p50: float = 0.0
    index_p99: float = 0.0
    workers: int = 0
    busy: float = 0.0
    cpu: float | None = None
    queued: float = 0.0
    loop_queued: float = 0.0
    loop_cpu: float = 1.0
    cores: int = 1
    threads: bool = False
    gil: float = 0.0
    computed: float = 0.0
    buffer: int = 0
    behind: float = 0.0
    early: float = 0.0
    converters: int = 0
    converting: float = 0.0
    copies: int = 0
    agents: int = 0
    dry: float | None = None
    slowest: str = ""

    @property
    def w(self) -> float:
        """Part of the time that the loop waited."""
        return min(self.waited / self.elapsed, 1.0) if self.elapsed > 0 else 0.0

    @property
    def is_stream(self) -> bool:
        """Whether it is of a stream, as a DataLoader is one: its arguments have other names."""
        return not self.buffer

    @property
    def own(self) -> float:
        """How many cores the workers computed on."""
        return self.busy * self.workers * (1.0 if self.cpu is None else self.cpu)

    @property
    def held(self) -> float:
        """How many threads computed, or were ready to: about 1 where the GIL is never free."""
        return self.computed + self.busy * self.workers * self.queued + self.loop_queued

    @property
    def most(self) -> float:
        """How many times as fast the loop were if it never waited."""
        return 1 / max(1 - self.w, 0.01)

    def enough(self, most: int) -> int:
        """How many workers would keep up with the loop; more than there are, and at most `most`."""
        wanted = math.ceil(SPARE * self.index / self.step) if self.step > 0 else most
        return max(self.workers + 1, min(wanted, most))

    @property
    def fewest(self) -> int:
        """How many workers would have done what these did."""
        return math.ceil(1.2 * self.workers * self.busy) or 1

    @property
    def spare(self) -> bool:
        """Whether so many fewer workers would be enough that it is worth to say so."""
        return self.busy < 0.4 and self.fewest < self.workers and not self.agents

    @property
    def room(self) -> int:
        """How many workers that compute as these there are cores for, beside the loop."""
        computing = (self.cpu or 1.0) / max(1 - self.queued, 0.01)  # if they get a core at once
        cores = self.cores - min(self.loop_cpu, 1.0)
        return max(1, int(cores / min(computing, 1.0) + 0.5))

    @property
    def running(self) -> float:
        """Part of its time that a batch would take a worker which has a core at once."""
        return max(1 - self.queued, min(self.cpu or 0.0, 1.0), 0.01)

    @property
    def saturating(self) -> float:
        """From how many workers on there is no core for another one; inf: that is not known."""
        if not self.cpu:
            return math.inf
        return (ONE_CORE if _takes_turns(self) else self.cores) * self.running / self.cpu

    def rate(self, workers: float) -> float:
        """How many batches a second workers make that never wait for tickets, if so many do."""
        return min(workers, self.saturating) / (self.index * self.running)


@dataclass(frozen=True)
class Advice:
    """Why a loop waits, and what to do.

    Attributes
    ----------
    cause : str
        A word: see docs/how-to/slow.md.
    sentence : str
        What was measured.
    action : str
        What to do; empty: nothing.
    change : dict
        The same as arguments of the manager, if they say it: ``{'num_workers': 4}``.
    gain : float
        At most so many times as fast; 1: no faster.
    start : str
        What the loop waited for its first batch, if that was long, and what helps. The rest is of
        the time after it.
    """

    cause: str
    sentence: str
    action: str = ""
    change: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0
    start: str = ""

    def __str__(self) -> str:
        start = f"\nstart: {self.start}." if self.start else ""
        return f"{self.cause}: {self.sentence}{self.remedy and f' → {self.remedy}.'}{start}"

    @property
    def remedy(self) -> str:
        """The action, with what it can gain."""
        gained = f": at most {self.gain:.1f} times as fast" if self.gain > 1.05 else ""
        return f"{self.action}{gained}" if self.action else ""


Said = tuple[str, str, dict[str, Any], float]  # sentence, action, change, gain


class Rule(NamedTuple):
    """A cause, when it is the one, and what is said then."""

    cause: str
    seen: str
    helps: str
    test: Callable[[Window], bool]
    say: Callable[[Window], Said]


def advise(window: Window) -> Advice:
    """Return the advice of the first rule that holds, and what is to be said of the start."""
    for rule in RULES:
        if rule.test(window):
            return Advice(rule.cause, *rule.say(window), start=_start(window))
    raise AssertionError("the last rule holds for every window")


def _time(seconds: float) -> str:
    """Write a duration with two digits."""
    unit, scale = ("ms", 1e3) if seconds >= 95e-6 else ("µs", 1e6)
    if seconds >= 0.95:
        unit, scale = "s", 1.0
    value = seconds * scale
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def _waits(v: Window) -> str:
    """Say what the loop waits, and what a batch takes both sides."""
    said = f"the loop waits {v.w:.0%} of the time"
    if v.agents:
        said += f"; a batch takes the loop {_time(v.step)}"
    elif v.index and not v.workers:
        said += f"; a batch takes {_time(v.index)} to make, the loop {_time(v.step)}"
    elif v.index:
        said += f"; a batch takes a worker {_time(v.index)}, the loop {_time(v.step)}"
    if v.dry is not None:
        said += f"; the GPU had run dry after {v.dry:.0%} of the waits"
    return said


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _busy(v: Window) -> str:
    are = "is" if v.workers == 1 else "are"
    return f"{_count(v.workers, 'worker')} {are} busy {v.busy:.0%} of the time"


def _rest(v: Window) -> str:
    """Say what takes the time that workers and steps do not explain."""
    expected = 1 - v.busy * v.workers * v.step / v.index if v.index > 0 else v.w
    if abs(expected - v.w) <= LITTLE:
        return ""
    if expected > v.w:
        return f"; some steps are far longer than that ({_time(v.step_p99)})"
    return "; the rest goes with handing batches over"


def _start(v: Window) -> str:
    """Say what the start took, and what helps; empty: it was short."""
    if v.start <= max(START, 20 * v.index, LITTLE * v.elapsed):
        return ""
    remedy = (
        "see what the workers import, and what comes to them with the data set"
        if v.is_stream
        else "name the modules that the workers import in preload=, and see what the worker's "
        "constructor does"
    )
    return f"the first batch came after {_time(v.start)} → {remedy}"


def _inline(v: Window) -> Said:
    said = "the loop makes its batches itself"
    if v.elapsed <= 0:
        said = f"num_workers=0 (or test mode): {said}"
        return said, "num_workers=2", {"num_workers": 2}, 1.0
    computes = v.cpu is None or v.cpu >= 0.5 or v.queued > NO_CORE
    more = v.enough(v.room if computes else MOST_READERS * v.cores)
    gain = (v.index + v.step) * more / v.index if v.index > 0 else v.most
    said = f"num_workers=0: {said}; {_waits(v)}"
    return said, f"num_workers={more}", {"num_workers": more}, min(v.most, gain)


def _unknown(_: Window) -> Said:
    return f"fewer than {ENOUGH_BATCHES} batches were measured", "", {}, 1.0


def _gil(v: Window) -> Said:
    return (
        (
            f"of five times that a thread asks for the GIL, it waits once for {_time(v.gil)} or "
            f"longer, and all threads together compute on {v.computed:.1f} cores of {v.cores}; "
            f"{_waits(v)}"
        ),
        "use processes: MPSequence in place of MTSequence",
        {},
        max(v.most, min(v.workers + 1, v.cores) / max(v.computed, 1.0)),
    )


def _loop(v: Window) -> Said:
    said = f"{_waits(v)}: the loop is the bottleneck"
    if v.loop_queued > NO_CORE and v.workers > 1 and v.own >= 0.5:
        return (
            f"{said}, and its thread had to wait for a core {v.loop_queued:.0%} of it",
            f"num_workers={max(1, v.workers // 2)}",
            {"num_workers": max(1, v.workers // 2)},
            1 / (1 - min(v.loop_queued, 0.9)),
        )
    if v.spare:
        said += f"; {_count(v.fewest, 'worker')} would be enough, not {v.workers}"
    return said, "", {}, 1.0


def _fed(v: Window) -> Said:
    return f"{_waits(v)}, and had work left after the others: it is fed", "", {}, 1.0


def _none(v: Window) -> Said:
    return f"{_waits(v)}; handing a batch over takes as long as that", "", {}, 1.0


def _fleet(v: Window) -> Said:
    more = math.ceil(v.agents / (1 - min(v.w, 0.75)))
    rate = f"{v.batches / v.elapsed:.3g} batches a second"
    said = f"{_waits(v)}; {_count(v.agents, 'worker')} of a fleet made {rate}"
    return said, f"a fleet of {_count(more, 'worker')}", {}, v.most


def _converters(v: Window) -> Said:
    more = 2 * v.converters
    return (
        (
            f"{_waits(v)}; {_count(v.converters, 'converter')} work {v.converting:.0%} of the "
            f"time, workers {v.busy:.0%}"
        ),
        f"num_converters={more}",
        {"num_converters": more},
        v.most,
    )


def _memory(v: Window) -> Said:
    return (
        f"{_waits(v)}; {v.copies} of {v.batches} batches were copied, since too many are held",
        f"drop batches after their step{'' if v.is_stream else ', or give a larger memory_limit'}",
        {},
        v.most,
    )


def _larger(v: Window, least: int) -> tuple[str, dict[str, Any]]:
    """Name a larger buffer, as far as the manager has one.

    Workers that sleep are woken when half of it is to be made again: so it is to be twice as large
    as what is needed ahead of the loop.
    """
    if v.is_stream:
        return "a larger prefetch (of a DataLoader: prefetch_factor)", {}
    size = min(max(least, v.buffer + 1), 16384)
    return f"buffer={size}", {"buffer": size}


def _buffer(v: Window) -> Said:
    action, change = _larger(v, 2 * v.workers)
    said = f"{_waits(v)}; {_count(v.workers, 'worker')} share a buffer of {v.buffer} batches"
    return f"{said}, and are busy {v.busy:.0%} of the time", action, change, v.most


def _stragglers(v: Window) -> Said:
    ahead = math.ceil(v.index_p99 / max(v.step, v.index / max(v.workers, 1), 1e-6))
    action, change = _larger(v, max(2 * v.buffer, 2 * ahead + v.workers))
    slow = f" ({v.slowest})" if v.slowest else ""
    return (
        f"{_waits(v)}, but one in a hundred {_time(v.index_p99)}{slow}, for which the others wait",
        f"{action}, or {'in_order' if v.is_stream else 'ordered'}=False",
        change,
        v.most,
    )


def _bursts(v: Window) -> Said:
    # What the loop takes at once after a pause: so many batches are made meanwhile.
    ahead = math.ceil(v.step_p99 * v.workers / max(v.index, 1e-6))
    action, change = _larger(v, 2 * ahead + v.workers)
    return (
        (
            f"{_waits(v)}; the loop pauses ({_time(v.step_p99)} at times), and takes more than "
            f"{v.buffer or 'the'} batches at once after that"
        ),
        action,
        change,
        v.most,
    )


def _epochs(v: Window) -> Said:
    return (
        f"{_waits(v)}; {v.early:.0%} of that for the first batches of epochs",
        "longer epochs, or fewer of them: iterate over several at a time",
        {},
        v.most,
    )


def _cores(v: Window) -> Said:
    said = f"{_waits(v)}; {_busy(v)}"
    computing = "" if v.cpu is None else f", computing {v.cpu:.0%} of that"
    if v.queued > NO_CORE and v.workers > max(1, v.cores):
        fewer = max(1, v.cores - 1)
        return (
            (
                f"{said}{computing} and without a core {v.queued:.0%}: "
                f"{_count(v.cores, 'core')} are used up"
            ),
            f"num_workers={fewer}, and see what costs the CPU",
            {"num_workers": fewer},
            v.most,
        )
    if v.own < 0.6 * v.cores and v.queued > NO_CORE:
        said = f"{said}, {v.queued:.0%} of that without a core: other programs use them"
        if v.workers < v.room:
            more = v.enough(v.room)
            action = f"num_workers={more}, which get a larger part, or cores for this process alone"
            return said, action, {"num_workers": more}, v.most
        return said, "see what else runs here, or give this process cores of its own", {}, v.most
    return (
        f"{said}{computing}: {_count(v.cores, 'core')} are used up",
        f"see what costs the CPU{'' if v.is_stream else ': remake() under a profiler'}",
        {},
        v.most,
    )


def _medium(v: Window) -> Said:
    more = v.enough(max(MOST_READERS * v.cores, 2 * v.workers))
    return (
        (
            f"{_waits(v)}; {_busy(v)}, "
            f"computing {v.cpu or 0:.0%} of that: they wait for a disk or a network{_rest(v)}"
        ),
        f"num_workers={more}",
        {"num_workers": more},
        min(v.most, more / v.workers),
    )


def _workers(v: Window) -> Said:
    more = v.enough(v.room)
    return (
        f"{_waits(v)}; {_busy(v)}{_rest(v)}",
        f"num_workers={more}",
        {"num_workers": more},
        min(v.most, more / v.workers),
    )


def _mixed(v: Window) -> Said:
    return (
        (f"{_waits(v)}; {_busy(v)}, {v.behind:.0%} of the waiting ends with other batches ready"),
        "look at stats().slowest, and make one of these batches again: remake()",
        {},
        v.most,
    )


def _timed(v: Window) -> bool:
    """Tell whether there are times; where the loop makes its batches itself, there need be none."""
    return v.workers > 0 or v.elapsed > 0


def _in_turns(v: Window) -> bool:
    """Tell whether several threads compute on no more than one core."""
    return v.threads and v.cores > 1 and v.computed <= ONE_CORE


def _takes_turns(v: Window) -> bool:
    """Tell whether threads wait for the GIL, which workers hold for a good part of that time."""
    indexing = v.own >= NO_CORE * v.computed  # else the loop holds it, and is the bottleneck
    return v.gil > GIL and _in_turns(v) and v.held >= BUSY and indexing


def _used_up(v: Window) -> bool:
    """Tell whether more workers would have no core to compute on."""
    return v.queued > NO_CORE or (v.workers >= v.cores and v.cpu is not None and v.cpu >= 0.5)


def _idle(v: Window) -> bool:
    """Tell whether the loop waits although its workers could do more."""
    return v.busy < BUSY


RULES = (
    Rule(
        "unknown",
        "Fewer than 8 batches were taken.",
        "",
        lambda v: v.batches < ENOUGH_BATCHES or v.elapsed <= 0 if _timed(v) else not v.batches,
        _unknown,
    ),
    Rule(
        "inline",
        "The loop makes its batches itself: `num_workers=0`, or test mode.",
        "`num_workers=2`",
        lambda v: not v.workers and (v.w >= LITTLE or not _timed(v)),
        _inline,
    ),
    Rule(
        "gil",
        "Threads compute on one core together; of their waits for the GIL one in five takes 1 ms.",
        "processes: `MPSequence`",
        _takes_turns,
        _gil,
    ),
    Rule(
        "loop",
        "The loop waits less than a twentieth of the time.",
        "a faster training step; fewer workers may be enough",
        lambda v: v.w < LITTLE,
        _loop,
    ),
    Rule(
        "fed",
        "The loop waits, but after nine waits in ten the GPU still has work to do.",
        "a faster training step",
        lambda v: v.dry is not None and v.dry < FED,
        _fed,
    ),
    Rule(
        "none",
        "The loop waits less than 50 µs a batch, about what handing a batch over takes.",
        "larger batches, if anything",
        lambda v: v.waited < HANDOVER * v.batches,
        _none,
    ),
    Rule(
        "fleet",
        "The loop waits for a fleet.",
        "more workers in it",
        lambda v: v.agents > 0,
        _fleet,
    ),
    Rule(
        "converters",
        "The converters to CUDA are busy, the indexers are not.",
        "more `num_converters`",
        lambda v: v.converters > 0 and v.converting >= BUSY > v.busy,
        _converters,
    ),
    Rule(
        "memory",
        "One batch in twenty or more is copied, since too many are held.",
        "hold fewer batches, a larger `memory_limit`",
        lambda v: v.copies >= LITTLE * v.batches and v.copies > 0,
        _memory,
    ),
    Rule(
        "buffer",
        "The workers are not busy, and there are hardly more batches in the buffer than workers.",
        "a larger `buffer`",
        lambda v: _idle(v) and 0 < v.buffer < v.workers + 2,
        _buffer,
    ),
    Rule(
        "epochs",
        "The workers are not busy; most waiting is for the first batches of epochs.",
        "longer epochs",
        lambda v: _idle(v) and v.early > 0.5,
        _epochs,
    ),
    Rule(
        "stragglers",
        "The workers are not busy; while the loop waits, most other batches are ready.",
        "a larger `buffer`, `ordered=False`, batches of equal cost",
        lambda v: _idle(v) and v.behind >= 0.5,
        _stragglers,
    ),
    Rule(
        "bursts",
        "The workers are not busy; the loop pauses (p99 of its steps above ten times the median).",
        "a larger `buffer`",
        lambda v: _idle(v) and v.step_p99 > 10 * v.step_p50,
        _bursts,
    ),
    Rule(
        "cores",
        "The workers are busy, and compute on all cores or wait for one.",
        "cheaper indexing, fewer workers, more cores",
        lambda v: not _idle(v) and _used_up(v),
        _cores,
    ),
    Rule(
        "medium",
        "The workers are busy, but compute less than half of that time: they wait for a disk, say.",
        "more workers than cores, larger reads",
        lambda v: not _idle(v) and v.cpu is not None and v.cpu < 0.5,
        _medium,
    ),
    Rule(
        "workers",
        "The workers are busy, and there are cores left.",
        "more workers, a faster indexer",
        lambda v: not _idle(v),
        _workers,
    ),
    Rule("mixed", "None of these.", "look at the slowest batches", lambda _: True, _mixed),
)
