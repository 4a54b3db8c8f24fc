"""``cseq bench FILE.py:make``: compares a loader with and without cseq's workers.

Each row of the table calls ``make()``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.indexing.dataset import from_dataset
from cseq.kinds import MPSequence
from cseq.measure.advice import ENOUGH_BATCHES, duration
from cseq.measure.stats import added
from cseq.observe.processes import cpu_seconds, tree
from cseq.sequence import MSequence
from cseq.system import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.utils.data import DataLoader

    Loader = MSequence[Any] | DataLoader[Any]
__all__ = ["Figures", "bench", "epochs", "seconds_of"]

# Duration of each measurement in seconds.
MEASURED = 5.0
# The warm-up ends after this number of seconds or batches, whichever comes first.
WARM = 0.5, 20
BATCH_SIZE = 32
HEADS = ("batches/s", "CPU a batch", "first batch")
LABELS = {
    "torch": "torch DataLoader",
    "none": "no workers, in process",
    "cseq": "cseq.DataLoader",
    "manager": "the manager's workers",
}


class Made(NamedTuple):
    """The loader that ``make()`` returned.

    `text` describes the loader, and `kinds` lists the rows to measure. In the row `current`, the
    loader is unchanged. The rows for torch and cseq use `workers` workers.
    """

    text: str
    kinds: Sequence[str]
    current: str
    workers: int


class Figures(NamedTuple):
    """The figures of a row so far.

    Attributes
    ----------
    rate : float
        Batches per second, or 0 if unknown.
    cpu : float or None
        CPU seconds per batch, over all processes.
    waits : float or None
        The fraction of the time that a loop with the given step time waits.
    first : float or None
        Seconds from ``iter()`` to the first batch.
    advice : str
        cseq's advice for this step time.
    error : str
        Why the measurement failed.
    """

    rate: float = 0.0
    cpu: float | None = None
    waits: float | None = None
    first: float | None = None
    advice: str = ""
    error: str = ""


def load(path: str, name: str) -> Callable[[], object]:
    """Import a function from a file. Raise ValueError if this is not possible."""
    folder, file = os.path.split(os.path.abspath(path))
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    stem, ending = os.path.splitext(file)
    if ending != ".py" or "." in stem:
        raise ValueError(f"{path} cannot be imported; pass a file named NAME.py")
    sys.path.insert(0, folder)
    module = importlib.import_module(stem)
    if os.path.realpath(getattr(module, "__file__", None) or "") != os.path.realpath(path):
        raise ValueError(f"{path} has the same name as another Python module; rename the file")
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        names = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == stem
        ]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function


def loader_of(made: Any) -> Loader:
    """Return `made` if it is a loader. If it is a data set, create a loader for it."""
    data = sys.modules.get("torch.utils.data")
    is_stream = data is not None and isinstance(made, data.IterableDataset)
    if isinstance(made, MSequence) or (data is not None and isinstance(made, data.DataLoader)):
        loader: Loader = made
        return loader
    if not is_stream and not all(hasattr(type(made), name) for name in ("__getitem__", "__len__")):
        raise ValueError(
            f"make() returned an object of type {type(made).__name__}; return a data set (with "
            "__getitem__ and __len__, or torch's IterableDataset), a torch DataLoader, or a cseq "
            "manager"
        )
    if importlib.util.find_spec("torch") is None:
        options: dict[str, Any] = {"batch_size": BATCH_SIZE, "out_type": "null"}
        return MPSequence(from_dataset(made), num_workers=max(1, cores() - 1), **options)
    from torch.utils.data import DataLoader

    return DataLoader(made, BATCH_SIZE, shuffle=not is_stream)


def look(made: object) -> Made:
    """Describe the object that ``make()`` returned."""
    loader = loader_of(made)
    if isinstance(loader, MSequence):
        return Made(f"{loader!r}", ("none", "manager"), "manager", 0)
    size = f"{len(loader.dataset):,} samples" if hasattr(loader.dataset, "__len__") else "a stream"
    text = f"a torch DataLoader of {type(loader.dataset).__name__}: {size}, batches of "
    text += f"{loader.batch_size}, num_workers={loader.num_workers}"
    current = "torch" if loader.num_workers else "none"
    return Made(text, ("torch", "none", "cseq"), current, loader.num_workers or max(1, cores() - 1))


def row_of(loader: Loader, kind: str, workers: int) -> AbstractContextManager[Any]:
    """Return a context manager that opens the loader for one row of the table."""
    if isinstance(loader, MSequence):
        return loader.start_test() if kind == "none" else loader.start()
    from torch.utils import data

    if kind == "torch" and loader.num_workers == workers:
        return contextlib.nullcontext(loader)
    library: Any = data if kind != "cseq" else importlib.import_module("cseq.adapters.torch")
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if kind != "none" and loader.num_workers:
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    if isinstance(loader.dataset, data.IterableDataset):
        names += ["batch_size", "drop_last"]
    else:
        names += ["batch_size", "sampler"] if loader.batch_sampler is None else ["batch_sampler"]
    options = {name: getattr(loader, name) for name in names}
    count = 0 if kind == "none" else workers
    return contextlib.nullcontext(library.DataLoader(loader.dataset, num_workers=count, **options))


def _some(batches: Iterable[object], seconds: float, most: int) -> Iterator[object]:
    end = time.monotonic() + seconds
    for batch in itertools.islice(batches, most):
        yield batch
        if time.monotonic() > end:
            return


def epochs(loader: Iterable[object]) -> Generator[object, None, None]:
    """Yield the batches of one epoch after another."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the loader has no batches")


