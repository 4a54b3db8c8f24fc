"""Finds out why a loop waits and what would help.

`advise` tries the rules from top to bottom. The first one that matches gives the advice.
`docs/how-to/slow.md` explains the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RULES", "Advice", "Rule", "Said", "Window", "advise", "duration"]

# Minimum number of batches for advice, and the longest startup considered normal, in seconds.
ENOUGH_BATCHES, START = 8, 2.0
# The loop is the bottleneck if the fraction of time it waits is below LITTLE, or if the fraction of
# waits in which the GPU runs dry is below FED.
LITTLE, FED = 0.05, 0.1
# Larger batches help if the loop waits less than HANDOVER seconds per batch. Recommend batches up
# to MOST_LARGER times as large, assuming that each takes LONGER times as long to hand over.
# OVERHEAD is an upper bound on the fixed time per batch on each side, in seconds.
HANDOVER, OVERHEAD, MOST_LARGER, LONGER = 50e-6, 5e-6, 64, 1.5
# Workers are saturated if they are busy for at least this fraction of the time.
BUSY = 0.8
# A wait for the GIL is long if it takes at least GIL seconds. Threads compete for the GIL if the
# fraction of long waits is at least LONG, threads use at most ONE_CORE cores but could use at least
# HELD, and workers do at least TURNS of the computing. If threads spend STARVED times as long
# waiting for a core as computing, the thread that holds the GIL is also waiting for a core.
GIL, LONG, ONE_CORE, HELD, TURNS, STARVED = 1e-3, 0.3, 1.3, 0.8, 0.2, 2.0
# All cores are in use if utilization is at least USED_UP, or if workers spend at least QUEUED of
# their busy time waiting for a core. Below OTHERS, other programs are using the rest.
USED_UP, QUEUED, OTHERS = 0.95, 0.25, 0.7
# Recommend SPARE times as many workers as needed, but at most MOST_READERS per core.
SPARE, MOST_READERS = 1.1, 4
MOST_BUFFER = 16384

# Time units: the name, the length in seconds, and the shortest time shown in this unit.
UNITS: list[tuple[str, float, float]] = [("h", 3600, 7200), ("min", 60, 120), ("s", 1, 0.9995)]
UNITS += [("ms", 1e-3, 0.9995e-3), ("µs", 1e-6, 0.9995e-6)]


@dataclass(frozen=True)
class Window:
    """Measurements, in seconds or as fractions. Values that were not measured are 0.

    Attributes
    ----------
    size : float
        The number of samples in a batch, or 0 if it is unknown.
    elapsed, waited : float
        The duration of the epochs, and how long the loop waited.
    start, first : float
        How long the loop waited for the first batch and, if there is only one epoch, for the other
        workers' first batches. Not included in `elapsed` and `waited`.
    step, step_p99 : float
        The loop's time per batch: the mean (without the longest 5% if steps are uneven) and the
        99th percentile.
    index, index_p99 : float
        A worker's time per batch: the mean and the 99th percentile.
    busy : float
        The mean fraction of the time that workers are busy.
    cpu : float or None
        The fraction of `busy` that workers spend computing, or None if unknown.
    queued : float
        The fraction of `busy` that workers spend waiting for a core, or 0 if unknown.
    loop_cpu, loop_queued : float
        The fractions of the time that the loop's thread spends computing and waiting for a core.
    cores : int
        The number of cores available to this process.
    gil, gil_long : float
        The 80th percentile of the workers' waits for the GIL, and the fraction of long waits. A few
        very long waits would distort a mean.
    computed : float
        The number of cores that all threads use together, or 0 if they do not share the GIL.
    behind, early : float
        The fraction of the waiting time spent while most other batches were ready, and the fraction
        spent waiting for the first batches of epochs (0 if there is only one epoch).
    converting : float
        The mean fraction of the time that converters are busy.
    dry : float or None
        The fraction of waits after which the GPU was idle, or None without CUDA.
    slowest : str
        A description of the slowest batch.
    """

    batches: int = 0
    size: float = 0.0
    elapsed: float = 0.0
    waited: float = 0.0
    start: float = 0.0
    first: float = 0.0
    step: float = 0.0
    step_p99: float = 0.0
    index: float = 0.0
    index_p99: float = 0.0
    workers: int = 0
    busy: float = 0.0
    cpu: float | None = None
    queued: float = 0.0
    loop_cpu: float = 1.0
    loop_queued: float = 0.0
    cores: int = 1
    threads: bool = False
    gil: float = 0.0
    gil_long: float = 0.0
    computed: float = 0.0
    buffer: int = 0
    behind: float = 0.0
    early: float = 0.0
    converters: int = 0
    converting: float = 0.0
    copies: int = 0
    dry: float | None = None
    slowest: str = ""

    @property
    def w(self) -> float:
        """The fraction of the time that the loop waited."""
        return min(self.waited / self.elapsed, 1.0) if self.elapsed > 0 else 0.0

    @property
    def is_stream(self) -> bool:
        """Whether the batches come from a stream, such as a DataLoader."""
        return not self.buffer

    @property
    def own(self) -> float:
        """The number of cores that the workers use."""
        return self.busy * self.workers * (1.0 if self.cpu is None else self.cpu)

    @property
    def queue(self) -> float:
        """The mean number of threads waiting for a core, including the loop's thread."""
        return self.queued * self.busy * self.workers + self.loop_queued

    @property
    def wanted(self) -> float:
        """The number of cores that workers and the loop would use if available."""
        return self.own + min(self.loop_cpu, 1.0) + self.queue

    @property
    def starved(self) -> bool:
        """Whether threads that share the GIL are waiting for a core rather than for each other."""
        return self.queue > STARVED * self.computed

    @property
    def holds_gil(self) -> bool:
        """Whether threads hold the GIL long enough to keep others waiting."""
        return self.threads and self.gil_long > self.computed / 4

    @property
    def has_others(self) -> bool:
        """Whether other programs are using cores that this process needs."""
        return self.own + min(self.loop_cpu, 1.0) < OTHERS * self.cores

    @property
    def computes(self) -> bool:
        """Whether workers spend most of their busy time computing or waiting for a core."""
        return self.cpu is None or self.cpu + self.queued >= 0.5

    @property
    def most(self) -> float:
        """The speedup if the loop never had to wait."""
        return 1 / max(1 - self.w, 0.01)

    @property
    def enough(self) -> int:
        """The number of workers that would keep up with the loop."""
        most = self.room if self.computes else max(MOST_READERS * self.cores, 2 * self.workers)
        wanted = math.ceil(SPARE * self.index / self.step) if self.step > 0 else most
        return max(self.workers + 1, min(wanted, most))

    @property
    def fewest(self) -> int:
        """The smallest number of workers that could have done the same work."""
        return math.ceil(1.2 * self.workers * self.busy) or 1

    @property
    def spare(self) -> bool:
        """Whether far fewer workers would be enough."""
        return self.w < LITTLE and self.busy < 0.4 and self.fewest < self.workers

    @property
    def room(self) -> int:
        """The number of workers that can run at the same time as the loop."""
        if self.queued >= QUEUED:
            return max(1, self.workers)
        if self.cpu is None:
            return max(1, int(self.cores - min(self.loop_cpu, 1.0) + 0.5))
        # With more workers, each waits longer for a core, so subtract half of the waiting time.
        queues = self.queued / max(self.cpu + self.queued, 0.01) / 2
        cores = 1.0 if self.holds_gil else self.cores - min(self.loop_cpu, 1.0)
        computing = min(max(self.cpu / (1 - self.queued), 0.01), 1.0)
        return max(1, int(cores * (1 - queues) / computing + 0.5))

    def rate(self, workers: float) -> float:
        """Return the number of batches per second that `workers` always-busy workers would make."""
        return min(workers, self.room) / self.index


