"""torch's DataLoader with cseq's worker processes and resumable state."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils import data

from cseq.adapters.torch import names
from cseq.adapters.torch.fallback import (
    UNUSABLE,
    make_iterator,
    method_of,
    reason_against,
    tell_lost,
)
from cseq.adapters.torch.options import VALUES, Options, defaults
from cseq.adapters.torch.order import Keys, Layers, Shares
from cseq.adapters.torch.state import LoaderProgress, resumed
from cseq.adapters.torch.stateful import is_stateful
from cseq.check import choice, flag, integer, unexpected
from cseq.indexing.dataset import refuse_class
from cseq.options import MAX_RESTARTS
from cseq.order.base import Order

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from multiprocessing.context import BaseContext
    from typing import Literal

    import torch

    from cseq.indexing.leaving import Skipped
    from cseq.measure.advice import Advice
    from cseq.measure.stats import Stats
    from cseq.runs import Run

__all__ = ["DataLoader", "StatefulDataLoader"]

log = logging.getLogger("cseq")

NOT_SHARED = dict.fromkeys(Shares._fields)
SHUFFLE = {data.RandomSampler: True, data.SequentialSampler: False}
# Hints for arguments that a DataLoader names differently or lacks.
ELSEWHERE = {
    "buffer": "use prefetch_factor=, the number of batches per worker",
    "collate": "use collate_fn=",
    "device": "batches are made on the CPU; pass pin_memory=True, and move them in the loop",
    "order": "pass it as sampler=, or as batch_sampler= if it makes whole batches",
    "out_type": "batches are made on the CPU; pass pin_memory=True, and move them in the loop",
    "seed": "pass generator=torch.Generator().manual_seed(seed); with rng='batch', the data set's "
    "random numbers do not depend on the workers either",
    "shard": "pass a sampler with this rank's indices, such as torch's DistributedSampler",
    "start_method": "use multiprocessing_context=",
}

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    Torchs = data.DataLoader
# Some versions of torch have a second type parameter.
else:
    Torchs = {T_co: names.as_generic(data.DataLoader)}


class DataLoader(Torchs[T_co]):
    """A replacement for torch's DataLoader that uses cseq's worker processes.

    All arguments, attributes and methods of `torch.utils.data.DataLoader` are supported. With the
    same seeds and number of workers, batches are bit-identical to torch's. Dead workers are
    replaced, and `load_state_dict` can resume in the middle of an epoch. See "What differs from
    torch's DataLoader" in the documentation.

    Parameters
    ----------
    *args, **kwargs
        The arguments of torch's DataLoader. `sampler` and `batch_sampler` can be a `cseq.Order`.
    rng : {None, 'worker', 'batch'}
        When to seed the global generators of `random`, `numpy.random` and torch. 'worker' seeds
        them once in each worker, as torch does. 'batch' seeds them before each batch, so that
        batches do not depend on the number of workers, or on worker deaths or resumes. Defaults to
        `defaults.rng`, which is initially 'worker'.
    worker_method : {None, 'multiprocessing', 'thread'}
        The kind of workers. 'thread' requires a map-style data set. Threads share the data set
        without copies, but only one at a time can hold the GIL. In threads, `get_worker_info()`
        returns None, but `cseq.worker_info` and `cseq.rng` work. Defaults to
        `defaults.worker_method`, which is initially 'multiprocessing'.
    on_error : {None, 'raise', 'skip'}
        Whether to raise exceptions from the data set or `collate_fn` in the loop, or to log them
        and skip the sample (or the whole batch if no single sample raised). See `skipped`. Defaults
        to `defaults.on_error`, which is initially 'raise'.
    snapshot_every_n_steps : int, optional
        How often a worker saves the state of an IterableDataset, as a number of batches. The
        state of a map-style data set is saved after every batch. None and 0 disable saving.
        `StatefulDataLoader` defaults to 1.
    max_restarts : int
        The maximum number of workers to replace per epoch. The next death raises `WorkerDied`.

    See Also
    --------
    cseq.from_dataset : Reads the same data set with `MPSequence`, without torch.

    Examples
    --------
    >>> from cseq import DataLoader
    >>> loader = DataLoader(list(range(6)), batch_size=4, num_workers=2)
    >>> for batch in loader:
    ...     print(batch)
    tensor([0, 1, 2, 3])
    tensor([4, 5])
    """

    # Some loaders are built from another loader's `__dict__`, so these are class attributes.
    rng: str | None = None
    on_error: str | None = None
    worker_method: str | None = None
    snapshot_every_n_steps: int | None = None
    max_restarts: int = MAX_RESTARTS
    # The latest `iter`: its epoch, its progress, and the reason for a fallback, if any.
    _begun: int | None = None
    _progress: LoaderProgress | None = None
    _reason: str | None = None
    # The state from which the next `iter` resumes.
    _loaded: dict[str, Any] | None = None
    _is_strict = True
    _has_warned = False

    # For type checkers: torch's arguments, followed by cseq's.
    if TYPE_CHECKING:

        def __init__(
            self,
            dataset: data.Dataset[T_co],
            batch_size: int | None = 1,
            shuffle: bool | None = None,  # noqa: FBT001 - the positions are torch's
            sampler: data.Sampler[Any] | Iterable[Any] | Order | None = None,
            batch_sampler: data.Sampler[list[Any]] | Iterable[list[Any]] | Order | None = None,
            num_workers: int = 0,
            collate_fn: Callable[[list[Any]], Any] | None = None,
            pin_memory: bool = False,  # noqa: FBT001, FBT002
            drop_last: bool = False,  # noqa: FBT001, FBT002
            timeout: float = 0,
            worker_init_fn: Callable[[int], None] | None = None,
            multiprocessing_context: BaseContext | str | None = None,
            generator: torch.Generator | None = None,
            *,
            prefetch_factor: int | None = None,
            persistent_workers: bool = False,
            pin_memory_device: str = "",
            in_order: bool = True,
            rng: Literal["worker", "batch"] | None = None,
            on_error: Literal["raise", "skip"] | None = None,
            worker_method: Literal["multiprocessing", "thread"] | None = None,
            snapshot_every_n_steps: int | None = None,
            max_restarts: int = MAX_RESTARTS,
        ) -> None: ...

    else:

        def __init__(
            self,
            *args: Any,
            rng: str | None = None,
            on_error: str | None = None,
            worker_method: str | None = None,
            snapshot_every_n_steps: int | None = None,
            max_restarts: int = MAX_RESTARTS,
            **kwargs: Any,
        ) -> None:
            refuse_class(kwargs.get("dataset", args[0] if args else None))
            takes_any = any(known.kind is known.VAR_KEYWORD for known in KNOWN.values())
            for name in kwargs.keys() & ELSEWHERE.keys() if takes_any else kwargs.keys() - KNOWN:
                raise unexpected(type(self).__name__, name, KNOWN, ELSEWHERE)
            if kwargs.get("num_workers") == "auto":
                raise ValueError(
                    "num_workers='auto' requires an MPSequence or MTSequence; pass a number (after "
                    "an epoch, advice() recommends one)"
                )
            if any(isinstance(argument, Order) for argument in (*args, *kwargs.values())):
                from cseq.adapters.torch.batches import with_order

                args, kwargs = (), with_order(args, kwargs)
            super().__init__(*args, **kwargs)
            given = {"rng": rng, "on_error": on_error, "worker_method": worker_method}
            for name, value in given.items():
                setattr(self, name, choice(name, value, (None, *VALUES[name])))
            if worker_method == "thread" and self.multiprocessing_context is not None:
                raise ValueError(
                    "multiprocessing_context= cannot be combined with worker_method='thread', "
                    "which starts no processes; pass only one of them"
                )
            every = type(self).snapshot_every_n_steps
            if snapshot_every_n_steps is not None:
                every = integer("snapshot_every_n_steps", snapshot_every_n_steps, least=0)
            self.snapshot_every_n_steps = every
            self.max_restarts = integer("max_restarts", max_restarts, least=0)
            # Import this module now to avoid a delay in the first loop.
            import cseq.adapters.torch.iterator  # noqa: F401

        @data.DataLoader.multiprocessing_context.getter
        def multiprocessing_context(self) -> Any:
            """Warn if accelerate reads this to rebuild the loader."""
            if sys._getframe(1).f_globals.get("__name__") == "accelerate.data_loader":
                tell_lost(self)
            return super().multiprocessing_context

    def __iter__(self) -> Any:
        """Start the next epoch, or resume from a loaded state."""
        epoch = self.epoch
        # Start the next epoch even if the current one is unfinished.
        if not self._loaded and epoch == self._begun:
            epoch += 1
        iterator = super().__iter__()
        self._begun = epoch
        return iterator

    @property
    def epoch(self) -> int:
        """The number of the current epoch or, once that is over, of the next one.

        Epochs are numbered from 0. States contain this number, so a training loop can resume with
        ``for epoch in range(loader.epoch, epochs)``.
        """
        number, is_over = self._begun or 0, False
        if self._loaded and self._loaded.get("epoch") is not None:
            number, is_over = self._loaded["epoch"], self._loaded["_iterator_finished"]
        elif self._begun is not None:
            is_over = self._progress is None or self._progress.finished
        return number + is_over

    def _get_iterator(self) -> Any:
        options = Options(
            self.rng or defaults.rng,
            self.on_error or defaults.on_error,
            defaults.worker_method,
            self.snapshot_every_n_steps or 0,
            self.max_restarts,
        )
        resume = self._resume(self._loaded, strict=self._is_strict)
        iterator = make_iterator(self, super()._get_iterator, options, resume)
        self._loaded = None
        return iterator

    def _resume(self, loaded: dict[str, Any] | None, *, strict: bool) -> dict[str, Any] | None:
        if not loaded:
            return None
        in_threads = method_of(self, defaults.worker_method) == "thread"
        resume = resumed(
            loaded,
            kind="iterable" if self._dataset_kind == names.ITERABLE else "map",
            num_workers=self.num_workers,
            keeps=self.num_workers == 0 or self.persistent_workers or in_threads,
            batching=self._batching(),
            strict=strict,
        )
        reason = resume and reason_against(self)
        if reason:
            raise ValueError(UNUSABLE % reason)
        return resume

    def _batching(self) -> dict[str, Any]:
        """Return the values that determine an epoch's batches. Unknown values are None."""
        dataset: Any = self.dataset
        layers = Layers(self._index_sampler)
        kind, shares = type(layers.inner), layers.shares
        own = None if shares is None else getattr(layers.inner, "shuffle", None)
        has_length = self._dataset_kind != names.ITERABLE and hasattr(dataset, "__len__")
        return {
            "sampler_type": None if shares is None else kind.__name__,
            "shuffle": SHUFFLE.get(kind, own),
            "seed": layers.seed,
            "samples": len(dataset) if has_length else None,
            "batch_size": self.batch_size,
            # An unknown sampler's `__len__` may draw random numbers or prepare the next epoch.
            "batches": None if shares is None else len(self._index_sampler),
            **(NOT_SHARED if shares is None else shares._asdict()),
        }

    @property
    def skipped(self) -> list[Skipped]:
        """Up to 1000 samples and batches skipped by ``on_error='skip'`` in the latest epoch."""
        return [] if self._progress is None else list(self._progress.skipped)

    @property
    def _run(self) -> Run[Any] | None:
        """The latest iterator's run, used by `cseq.testing`."""
        iterator = None if self._progress is None else self._progress.iterator()
        return None if iterator is None else iterator._run

    def stats(self) -> Stats:
        """Return statistics about the workers of the latest iterator; see `cseq.Stats`.

        A batch of an IterableDataset counts as one sample.

        Raises
        ------
        RuntimeError
            If no epoch has started, or the loader has no workers.
        """
        # `install` also adds this method to torch's class, so `_progress` may be missing.
        progress = vars(self).get("_progress")
        iterator = None if progress is None else progress.iterator()
        stats: Stats | None = getattr(progress, "stats", None)
        if iterator is not None:
            stats = iterator.stats()
        if stats is None:
            raise RuntimeError(
                "this loader has no cseq workers, so there are no statistics; start an epoch "
                "with num_workers above 0"
            )
        return stats

    def advice(self, since: Stats | None = None) -> Advice:
        """Explain why the loop is waiting, and suggest a change; see `MSequence.advice`."""
        if not self.num_workers:
            from cseq.measure.advice import Window, advise

            return advise(Window(batches=1))
        now = self.stats()
        return (now if since is None else now.since(since)).advice()

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Write an HTML report of `stats`; see `cseq.MSequence.report`."""
        from cseq.report.page import Part, write

        facts = ", ".join(f"{name}={value}" for name, value in self._facts())
        write(path, [Part(type(self).__name__, facts, self.stats())], title)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        from cseq.measure.stats import Stats, read_stats
        from cseq.report.page import in_notebook

        return in_notebook(read_stats(self) or Stats(), [(type(self).__name__, ""), *self._facts()])

    def _facts(self) -> list[tuple[str, str]]:
        sizes = ((name, str(getattr(self, name))) for name in ("batch_size", "num_workers"))
        return [("dataset", type(self.dataset).__name__), *sizes]

    def state_dict(self, *, next_epoch: bool = False) -> dict[str, Any]:
        """Return the position after the latest batch, for `load_state_dict`.

        Parameters
        ----------
        next_epoch : bool
            If True, return the start of the next epoch. Use this in loops that end an epoch early.

        Returns
        -------
        dict
            The state. Its keys may change in future versions. It is empty if torch's own iterator
            is used. After `load_state_dict`, the loaded state is returned until the next ``iter()``
            has resumed from it.
        """
        if self._loaded:
            return copy.deepcopy(self._loaded)
        progress, reason = self._progress, self._reason
        if progress is None and reason is None:
            reason = reason_against(self)
        if reason is not None:
            self._warn(
                "the state of this DataLoader is empty: the loader falls back to torch's "
                "own iterator because %s. A run that loads this state restarts its epoch",
                reason,
            )
            return {}
        if progress is None:
            keys = Keys(self, keeps_state=False)
            progress = LoaderProgress(self, keys, rng=self.rng or defaults.rng)
        if self.snapshot_every_n_steps is None and is_stateful(self.dataset):
            self._warn(
                "dataset=%s has a state_dict(), which a DataLoader does not call, so a resume %s; "
                "to save that state, use StatefulDataLoader or snapshot_every_n_steps=1; to "
                "silence this warning, pass snapshot_every_n_steps=0",
                type(self.dataset).__name__,
                "makes the epoch's batches again" if progress.iterable else "does not restore it",
            )
        is_whole = progress.finished or not progress.yielded or progress.iterable
        if not (is_whole or getattr(self, "in_order", True) or self.num_workers < 2):
            log.warning(
                "with in_order=False, a state saved in the middle of an epoch only counts batches: "
                "a resume repeats batches that overtook others, and loses the overtaken batches"
            )
        if progress.batching is None:
            progress.batching = self._batching()
        state = progress.as_dict(next_epoch=next_epoch)
        return {**state, "epoch": self._begun or 0, **progress.batching}

    def _warn(self, text: str, *values: object) -> None:
        """Warn about incomplete states, once per loader."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(text, *values)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Make the next `iter` resume from a saved position.

        If the state is empty or its epoch is over, a new epoch starts. With ``rng='batch'``, the
        data set draws the same random numbers as in an uninterrupted run. With ``rng='worker'``,
        the generators of the workers restart from their seeds.

        Parameters
        ----------
        state_dict : dict
            The `state_dict` of a loader with the same data and sampler. For a map-style data set,
            the number of workers may differ. With torch's own samplers (even if accelerate shards
            them), the batch size and the number of ranks may differ, and all ranks can load the
            state of one rank.
        strict : bool
            If False, accept a state even if the data or the sampler has changed. Samples may then
            be repeated or missed.

        Raises
        ------
        TypeError, ValueError
            If the state does not fit this loader. A previously loaded state is then kept.

        Examples
        --------
        >>> loader = cseq.DataLoader(list(range(6)), batch_size=2, num_workers=1)
        >>> next(iter(loader))
        tensor([0, 1])
        >>> loader.load_state_dict(loader.state_dict())
        >>> print(*loader)
        tensor([2, 3]) tensor([4, 5])
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"state_dict={state_dict!r} is not a dict; pass the dict that state_dict() returned"
            )
        loaded = copy.deepcopy(state_dict)
        resume = self._resume(loaded, strict=flag("strict", strict))
        own: Any = None if resume is None else resume["sampler"].get("sampler")
        order: Any = self.batch_sampler
        # First check that a copy of the sampler accepts the state.
        if own is not None and hasattr(order, "state_after"):
            copy.copy(order).load_state_dict(own, strict=strict)
        self._loaded, self._is_strict, self._iterator = loaded, strict, None
        saved, rng = state_dict.get("rng"), self.rng or defaults.rng
        if saved not in (None, rng):
            log.warning(
                "the state was saved with rng=%r, but this loader has rng=%r, so the data set will "
                "not draw the same random numbers as in one uninterrupted run; pass the same rng",
                saved,
                rng,
            )


if TYPE_CHECKING:
    Ours = DataLoader
else:
    Ours = {T_co: names.as_generic(DataLoader)}


class StatefulDataLoader(Ours[T_co]):
    """A `DataLoader` that also saves the state of its data set, like torchdata's class.

    Examples
    --------
    >>> loader = cseq.StatefulDataLoader(list(range(6)), batch_size=4, num_workers=1)
    >>> next(iter(loader))
    tensor([0, 1, 2, 3])
    """

    snapshot_every_n_steps: int | None = 1


def _signature() -> inspect.Signature:
    theirs = inspect.signature(data.DataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    added = [
        argument
        for name, argument in ours.items()
        if argument.kind is argument.KEYWORD_ONLY and name not in theirs
    ]
    return inspect.Signature([*theirs.values(), *added])


# Frameworks use the signature to rebuild a loader from attributes named after its arguments.
DataLoader.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
KNOWN = {name: known for name, known in _signature().parameters.items() if name != "self"}
