"""The iterator of a loader: cseq's, or torch's own where that cannot be."""

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
    "the state that was loaded cannot be used: this loader has torch's own iterator, which begins "
    "at the first batch, since %s; load_state_dict({}) drops the state"
)

# How many iterators there were, by their loader's class, and why they were torch's, if they were.
made: Counter[tuple[str, str | None]] = Counter()


def note(loader: DataLoader[Any], reason: str | None) -> None:
    """Count an iterator, for the lines that ``cseq run`` ends with."""
    kind = type(loader)
    made[f"{kind.__module__}.{kind.__qualname__}", reason] += 1


def lines() -> Iterator[str]:
    """Say whether the iterators of each class of loaders were cseq's, and why not."""
    for (loader, reason), count in made.items():
        number = "1 iterator" if count == 1 else f"{count} iterators"
        whose = "cseq's" if reason is None else f"torch's own, since {reason}"
        yield f"{loader}: {number}, {whose}"


def _can_torch(loader: data.DataLoader[Any]) -> bool:
    """Whether torch's own workers can be sent what cseq's cannot, by multiprocessing's pickler.

    A library may have registered with that how its objects travel.
    """
    # It needs the child's process.
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
    """Return what a loader's workers are: what it was given; or `default`, if that can be.

    Threads share a data set: one that is iterated over has to be written for that.
    """
    first = VALUES["worker_method"][0]
    given: str = getattr(loader, "worker_method", None) or first
    if given != first or loader._dataset_kind == names.ITERABLE:
        return given
    return first if loader.multiprocessing_context is not None else default


def reason_against(loader: data.DataLoader[Any], worker_method: str = "") -> str | None:
    """Say why a loader cannot have an iterator of cseq's, if it cannot."""
    if names.REASON is not None:
        return names.REASON
    for name, default in names.UNKNOWN.items():
        value = getattr(loader, name, inspect.Parameter.empty)
        if value is not default and value != default:
            return f"cseq does not know what its {name}={value!r} is"
    # They take part in how torch starts processes.
    if isinstance(loader.dataset, names.DATAPIPES):
        return "its data set is a datapipe"
    if loader.num_workers == 0 or worker_method == "thread":
        return None
    chosen = loader.multiprocessing_context
    # Another one may start processes of its own.
    if chosen is not None and type(chosen).__module__ != "multiprocessing.context":
        return f"its multiprocessing_context is {chosen!r}"
    method = start_method_of(loader)
    if method not in start_methods():
        return f"cseq does not start processes by {method!r} here"
    return None


def tell_lost(loader: DataLoader[Any]) -> None:
    """Warn, once, of what a framework loses that makes a loader of torch's class of this one."""
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
        "accelerate makes a loader of torch's class of this cseq.DataLoader, without %s: %s, "
        "before the first loop",
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
    """Make an iterator of cseq's, or, where that cannot be, torch's own by `otherwise`.

    The loader gets its `LoaderProgress`, and the reason why it is torch's. The log says why, and
    which options (`rng`, `on_error`) that one does not have, once for a loader.

    Raises
    ------
    ValueError
        A state was loaded, which torch's own iterator cannot use.
    """
    iterator: Any = None
    options = options._replace(worker_method=method_of(loader, options.worker_method))
    has_processes = loader.num_workers > 0 and options.worker_method != "thread"
    reason = reason_against(loader, options.worker_method)
    if reason is None:
        # The engine: for the first loader.
        from cseq.adapters.torch.iterator import LoaderIterator

        if has_processes:
            loader.check_worker_number_rationality()
        chosen = loader.generator or torch.default_generator
        is_pickled = has_processes and start_method_of(loader) != "fork"
        before = (read_sources(), chosen.get_state()) if is_pickled else None
        try:
            iterator = LoaderIterator(loader, options, resume)
        except UnpicklableError as error:
            reason = str(error).replace("producer.", "").replace("the producer", "the data set")
            if before is None or not _can_torch(loader):
                error.args = (reason,)
                raise
            # What the beginning of an iterator may have drawn from.
            set_sources(before[0])
            chosen.set_state(before[1])
    if reason is not None:
        if resume is not None:
            raise ValueError(UNUSABLE % reason)
        # With this torch, all loaders have the same reason.
        warned = data.DataLoader if reason is names.REASON else loader
        if warned not in _warned:
            _warned.add(warned)
            given = zip(VALUES.items(), options, strict=False)
            lost = [f"{name}={value!r}" for (name, values), value in given if value != values[0]]
            more = f"; it cannot do {', '.join(lost)}" if lost else ""
            log.warning("DataLoader: torch's own iterator is used, since %s%s", reason, more)
        iterator = otherwise()
    note(loader, reason)
    vars(loader).update(_progress=getattr(iterator, "progress", None), _reason=reason)
    return iterator