@dataclass(frozen=True)
class Advice:
    """Why a loop waits, and what would help.

    Attributes
    ----------
    cause : str
        A keyword; see docs/how-to/slow.md.
    sentence : str
        The measurements in words.
    action : str
        The recommended action, or an empty string.
    change : dict
        Manager arguments to change, such as ``{'num_workers': 4}``.
    gain : float
        The largest possible speedup of the loop, as a factor.
    start : str
        What to do about a slow start, or an empty string.
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
        """The action and the possible speedup."""
        gained = f": at most {self.gain:.{int(self.gain < 10)}f} times as fast"
        gained = gained if self.gain > 1.05 else ""
        return f"{self.action}{gained}" if self.action else ""


class Said(NamedTuple):
    """The result of a rule. A `gain` of None means that the loop would no longer wait."""

    seen: str
    action: str = ""
    change: Mapping[str, int] = MappingProxyType({})
    gain: float | None = None


class Rule(NamedTuple):
    """A rule: a cause, a test, and a function that returns the advice."""

    cause: str
    test: Callable[[Window], bool]
    say: Callable[[Window], Said]


def advise(window: Window) -> Advice:
    """Return the advice of the first rule that matches."""
    # The last rule always matches.
    rule = next(rule for rule in RULES if rule.test(window))
    said = rule.say(window)
    named = [f"{name}={value}" for name, value in said.change.items()]
    action = ", ".join(filter(None, [*named, said.action]))
    gain = window.most if said.gain is None else said.gain
    return Advice(
        rule.cause,
        "; ".join(filter(None, [_waits(window), said.seen])),
        action,
        dict(said.change),
        gain if action else 1.0,
        _start(window),
    )


def duration(seconds: float) -> str:
    """Format a time in a suitable unit, such as 38 ms, 1.2 s, 90 s or 5 min."""
    for unit, size, least in UNITS:
        if seconds >= least:
            value = seconds / size
            digits = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _waits(v: Window) -> str:
    if v.batches < ENOUGH_BATCHES or v.elapsed <= 0:
        return ""
    said = f"the loop waits {v.w:.0%} of the time"
    if v.index:
        maker = "a worker needs" if v.workers else "the indexer needs"
        said += f"; {maker} {duration(v.index)} per batch, the loop {duration(v.step)}"
    if v.dry is not None:
        said += f"; the GPU had run dry after {v.dry:.0%} of the waits"
    if v.first >= LITTLE * (v.elapsed + v.first):
        said += f"; before that, it waited {duration(v.first)} until all workers had started"
    return said


def _busy(v: Window) -> str:
    are = "is" if v.workers == 1 else "are"
    said = f"{_count(v.workers, 'worker')} {are} busy {v.busy:.0%} of the time"
    if v.cpu is not None:
        said += f", computing {v.cpu:.0%} of that"
    if v.queued >= LITTLE:
        said += f" and waiting for a core {min(v.queued, 1 - (v.cpu or 0.0)):.0%}"
    return said


def _start(v: Window) -> str:
    if v.start <= max(START, 20 * v.index, LITTLE * v.elapsed):
        return ""
    remedy = (
        "check what the workers import, and what is pickled with the data set"
        if v.is_stream
        else "import what the workers need at the top of a module, and check what the worker's "
        "constructor does"
    )
    return f"the first batch came after {duration(v.start)} → {remedy}"


def _more(v: Window, seen: str, action: str = "") -> Said:
    # The number of workers that would have been enough if they had always been busy.
    made = v.index * v.batches / v.elapsed
    gain = max(1.0, min(v.most, min(v.enough, v.room) / made)) if made > 0 else v.most
    return Said(seen, action, {"num_workers": v.enough}, gain)


def _larger(v: Window, seen: str, pause: float = 0.0, action: str = "") -> Said:
    """Recommend a buffer that is large enough for a pause on one side.

    Sleeping workers are woken up when half of the buffer is empty, so the recommended buffer is
    twice as large as the loop needs.
    """
    gain = min(v.most, 1 / v.busy) if v.busy > 0 else v.most
    if v.is_stream:
        larger = "a larger prefetch (prefetch_factor in a DataLoader)"
        return Said(seen, f"{larger}, {action}" if action else larger, gain=gain)
    ahead = math.ceil(pause / max(v.step, v.index / max(v.workers, 1), 1e-6)) + v.workers
    return Said(seen, action, {"buffer": min(max(2 * ahead, v.buffer + 1), MOST_BUFFER)}, gain)


def _inline(v: Window) -> Said:
    seen = "the loop makes its own batches"
    if v.elapsed > 0:
        return _more(v, f"num_workers=0: {seen}")
    return Said(f"num_workers=0 (or test mode): {seen}", change={"num_workers": 2}, gain=1.0)


def _gil(v: Window) -> Said:
    seen = (
        f"all threads together compute on {v.computed:.1f} of {v.cores} cores, and one in five of "
        f"their waits for the GIL takes {duration(v.gil)} or longer"
    )
    if v.starved:
        seen += "; they wait even longer for a core: other programs are using the cores"
    # The cores that threads could use, and the time of the loop itself, excluding GIL waits.
    wanted = v.computed + v.queue
    rest = (1 - v.w) * v.elapsed - min(wanted, 1.0) * v.gil * v.batches
    gain = min(
        min(v.workers + 1, v.cores) / max(wanted, 0.01),
        v.elapsed / max(rest, (1 - v.w) * v.elapsed / 10, 1e-9),
    )
    return Said(
        seen,
        "use processes: "
        + (
            "worker_method='multiprocessing'" if v.is_stream else "MPSequence instead of MTSequence"
        ),
        gain=1.0 if v.starved else max(gain, 1.0),
    )


def _loop(v: Window) -> Said:
    if v.w >= LITTLE:
        return Said("the GPU has enough work")
    seen = "the loop is the bottleneck"
    if v.loop_queued >= QUEUED:
        seen += f", and waits for a core {v.loop_queued:.0%} of the time"
        seen += ": other programs are using the cores" * v.has_others
    if v.spare:
        seen += f"; {_count(v.fewest, 'worker')} would be enough instead of {v.workers}"
    return Said(seen)


def _handover(v: Window) -> Said:
    """Recommend a batch size, assuming that each side's overhead per batch is constant."""
    took = v.elapsed / v.batches
    larger = 2 ** math.ceil(math.log2(2 * HANDOVER / took)) if took < HANDOVER else 2
    larger = min(larger, MOST_LARGER)
    step, index = (max(seconds - OVERHEAD, seconds / larger) for seconds in (v.step, v.index))
    named = f", such as batch_size={round(larger * v.size)}" if v.size else ""
    return Said(
        "handing over a batch takes as long as making it",
        f"larger batches{named}",
        gain=max(1.0, took / max(step, index / max(v.workers, 1), LONGER * took / larger)),
    )


