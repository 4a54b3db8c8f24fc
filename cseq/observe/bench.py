"""``cseq bench FILE.py:make``: one data set, through several loaders.

Each row is measured in a process of its own, which calls ``make()`` there and writes what it knows
so far into a file; the parent reads that when the process has ended, or was ended::

    bench ──► python -m cseq.observe.bench FILE.py make 'cseq' … ──► file of JSON ──► a line
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.advice import ENOUGH_BATCHES, LITTLE, Window
from cseq.advice import advise as why
from cseq.arguments import Size
from cseq.compute import cores
from cseq.indexing.dataset import from_dataset
from cseq.kinds import MPSequence, MTSequence
from cseq.observe.figures import duration
from cseq.observe.processes import cpu_seconds, memory, queued_seconds, tree
from cseq.sequence import MSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

__all__ = ["Figures", "Row", "advise", "bench", "epochs", "seconds_of"]

DEADLINE = 40.0  # seconds for a row, with the start of its process
MEASURED = 5.0  # seconds for the rate, and as many for the waiting
COMPARED = 2.0, 64  # seconds, and batches, at most
WARM = 0.5, 20  # the same, before anything is counted
DRAWN = 2.0, 100_000  # the same, for the batches' indices, which threads are given
BATCH_SIZE = 32  # of a data set
BETTER = 1.1  # times the rate, from which a difference is one
FREE = ", and what it would gain if data were free"
SEED = 1
BAD = 2  # exit status
MANAGER, LOADER, DATASET = "a manager of cseq", "a torch DataLoader", "a data set"


class Made(NamedTuple):
    """What ``make()`` has returned.

    Attributes
    ----------
    text : str
        The line about it.
    kind : str
        Of what is measured: a data set is put into torch's DataLoader, if there is torch.
    current : str
        The row that is as it was made.
    workers : int
        That are to be tried.
    """

    text: str
    kind: str
    current: str
    workers: int


class Row(NamedTuple):
    """One of the loaders: 'none', 'torch', 'cseq' or 'threads', and what it is called."""

    kind: str
    label: str
    workers: int


class Figures(NamedTuple):
    """What was measured of a loader, as far as it came.

    Attributes
    ----------
    rate : float
        Batches a second; 0: not known.
    cpu : float or None
        CPU seconds of all its processes for a batch.
    queued : float
        Seconds for a batch in which these were ready to run, but had no core; 0: not known.
    waits : float or None
        Part of the time that a loop of the given step waits.
    first : float or None
        Seconds from ``iter()`` to the first batch.
    memory : int
        Bytes of all its processes, where what they share counts once; 0: not known.
    prints : sequence of str
        Digests of the first batches.
    same : bool or None
        Whether these are those of the first row.
    error : str
        Why it was not measured, or not to its end.
    """

    rate: float = 0.0
    cpu: float | None = None
    queued: float = 0.0
    waits: float | None = None
    first: float | None = None
    memory: int = 0
    prints: Sequence[str] = ()
    same: bool | None = None
    error: str = ""


# -- in the process of a row


def load(path: str, name: str) -> Callable[[], Any]:
    """Return the function of a file; ValueError says what is wrong."""
    folder, file = os.path.split(os.path.abspath(path))
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    stem, ending = os.path.splitext(file)
    if ending != ".py" or "." in stem:
        raise ValueError(f"{path} cannot be imported; give a file whose name is NAME.py")
    sys.path.insert(0, folder)
    module = importlib.import_module(stem)
    if os.path.realpath(getattr(module, "__file__", None) or "") != os.path.realpath(path):
        raise ValueError(f"{path} has the name of a module of Python's; rename the file")
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        there = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == stem
        ]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(there) or 'none'}")
    return function


def kind_of(made: Any) -> str:
    """Name the kind of what ``make()`` has returned; ValueError if it is none."""
    data = sys.modules.get("torch.utils.data")
    if isinstance(made, MSequence):
        return MANAGER
    if data is not None and isinstance(made, data.DataLoader):
        return LOADER
    if _is_stream(made) or all(hasattr(type(made), each) for each in ("__getitem__", "__len__")):
        return DATASET
    raise ValueError(
        f"make() returned an object of {type(made).__name__}; let it return a data set (with "
        "__getitem__ and __len__, or torch's IterableDataset), a torch DataLoader, or a manager of "
        "cseq"
    )


def _is_stream(dataset: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, data.IterableDataset)


def look(made: Any) -> Made:
    """Say what was made."""
    kind, most = kind_of(made), max(1, cores() - 1)
    if kind == MANAGER:
        workers = made._job.start.num_workers
        is_thread = made._thread_type == "thread"
        text = f"{kind}: {made.dset_size:,} samples, batches of {made.batch_size}"
        current = ("threads" if is_thread else "cseq") if workers else "none"
        return Made(f"{text}, num_workers={workers}", kind, current, workers or most)
    dataset = made.dataset if kind == LOADER else made
    size = f"{len(dataset):,} samples" if hasattr(type(dataset), "__len__") else "a stream"
    text = f"{kind}, {type(dataset).__name__}: {size}"
    if kind == LOADER:
        workers = made.num_workers
        text = f"{text}, batches of {made.batch_size}, num_workers={workers}"
        return Made(text, kind, "torch" if workers else "none", workers or most)
    text = f"{text}; taken in shuffled batches of {BATCH_SIZE}"
    return Made(text, LOADER if _has_torch() else kind, "none", most)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def loader_of(made: Any, kind: str, workers: int) -> Any:
    """Return the loader of a row: something to iterate over, or a manager."""
    what = kind_of(made)
    if what == DATASET and _has_torch():
        from torch.utils.data import DataLoader

        made = DataLoader(made, BATCH_SIZE, shuffle=not _is_stream(made))
    elif what == DATASET:
        options: dict[str, Any] = {"batch_size": BATCH_SIZE, "out_type": "null", "seed": SEED}
        type_ = MTSequence if kind == "threads" else MPSequence
        return type_(from_dataset(made), num_workers=0 if kind == "none" else workers, **options)
    elif what == MANAGER:
        return _manager_of(made, kind, workers)
    if kind == "threads":
        return _threads_of(made, workers)
    if kind == "torch" and made.num_workers == workers:
        return made
    if kind == "cseq":
        from cseq.adapters.torch import DataLoader
    else:
        from torch.utils.data import DataLoader
    return DataLoader(made.dataset, **_arguments(made, 0 if kind == "none" else workers))


def _arguments(loader: Any, workers: int) -> dict[str, Any]:
    """Return the arguments that a loader was made with, for another number of workers."""
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if workers and loader.num_workers:
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    if _is_stream(loader.dataset):
        names += ["batch_size", "drop_last"]
    else:
        names += ["batch_sampler"] if loader.batch_sampler is not None else ["sampler"]
    found = {name: getattr(loader, name) for name in names}
    if "sampler" in found:
        found["batch_size"] = None
    return {**found, "num_workers": workers}


def _manager_of(manager: Any, kind: str, workers: int) -> Any:
    """Have a manager work with processes, with threads, or with neither; with one seed."""
    job, count = manager._job, 0 if kind == "none" else workers
    manager._job = job._replace(
        sampler=job.sampler.changed(seed=SEED),
        num_workers=count,
        start=Size(count, job.start.buffer),
        auto=(False, job.auto[1]),
    )
    manager._thread_type = "thread" if kind == "threads" else "proc"
    return manager


def _threads_of(loader: Any, workers: int) -> Any:
    """Return a manager of threads that makes the batches of torch's loader, in its order."""
    if _is_stream(loader.dataset) or loader.batch_size is None or loader.batch_sampler is None:
        raise ValueError("threads take batches of a data set with __getitem__ alone")
    indices: list[int] = []
    for batch in _some(_batches_of_indices(loader), *DRAWN):
        indices += batch
    return MTSequence(
        from_dataset(loader.dataset, loader.collate_fn),
        np.asarray(indices, np.int64),
        workers,
        batch_size=loader.batch_size,
        shuffle=False,
        out_type="null",
        drop_last=loader.drop_last,
    )


