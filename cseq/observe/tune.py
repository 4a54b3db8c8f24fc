"""`cseq.tune`: sizes are tried, as 'auto' would; a table of them, and the best."""

from __future__ import annotations

import contextlib
import inspect
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.advice import advise
from cseq.arguments import FIRST_BUFFER, MOST_BUFFER, Size, workers_of_auto
from cseq.check import count, seconds
from cseq.observe.bench import epochs
from cseq.sequence import MSequence
from cseq.tuning import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from cseq.advice import Window

__all__ = ["Trial", "Tuned", "best_of", "tune"]

SHARE = 5  # of the time: a part for each trial
WARM = 0.2  # of a trial, before anything is counted
GOOD = 0.95  # of the best rate


class Trial(NamedTuple):
    """What one size has done.

    Attributes
    ----------
    num_workers : int
    buffer : int or None
        None: `make` takes none.
    batches_per_s, samples_per_s : float
    waits : float
        Part of the time that the loop waited.
    cause : str
        Of that: see docs/how-to/slow.md.
    """

    num_workers: int
    buffer: int | None
    batches_per_s: float
    samples_per_s: float
    waits: float
    cause: str

    @property
    def arguments(self) -> dict[str, int]:
        """What `make` was called with."""
        named = {"num_workers": self.num_workers, "buffer": self.buffer}
        return {name: value for name, value in named.items() if value is not None}


class Tuned(NamedTuple):
    """What was tried, in the order it was: ``print`` it.

    Attributes
    ----------
    table : tuple of Trial
    best : Trial
        The one with the fewest workers, then the smallest buffer, that comes near the best rate.
    """

    table: tuple[Trial, ...]
    best: Trial

    def __str__(self) -> str:
        lines = ["workers  buffer  batches/s  samples/s  waits  cause"]
        for trial in self.table:
            buffer = "" if trial.buffer is None else f"{trial.buffer}"
            lines.append(
                f"{trial.num_workers:7}  {buffer:>6}  {trial.batches_per_s:9.4g}  "
                f"{trial.samples_per_s:9.4g}  {trial.waits:5.0%}  {trial.cause}"
            )
        named = ", ".join(f"{name}={value}" for name, value in self.best.arguments.items())
        return "\n".join([*lines, f"→ {named}"])


def tune(
    make: Callable[..., Any],
    *,
    step: float | Callable[[Any], object] | None = None,
    seconds: float = 20.0,
    workers: Iterable[int] | None = None,
) -> Tuned:
    """Try numbers of workers, and buffers, for a loop; nothing is printed.

    Each trial makes a loader and goes through it. The first has one worker; which one is next is
    decided as 'auto' decides it, until nothing is to be changed.

    Parameters
    ----------
    make : callable
        ``make(num_workers=…)``, or ``make(num_workers=…, buffer=…)`` if it takes that, returns a
        manager that is not started, or a `cseq.DataLoader`. ``functools.partial`` of a class will
        do.
    step : float or callable, optional
        The loop's own step: how many seconds it sleeps, or what it calls with each batch. None: it
        asks for the next batch at once.
    seconds : float
        How long all of it takes about; at least one trial is made, and what is started is ended.
    workers : iterable of int, optional
        The numbers to try, in this order, in place of those that 'auto' would; `buffer` is twice as
        many, at least 10.

    Returns
    -------
    Tuned
        `table`, `best`; as text, both.

    Examples
    --------
    >>> from functools import partial
    >>> make = partial(cseq.MTSequence, np.arange(10**6), batch_size=4, out_type="null")
    >>> tuned = cseq.tune(make, step=0.005, seconds=0.1, workers=[1])
    >>> tuned.best.num_workers
    1
    """
    whole = _seconds("seconds", seconds)
    do = _step_of(step)
    sized = _takes(make)
    sizes = None if workers is None else [count("workers", each) for each in workers]
    if sizes is not None and not sizes:
        raise ValueError("workers=[] names no number; give one or more, or None")
    end = time.monotonic() + whole
    part, table = whole / (SHARE if sizes is None else len(sizes)), []
    for trial in _trials(make, do, part, sized, sizes):
        table.append(trial)
        if sizes is None and time.monotonic() > end - part / 2:
            break
    return Tuned(tuple(table), best_of(table))