def _converters(v: Window) -> Said:
    are = "is" if v.converters == 1 else "are"
    seen = f"{_count(v.converters, 'converter')} {are} busy {v.converting:.0%} of the time"
    seen += f"; {_busy(v)}"
    return Said(seen, change={"num_converters": 2 * v.converters})


def _memory(v: Window) -> Said:
    seen = f"{v.copies} of {v.batches} batches were copied, because the loop holds too many"
    limit = "" if v.is_stream else ", or pass a larger memory_limit"
    return Said(seen, f"drop batches after their step{limit}")


def _stragglers(v: Window) -> Said:
    slow = f" ({v.slowest})" if v.slowest else ""
    seen = f"one batch in a hundred takes {duration(v.index_p99)}{slow}, and the others wait for it"
    return _larger(v, seen, v.index_p99, f"or {'in_order' if v.is_stream else 'ordered'}=False")


def _buffer(v: Window) -> Said:
    ahead = f", and the buffer holds {v.buffer} batches" if v.buffer else ""
    seen = f"{_busy(v)}; one step in a hundred takes {duration(v.step_p99)}{ahead}"
    larger = _larger(v, seen, v.step_p99)
    if v.is_stream or larger.change["buffer"] > v.buffer + 1:
        return larger
    return Said(seen, "look at stats().slowest, and make one of these batches again with remake()")


