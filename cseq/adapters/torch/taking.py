"""The step that takes a batch out of an iterator, and counts it."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from cseq.adapters.torch import names
from cseq.adapters.torch.order import Keys
from cseq.adapters.torch.state import Progress

if TYPE_CHECKING:
    from cseq.adapters.torch.state import Resume

__all__ = ["Taking"]


class Taking(names.Base):  # type: ignore[misc]
    """The end of an iterator that the loop has: takes the batches that `_next_data` gets ready.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    torchs : type
        The class of torch's whose place it takes.
    rng, on_error : str
        See `DataLoader`.
    keeps_state : bool
        Whether states may be asked for.

    Attributes
    ----------
    progress : Progress
        The same object in all epochs of persistent workers.
    """

    _num_yielded: int
    _in_order: bool
    _taker = 0  # the thread that is in `__next__`

    def __init__(
        self, loader: Any, torchs: Any, *, rng: str, on_error: str, keeps_state: bool
    ) -> None:
        self._is_iterable = loader._dataset_kind == names.ITERABLE
        self._keeps_state = keeps_state and not self._is_iterable
        self._order = Keys(loader._index_sampler, keeps_state=self._keeps_state)
        names.Base.__init__(self, loader)
        self._profile_name = names.profile_name(torchs)
        self._base_seed: Any
        self._sampler_iter: Any
        self._rng = rng
        self._skips_errors = on_error == "skip"
        self._several = max(1, self._num_workers)  # what makes the batches in turn
        self.progress = Progress(iterable=self._is_iterable, num_workers=self._num_workers, rng=rng)
        self._after: tuple[int, bytes | None] = (0, None)  # its worker, and the state after it
        self._error: BaseException | None = None  # what is raised instead of its batch
        self._place: str | None = None  # that batch, if it can be left out
        self._indices: list[Any] = []  # of that batch, as far as they are known
        self._left: tuple[tuple[Any, str], ...] = ()  # samples that are left out of a batch

    def _begin(self, resume: Resume | None) -> None:
        """Begin an epoch, or go on with one."""
        if resume is not None:
            self._num_yielded = resume.yielded
            if resume.base_seed is not None:
                self._base_seed = resume.base_seed
        self.progress.begin(self._base_seed, resume)

    def _keys(self, resume: Resume | None) -> Any:
        """Return the epoch's keys."""
        self.progress.order = self._order
        state = resume.sampler if resume else {}
        return self._order.draw(self._sampler_iter, self.progress.yielded, state)

    def __next__(self) -> Any:
        """Return the next batch, or raise what was raised instead of it.

        It is counted last, without a call: if a signal handler raises (Ctrl-C), a state does not
        have the batch, which this iterator may have lost, as torch's. For one thread at a time.
        """
        me = get_ident()
        if self._taker not in (0, me):
            raise RuntimeError("another thread is in next() of this iterator; take turns")
        self._taker = me
        try:
            while True:
                count, failed, self._error = self._num_yielded, None, None
                try:
                    if self._IterableDataset_len_called is not None or names.profiler_enabled():
                        batch = names.Base.__next__(self)  # with warnings, and named in a profile
                    else:
                        batch = self._next_data()
                except BaseException as error:
                    self._num_yielded = count
                    if error is not self._error:
                        raise
                    failed = error
                progress = self.progress
                is_left_out = False
                if failed is not None and self._skips_errors and self._place is not None:
                    is_left_out = progress.skip(failed, self._place, self._indices)
                elif failed is None and self._left:
                    progress.leave(self._left)
                self._error = None
                progress.yielded += 1
                number, state = self._after
                if state is not None:
                    progress.states[number] = state
                if self._is_iterable:
                    progress.counts[number] += 1
                    if self._in_order:
                        progress.turn = (number + 1) % self._several
                if failed is None:
                    self._num_yielded = count + 1
                    return batch
                if is_left_out:
                    continue
                raise failed
        finally:
            self._taker = 0
            failed = None  # its traceback has this frame: the cycle would keep the workers alive