def best_of(table: Sequence[Trial]) -> Trial:
    """Return the smallest size that comes near the best rate."""
    highest = max(trial.batches_per_s for trial in table)
    good = [trial for trial in table if trial.batches_per_s >= GOOD * highest]
    return min(good, key=lambda trial: (trial.num_workers, trial.buffer or 0))


def _seconds(name: str, value: Any) -> float:
    number = seconds(name, value)
    if number is None:
        raise TypeError(f"{name}=None is no number of seconds; give one above 0")
    return number


def _step_of(step: Any) -> Callable[[Any], object]:
    """Check `step`: return what is done with each batch."""
    if callable(step):
        return step  # type: ignore[no-any-return]
    if step is None:
        return lambda _: None
    pause = _seconds("step", step)
    return lambda _: time.sleep(pause)


def _takes(make: Any) -> bool:
    """Check `make`; return whether it takes `buffer`, too."""
    if not callable(make):
        raise TypeError(f"make={make!r} cannot be called; give a function of num_workers")
    parameters = inspect.signature(make).parameters.values()
    named = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        named |= {"num_workers"}
    if "num_workers" not in named:
        raise TypeError(f"make={make!r} takes no argument num_workers; let it return a new loader")
    return "buffer" in named


def _trials(
    make: Callable[..., Any],
    step: Callable[[Any], object],
    part: float,
    sized: bool,  # noqa: FBT001
    workers: list[int] | None,
) -> Iterator[Trial]:
    """Try one size after another."""
    tuner = Tuner((True, sized))
    most = Size(workers_of_auto()[1], MOST_BUFFER)
    given = iter(workers or ())
    size: Size | None = Size(1, FIRST_BUFFER)
    while size is not None:
        if workers is not None:
            number = next(given, None)
            if number is None:
                return
            size = Size(number, max(FIRST_BUFFER, 2 * number))
        loader = make(**size._asdict()) if sized else make(num_workers=size.num_workers)
        trial, window = _try(loader, size, step, part)
        yield trial if sized else trial._replace(buffer=None)
        if workers is None:
            decision = tuner.look(window, size, most)
            size = None if decision is None else decision.size


def _try(
    loader: Any, size: Size, step: Callable[[Any], object], part: float
) -> tuple[Trial, Window]:
    """Go through a loader for a while."""
    if not hasattr(loader, "stats"):
        raise TypeError(
            f"make() returned an object of {type(loader).__name__}; let it return a manager of "
            "cseq, or a cseq.DataLoader"
        )
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(loader.start()) if isinstance(loader, MSequence) else loader
        batches: Generator[Any, None, None] = epochs(started)
        stack.enter_context(contextlib.closing(batches))
        step(next(batches))
        _go(batches, step, WARM * part)
        before = loader.stats()
        taken, waited, took = _go(batches, step, part)
        stats = loader.stats()
        with contextlib.suppress(ValueError):  # a loader's workers begin anew with each epoch
            stats = stats.since(before)
    window = replace(stats.window(), start=0.0)
    if isinstance(loader, MSequence):
        each = stats.samples / max(stats.batches, 1)
    else:  # whose items are batches
        each = loader.batch_size or 1
    rate = taken / took
    return Trial(*size, rate, rate * each, waited / took, advise(window).cause), window


def _go(
    batches: Iterator[Any], step: Callable[[Any], object], part: float
) -> tuple[int, float, float]:
    """Take batches for so many seconds: how many, what of the time was waited, all of it."""
    begun = now = time.perf_counter()
    taken, waited = 0, 0.0
    while now - begun < part:
        batch = next(batches)
        waited += time.perf_counter() - now
        step(batch)
        taken, now = taken + 1, time.perf_counter()
    return taken, waited, now - begun