def _cores(v: Window) -> Said:
    if v.queued >= QUEUED and v.has_others:
        return Said(
            f"{_busy(v)}: other programs are using the cores",
            "more workers would only take turns with them; leave this program more cores",
            gain=min(v.most, 1 / max(1 - v.queued, 0.01)),
        )
    fewer = "try fewer workers, and " if v.workers > v.cores else ""
    return Said(
        f"{_busy(v)}: {_count(v.cores, 'core')} are used up",
        f"{fewer}find what uses the CPU{'' if v.is_stream else ' (run remake() in a profiler)'}; "
        "if each epoch decodes the same samples, keep them with cseq.cached",
    )


def _workers(v: Window) -> Said:
    waits = "" if v.computes else ": they wait for a disk or a network"
    waits += "" if v.queued or not waits else ", or for a core"
    if waits and v.is_stream and not v.threads:
        waits += "; threads (worker_method='thread' in a DataLoader) would use less memory"
    return _more(v, f"{_busy(v)}{waits}")


def _takes_turns(v: Window) -> bool:
    # If the workers compute little, the loop is holding the GIL.
    indexing = v.own >= TURNS * v.computed
    if not (v.threads and v.cores > 1 and v.computed <= ONE_CORE and indexing):
        return False
    return v.gil_long >= LONG and v.computed + v.queue >= HELD