def measure(
    loader: Loader, kind: str, workers: int, step: float, seconds: float
) -> Iterator[Figures]:
    """Measure a loader, and yield the figures so far after each measurement."""
    begun = time.perf_counter()
    with row_of(loader, kind, workers) as row, contextlib.closing(epochs(row)) as batches:
        next(batches)
        yield (figures := Figures(first=time.perf_counter() - begun))
        for _ in _some(batches, *WARM):
            pass
        before, begun = cpu_seconds(tree(os.getpid())), time.perf_counter()
        count = sum(1 for _ in _some(batches, seconds, sys.maxsize))
        took = time.perf_counter() - begun
        cpu = max(cpu_seconds(tree(os.getpid())) - before, 0.0) / count
        error = _fallen_back() if kind == "cseq" else ""
        yield (figures := figures._replace(rate=count / took, cpu=cpu, error=error))
        if not step:
            return
        asked = row.stats() if kind in ("cseq", "manager") and not error else None
        yield (figures := figures._replace(waits=_waits(batches, step, seconds)))
        if asked is not None:
            # The current epoch may not have enough batches for advice yet.
            for _ in _some(batches, seconds, 2 * ENOUGH_BATCHES):
                time.sleep(step)
                if row.stats().batches >= ENOUGH_BATCHES:
                    break
            yield figures._replace(advice=str(added(row.stats(), asked).advice()))


def _fallen_back() -> str:
    """Return why torch's workers were used instead of cseq's, or an empty string."""
    from cseq.adapters.torch.fallback import made

    return next((f"torch's own workers ran, because {reason}" for _, reason in made if reason), "")


def _waits(batches: Iterator[Any], step: float, seconds: float) -> float:
    for _ in _some(batches, *WARM):
        time.sleep(step)
    waited, begun = 0.0, time.perf_counter()
    asked = begun
    while asked - begun < seconds:
        next(batches)
        waited += time.perf_counter() - asked
        time.sleep(step)
        asked = time.perf_counter()
    return waited / (asked - begun)


def _explain(error: Exception) -> str:
    """Return cseq's message, or the traceback of user code."""
    trace = error.__traceback__
    # Windows' embeddable Python was compiled elsewhere, so its frames do not contain
    # importlib.__file__. The last prefix is for "<frozen importlib._bootstrap>".
    inner = (__file__, importlib.import_module.__code__.co_filename, "<")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(inner):
        trace = trace.tb_next
    if isinstance(error, ValueError) and trace is None:
        return str(error)
    return "".join(traceback.format_exception(type(error), error, trace)).strip()


def seconds_of(text: str) -> float:
    """Parse a duration, such as '30ms', '0.5s', '800us' or a number of seconds."""
    for unit, scale in (("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            with contextlib.suppress(ValueError):
                value = float(text[: len(text) - len(unit)]) * scale
                if 0 < value <= 60:
                    return value
            break
    raise ValueError(f"{text!r} is not a valid duration; pass at most 60s, such as 30ms or 800us")


def bench(target: str, step: float = 0.0, seconds: float = MEASURED) -> int | str:
    """Measure all rows and print a table. Return the exit status, or an error message.

    If `step` is not 0, also measure the waiting time. Each measurement takes `seconds`.
    """
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        return f"cseq bench: {target!r} is not of the form FILE.py:make"
    # Otherwise, the file and its workers would see the arguments of `cseq bench`.
    sys.argv = [path]
    try:
        make = load(path, name)
        made = look(make())
    except Exception as error:  # noqa: BLE001 - it is returned as text
        return f"cseq bench: {target}: {_explain(error)}"
    waits = f"waits at {duration(step)}" if step else ""
    print(f"{name}() returned {made.text}")  # noqa: T201
    print(_columns("", *HEADS, waits), flush=True)  # noqa: T201
    measured: dict[str, Figures] = {}
    for kind in made.kinds:
        measured[kind] = _row(make, kind, made.workers, step, seconds)
        print(_line(kind, made, measured), flush=True)  # noqa: T201
    for line in said(measured, made.current, step):
        print(f" → {line}")  # noqa: T201
    return 0


def _row(make: Callable[[], object], kind: str, workers: int, *seconds: float) -> Figures:
    """Measure a row. After an error, return the figures so far."""
    figures = Figures()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for later in measure(loader_of(make()), kind, workers, *seconds):
                figures = later
        except Exception as error:  # noqa: BLE001 - it is in the figures
            figures = figures._replace(error=_explain(error))
    return figures


def _columns(label: str, *cells: str) -> str:
    return f" {label:<24}{''.join(f'{cell:>15}' for cell in cells)}".rstrip()


def _line(kind: str, made: Made, measured: Mapping[str, Figures]) -> str:
    figures = measured[kind]
    label = LABELS[kind] + (f", {made.workers}" if kind in ("torch", "cseq") else "")
    row = _columns(
        label,
        f"{figures.rate:,.1f}" if figures.rate else "–",
        "–" if not figures.cpu else duration(figures.cpu),
        "–" if figures.first is None else duration(figures.first),
        "" if figures.waits is None else f"{figures.waits:.0%}",
    )
    return "\n".join([row, *(f"     {line}" for line in figures.error.splitlines())])


def said(measured: Mapping[str, Figures], current: str, step: float) -> list[str]:
    """Describe the speedup that free data would bring, and give cseq's advice."""
    if not any(figures.rate for figures in measured.values()):
        return ["nothing could be measured: see above"]
    if not step:
        return ["pass, for example, --step 30ms to see how long such a loop waits, and what helps"]
    lines = []
    waits = measured[current].waits
    if waits is not None:
        gain = 1 / max(1 - waits, 0.001)
        lines.append(
            f"if data were free, a loop of {duration(step)} would be {gain:.1f} times as fast"
        )
    lines += [
        f"{LABELS[kind]}: {figures.advice}" for kind, figures in measured.items() if figures.advice
    ]
    return lines