class _Numbers:
    """A data set whose samples are their indices."""

    def __getitem__(self, index: int) -> int:
        return index


def _batches_of_indices(loader: Any) -> Iterable[list[int]]:
    """Return what torch would make batches of, after the draws that torch makes."""
    from torch.utils.data import DataLoader

    numbers: Any = _Numbers()
    seed(loader)
    return DataLoader(
        numbers, batch_sampler=loader.batch_sampler, generator=loader.generator, collate_fn=list
    )


def _some(batches: Iterable[Any], seconds: float, most: int) -> Iterator[Any]:
    """Yield some, as long as the time is."""
    end = time.monotonic() + seconds
    for batch in itertools.islice(batches, most):
        yield batch
        if time.monotonic() > end:
            return


def seed(loader: Any) -> None:
    """Have each row begin with the same random numbers."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - what data sets draw from
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)
        if isinstance(getattr(loader, "generator", None), torch.Generator):
            loader.generator.manual_seed(SEED)


def digest(batch: Any) -> str:
    """Return a digest of a batch's structure, types and bits."""
    hashed = hashlib.blake2b(digest_size=16)
    _feed(batch, hashed.update)
    return hashed.hexdigest()


def _feed(value: Any, put: Callable[[bytes], object]) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        put(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        value = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        put(value.tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        put(f"array {value.dtype} {value.shape}".encode())
        put(value.tobytes())
    elif isinstance(value, Mapping):
        put(f"mapping {len(value)}".encode())
        for key in value:
            put(repr(key).encode())
            _feed(value[key], put)
    elif isinstance(value, (list, tuple)):
        put(f"{type(value).__name__} {len(value)}".encode())
        for each in value:
            _feed(each, put)
    else:
        put(f"{type(value).__name__} {value!r}".encode())


def epochs(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the loader has no batches")


def measure(loader: Any, step: float, seconds: float) -> Iterator[Figures]:
    """Measure a loader for some seconds, twice with a step; yield what is known, more each time."""
    with contextlib.ExitStack() as stack:
        seed(loader)
        begun = time.perf_counter()
        started = stack.enter_context(loader.start()) if isinstance(loader, MSequence) else loader
        batches = epochs(started)
        batch = next(batches)
        known = Figures(first=time.perf_counter() - begun)
        # Threads were given the order of the first epoch alone.
        most = min(COMPARED[1], len(loader) if isinstance(loader, MSequence) else sys.maxsize)
        prints = [digest(batch)]
        prints += [digest(batch) for batch in _some(batches, COMPARED[0], most - 1)]
        yield (known := known._replace(prints=prints))
        for _ in _some(batches, *WARM):
            pass
        processes = tree(os.getpid())
        before, queued = cpu_seconds(processes), queued_seconds(processes)
        begun = time.perf_counter()
        count = sum(1 for _ in _some(batches, seconds, sys.maxsize))
        took = time.perf_counter() - begun
        processes = tree(os.getpid())
        known = known._replace(
            rate=count / took,
            cpu=max(cpu_seconds(processes) - before, 0.0) / count,
            queued=max(queued_seconds(processes) - queued, 0.0) / count,
            memory=memory(processes),
        )
        yield known
        if step:
            yield known._replace(waits=_waits(batches, step, seconds))


def _waits(batches: Iterator[Any], step: float, seconds: float) -> float:
    """Return the part of the time that a loop waits whose step takes so long without computing."""
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


def _told(error: Exception) -> str:
    """Return what is wrong: a message of ours, or where the user's code has failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<")):
        trace = trace.tb_next
    if isinstance(error, ValueError) and trace is None:
        return str(error)
    return "".join(traceback.format_exception(type(error), error, trace)).strip()


def _serve(path: str, name: str, kind: str, *numbers: str) -> None:
    """Be the process of a row: the answer is a file of JSON, written anew each time."""
    workers, step, seconds, answer = numbers

    def tell(value: Any) -> None:
        with open(f"{answer}.new", "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(f"{answer}.new", answer)

    if kind == "look":
        try:
            tell(look(load(path, name)()))
        except Exception as error:  # noqa: BLE001 - it is told
            tell(_told(error))
        return
    known = Figures()
    try:
        loader = loader_of(load(path, name)(), kind, int(workers))
        for known in measure(loader, float(step), float(seconds)):
            tell(known._asdict())
    except Exception as error:  # noqa: BLE001 - it is told
        known = known._replace(error=_told(error))
        tell(known._asdict())
    if kind == "cseq" and not known.error:
        from cseq.adapters.torch.fallback import made

        reasons = [reason for _, reason in made if reason]
        if reasons:
            tell(known._replace(error=f"torch's own workers, since {reasons[0]}")._asdict())


# -- in the parent


def seconds_of(text: str) -> float:
    """Read a duration: '30ms', '0.5s', '800us', or seconds; ValueError if it is none."""
    for unit, scale in (("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            with contextlib.suppress(ValueError):
                value = float(text[: len(text) - len(unit)]) * scale
                if 0 < value <= 60:  # NaN is not
                    return value
            break
    raise ValueError(f"{text!r} is no duration up to a minute; give 30ms, 0.5s or 800us")


def _ask(target: tuple[str, str], kind: str, *numbers: float) -> tuple[Any, str]:
    """Run the process of a row: its workers, step, seconds.

    Return its answer, None without one, and why that is not whole.
    """
    with tempfile.TemporaryDirectory(prefix="cseq-bench-") as folder:
        answer = os.path.join(folder, "answer")
        with open(os.path.join(folder, "said"), "w+b") as said:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "cseq.observe.bench", *target, kind,
                 *map(repr, numbers), answer],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
            problem = ""
            try:
                status = process.wait(DEADLINE)
                if status:
                    said.seek(0)
                    lines = said.read().decode(errors="replace").strip().splitlines()
                    problem = "\n".join(lines[-30:]) or f"its process ended with {status}"
            except subprocess.TimeoutExpired:
                problem = f"not done after {DEADLINE:.0f} s"
            finally:
                _end(process)
        try:
            with open(answer, encoding="utf-8") as file:
                return json.load(file), problem
        except OSError:
            return None, problem or "it gave no answer"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and with it its workers."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def rows_of(made: Made) -> list[Row]:
    """Return what is to be measured; the first one has the batches that the others should have."""
    workers, rows = made.workers, [Row("none", "no loader, in process", 0)]
    if made.kind == LOADER:
        rows.insert(0, Row("torch", f"torch DataLoader, {workers}", workers))
    name = "cseq.DataLoader" if made.kind == LOADER else "cseq processes"
    rows.append(Row("cseq", f"{name}, {workers}", workers))
    return [*rows, Row("threads", f"cseq threads, {workers}", workers)]


def bench(
    target: str, step: float = 0.0, output: str | None = None, seconds: float = MEASURED
) -> int:
    """Measure all rows, and print a table; return the exit status.

    Parameters
    ----------
    target : str
        FILE.py:make.
    step : float
        Seconds; 0: no waiting is measured.
    output : str, optional
        A file for the figures, as JSON.
    seconds : float
        How long each row is measured for its rate, and again for its waiting.
    """
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        return _complain(f"{target!r} is not FILE.py:make: a file, and a function in it")
    if output is not None:
        with open(output, "a", encoding="utf-8"):  # an OSError comes now, not after a minute
            pass
    found, problem = _ask((path, name), "look", 0, 0.0, 0.0)
    if not isinstance(found, list):
        return _complain(f"{target}: {found or problem}")
    made = Made(*found)
    print(f"{name}() returned {made.text}")  # noqa: T201
    print(_head(step), flush=True)  # noqa: T201
    rows = rows_of(made)
    measured: dict[str, Figures] = {}
    for row in rows:
        told, problem = _ask((path, name), row.kind, row.workers, step, seconds)
        figures = Figures(**(told or {}))
        if problem:
            figures = figures._replace(error=problem)
        if measured:
            figures = figures._replace(same=_same(figures, measured[rows[0].kind]))
        measured[row.kind] = figures
        print(_line(row, figures, step), flush=True)  # noqa: T201
    said = advise(made, measured, step, cores())
    for line in said:
        print(f" → {line}")  # noqa: T201
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            each = {row.label: measured[row.kind]._asdict() for row in rows}
            json.dump({"made": made.text, "step": step, "rows": each, "advice": said}, file)
    return 0


def _complain(message: str) -> int:
    print(f"cseq bench: {message}", file=sys.stderr)  # noqa: T201
    return BAD


HEADS = ("batches/s", "CPU a batch", "", "first batch", "memory", "same batches")
WIDTHS = (10, 12, 15, 12, 10, 13)


def _head(step: float) -> str:
    heads = list(HEADS)
    heads[2] = f"waits at {duration(step)}" if step else ""
    return _columns("", heads, step)


def _columns(label: str, cells: Sequence[str], step: float) -> str:
    shown = [
        f"{cell:>{width}}"
        for k, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
        if step or k != 2
    ]
    return f" {label:<24}" + "".join(shown)


def _line(row: Row, figures: Figures, step: float) -> str:
    """Write a row, and its error in the lines after it."""
    cells = [
        f"{figures.rate:,.1f}" if figures.rate else "–",
        "–" if not figures.cpu else duration(figures.cpu),
        "–" if figures.waits is None else f"{figures.waits:.0%}",
        "–" if figures.first is None else duration(figures.first),
        _size(figures.memory) if figures.memory else "–",
        {None: "", True: "yes", False: "no"}[figures.same],
    ]
    lines = [_columns(row.label, cells, step)]
    return "\n".join(lines + [f"     {line}" for line in figures.error.splitlines()]).rstrip()


def _same(figures: Figures, first: Figures) -> bool | None:
    """Tell whether two loaders' first batches are the same; None: one has none."""
    pairs = list(zip(figures.prints, first.prints, strict=False))
    return all(ours == theirs for ours, theirs in pairs) if pairs else None


def advise(made: Made, measured: Mapping[str, Figures], step: float, cores: int) -> list[str]:
    """Say what free data would gain, and which of the loaders to take: one of them.

    The first one that is about as good as the best, in this order: as it is, no workers, torch's,
    `cseq.DataLoader`, threads (if these make the same batches).

    Parameters
    ----------
    made : Made
    measured : dict
        By kind of row.
    step : float
        Seconds; 0: not known.
    cores : int

    Returns
    -------
    list of str
        Lines.
    """
    order = dict.fromkeys((made.current, "none", "torch", "cseq", "threads"))
    found = {kind: measured[kind] for kind in order if kind in measured and measured[kind].rate}
    if made.kind == LOADER and found.get("threads", Figures()).same is False:
        del found["threads"]
    waits = {kind: each.waits for kind, each in found.items() if each.waits is not None}
    if waits:
        most = max(LITTLE, min(waits.values()) + LITTLE)
        best = next(kind for kind, share in waits.items() if share <= most)
    elif found:
        least = max(each.rate for each in found.values()) / BETTER
        best = next(kind for kind, each in found.items() if each.rate >= least)
    else:
        return ["nothing could be measured: see above"]
    said = f"{_change(made, best)}{_gain(found, waits, made.current, best, step)}"
    if waits and waits[best] >= LITTLE and best != "none":
        said += _more(found[best], made.workers, step, cores)
    if made.current in waits:
        free = 1 / max(1 - waits[made.current], 0.001)
        return [f"if data were free, a loop of {duration(step)} would be {_times(free)}", said]
    if not step:
        return [said, f"with --step 30ms, say: how much such a loop waits{FREE}"]
    return [said]


def _change(made: Made, best: str) -> str:
    """Write what to write into a script."""
    if best == made.current:
        return "leave it as it is"
    if best == "none":
        return "num_workers=0"
    kind = {LOADER: "from cseq import DataLoader", MANAGER: "thread_type='proc'"}
    change = kind.get(made.kind, "cseq.MPSequence(cseq.from_dataset(dataset), …)")
    if best == "threads":
        kind = {LOADER: "cseq.MTSequence(cseq.from_dataset(dataset, collate_fn), …)"}
        change = kind.get(made.kind, "thread_type='thread'")
    elif best == "torch":
        return f"num_workers={made.workers}"
    return f"{change}, num_workers={made.workers}"


def _times(gain: float) -> str:
    return f"{gain:.1f} times as fast"


def _gain(
    found: Mapping[str, Figures], waits: Mapping[str, float], now: str, best: str, step: float
) -> str:
    """Say what was measured of the loader that is the best, against the present one."""
    if waits:
        said = f": a loop of {duration(step)} waits {waits[best]:.0%} of the time"
        if best != now and now in waits:
            times = (1 - waits[best]) / max(1 - waits[now], 0.001)
            said += f", not {waits[now]:.0%}: {_times(times)}"
        return said
    if best == now:
        return f": no other one has {BETTER} times its rate"
    return f": {found[best].rate / found[now].rate:.1f} times the rate" if now in found else ""


def _more(chosen: Figures, workers: int, step: float, cores: int) -> str:
    """Say what may help beside that, which was not measured: more workers, if there are cores."""
    assert chosen.waits is not None
    each = chosen.rate / workers  # batches a second of a worker, which is busy all the time then
    window = Window(
        batches=ENOUGH_BATCHES, elapsed=ENOUGH_BATCHES * step / (1 - chosen.waits),
        waited=ENOUGH_BATCHES * step * chosen.waits / (1 - chosen.waits), step=step, index=1 / each,
        workers=workers, busy=1.0, cpu=chosen.cpu and chosen.cpu * each,
        queued=chosen.queued * each, loop_cpu=0.0, cores=cores,
    )  # fmt: skip
    more = why(window)
    if min(more.gain, window.most) < BETTER:
        return ""
    if more.cause in ("medium", "workers"):
        return f"; {more.action} may do better"
    cost = chosen.cpu and f": a batch costs {duration(chosen.cpu)} of CPU"
    return f"; more workers need more than {cores} cores{cost or ''}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


if __name__ == "__main__":
    _serve(*sys.argv[1:])