def _is_fed(v: Window) -> bool:
    return v.dry is not None and v.dry < FED


def _is_unknown(v: Window) -> bool:
    """Return True if there are too few batches or no times were measured."""
    if not v.workers and v.elapsed <= 0:
        return not v.batches
    return v.batches < ENOUGH_BATCHES or v.elapsed <= 0


def _is_inline(v: Window) -> bool:
    return not v.workers and (v.w >= LITTLE or v.elapsed <= 0)


def _is_used_up(v: Window) -> bool:
    if v.cpu is None:
        return False
    return (
        v.queued >= QUEUED or v.wanted >= USED_UP * v.cores or (v.workers >= v.cores and v.computes)
    )


def _is_handed_over(v: Window) -> bool:
    makes = v.busy < BUSY or v.index < OVERHEAD
    return makes and v.waited < HANDOVER * v.batches


# See docs/how-to/slow.md.
RULES = (
    Rule(
        "unknown",
        _is_unknown,
        lambda _: Said(f"fewer than {ENOUGH_BATCHES} batches were measured"),
    ),
    Rule("inline", _is_inline, _inline),
    Rule("gil", _takes_turns, _gil),
    Rule("loop", lambda v: v.w < LITTLE or _is_fed(v), _loop),
    Rule("handover", _is_handed_over, _handover),
    Rule("converters", lambda v: v.converters > 0 and v.converting >= BUSY > v.busy, _converters),
    Rule("memory", lambda v: v.copies >= LITTLE * v.batches and v.copies > 0, _memory),
    Rule(
        "epochs",
        lambda v: v.busy < BUSY and v.early > 0.5,
        lambda v: Said(
            f"{v.early:.0%} of the waiting time goes to the first batches of epochs",
            "fewer, longer epochs: iterate over several at a time",
        ),
    ),
    Rule(
        "stragglers",
        lambda v: v.busy < BUSY and v.behind >= 0.5 and v.buffer not in range(1, v.workers + 2),
        _stragglers,
    ),
    Rule("cores", lambda v: v.busy >= BUSY and _is_used_up(v), _cores),
    Rule("workers", lambda v: v.busy >= BUSY, _workers),
    Rule("buffer", lambda _: True, _buffer),
)
