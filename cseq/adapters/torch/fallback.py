"""Chooses between cseq's iterator and torch's own."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data

from cseq.adapters.torch import names
from cseq.adapters.torch.options import VALUES, Options, defaults, start_method_of
from cseq.adapters.torch.order import read_sources, set_sources
from cseq.encoding.pickling import UnpicklableError
from cseq.processes.launcher import start_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

log = logging.getLogger("cseq")

UNUSABLE = (
    "the loaded state cannot be used, because torch's own iterator starts at the first batch; call "
    "load_state_dict({}) to drop the state. This loader falls back to torch's iterator because %s"
)

# Number of iterators created, keyed by loader class and reason for the fallback.
made: Counter[tuple[str, str | None]] = Counter()


def note(loader: DataLoader[Any], reason: str | None) -> None:
    """Count an iterator for the summary of ``cseq run``."""
    kind = type(loader)
    made[f"{kind.__module__}.{kind.__qualname__}", reason] += 1


def lines() -> Iterator[str]:
    """Yield one summary line for each loader class and reason."""
    for (loader, reason), count in made.items():
        number = "1 iterator" if count == 1 else f"{count} iterators"
        whose = "cseq's" if reason is None else f"torch's own, because {reason}"
        yield f"{loader}: {number}, {whose}"


def _can_torch(loader: data.DataLoader[Any]) -> bool:
    """Return True if multiprocessing can pickle a loader even though cseq cannot.

    Some libraries register reducers with multiprocessing.
    """
    # On Windows, trying this would require a child process.
    if os.name == "nt":
        return True
    from cseq.processes.spawning import spawning

    try:
        with spawning():
            ForkingPickler.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    except Exception:  # noqa: BLE001 - whatever the user's class raises
        return False
    return True


def method_of(loader: data.DataLoader[Any], default: str) -> str:
    """Return a loader's worker method.

    By default, IterableDatasets do not use threads, because threads share the data set.
    """
    first = VALUES["worker_method"][0]
    given: str = getattr(loader, "worker_method", None) or first
    if given != first or loader._dataset_kind == names.ITERABLE:
        return given
    return first if loader.multiprocessing_context is not None else default


def reason_against(loader: data.DataLoader[Any], worker_method: str = "") -> str | None:
    """Return the reason a loader cannot use cseq's iterator, or None if it can."""
    if names.REASON is not None:
        return names.REASON
    for name, default in names.UNKNOWN.items():
        value = getattr(loader, name, inspect.Parameter.empty)
        if value is not default and value != default:
            return f"cseq does not support its argument {name}={value!r}"
    # torch handles datapipes specially when it starts processes.
    if isinstance(loader.dataset, names.DATAPIPES):
        return "its data set is a datapipe"
    if loader.num_workers == 0 or worker_method == "thread":
        return None
    chosen = loader.multiprocessing_context
    # A custom context may start processes differently.
    if chosen is not None and type(chosen).__module__ != "multiprocessing.context":
        return f"its multiprocessing_context={chosen!r} is not one of Python's own contexts"
    method = start_method_of(loader)
    if method not in start_methods():
        return f"cseq does not support the start method {method!r} on this system"
    return None


def tell_lost(loader: DataLoader[Any]) -> None:
    """Warn once if a framework rebuilds a loader and loses its options."""
    is_installed = data.DataLoader._get_iterator.__module__ != data.DataLoader.__module__
    lost = [] if is_installed else ["cseq's workers"]
    remedy = [] if is_installed else ["call cseq.adapters.torch.install()"]
    for name, (first, *_) in VALUES.items():
        default = getattr(defaults, name)
        value = getattr(loader, name) or default
        if value != (default if is_installed else first):
            lost.append(f"{name}={value!r}")
        if value != default:
            remedy.append(f"set cseq.adapters.torch.defaults.{name} = {value!r}")
    if lost:
        _warn_of_loss(", ".join(lost), ", ".join(remedy))


@functools.cache
def _warn_of_loss(lost: str, remedy: str) -> None:
    log.warning(
        "accelerate rebuilds this cseq.DataLoader as a torch DataLoader, which loses %s; before "
        "the first loop, %s",
        lost,
        remedy,
    )


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def make_iterator(
    loader: data.DataLoader[Any],
    otherwise: Callable[[], object],
    options: Options,
    resume: dict[str, Any] | None = None,
) -> object:
    """Create cseq's iterator, or call `otherwise` to create torch's own.

    The reason for a fallback is logged once per loader. With a loaded state, a fallback raises
    ValueError instead, because torch's iterator cannot resume.
    """
    iterator: Any = None
    options = options._replace(worker_method=method_of(loader, options.worker_method))
    has_processes = loader.num_workers > 0 and options.worker_method != "thread"
    reason = reason_against(loader, options.worker_method)
    if reason is None:
        # Imported only here, because this loads the engine.
        from cseq.adapters.torch.iterator import LoaderIterator

        if has_processes:
            loader.check_worker_number_rationality()
        chosen = loader.generator or torch.default_generator
        is_pickled = has_processes and start_method_of(loader) != "fork"
        before = (read_sources(), chosen.get_state()) if is_pickled else None
        try:
            iterator = LoaderIterator(loader, options, resume)
        except UnpicklableError as error:
            reason = str(error).replace("the producer", "the data set").replace("producer.", "")
            if before is None or not _can_torch(loader):
                error.args = (reason,)
                raise
            # The failed attempt may have drawn random numbers.
            set_sources(before[0])
            chosen.set_state(before[1])
    if reason is not None:
        if resume is not None:
            raise ValueError(UNUSABLE % reason)
        # An unsupported version of torch affects all loaders, so warn only once.
        warned = data.DataLoader if reason is names.REASON else loader
        if warned not in _warned:
            _warned.add(warned)
            given = options._asdict()
            lost = [
                f"{name}={given[name]!r}"
                for name, (first, *_) in VALUES.items()
                if given[name] != first
            ]
            more = f"; it ignores {', '.join(lost)}" if lost else ""
            log.warning("DataLoader falls back to torch's own iterator because %s%s", reason, more)
        iterator = otherwise()
    note(loader, reason)
    vars(loader).update(_progress=getattr(iterator, "progress", None), _reason=reason)
    return iterator
