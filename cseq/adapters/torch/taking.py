"""The step that takes a batch out of an iterator; no signal handler can split it."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from cseq.adapters.torch import names

if TYPE_CHECKING:
    from cseq.adapters.torch.state import Progress

__all__ = ["Taking"]


class Taking(names.Base):  # type: ignore[misc]
    """The end of an iterator that the loop has: takes the batches that `_next_data` gets ready.

    Attributes
    ----------
    progress : Progress
        The same object in all epochs of persistent workers.
    """

    progress: Progress
    _num_yielded: int
    _is_iterable: bool
    _in_order: bool
    _skips_errors: bool
    _several: int  # what makes the batches in turn: the workers, or the trainer alone
    _taker = 0  # the thread that is in `__next__`

    def _clear(self) -> None:
        """Nothing is ready."""
        self._received: list[Any] = []  # what is taken out, as far as it is there
        self._behind: tuple[int, bytes | None] = (0, None)  # its worker, and the state behind it
        self._error: BaseException | None = None  # what is raised instead of its batch
        self._place: str | None = None  # that batch, if it can be left out

    def __next__(self) -> Any:
        """Return the next batch, or raise what was raised instead of it.

        If a signal handler raises (Ctrl-C), nothing has been taken, and the next call returns it.
        The interpreter runs handlers after calls and where loops turn back. So the item stays in
        `_received` while anything is called for it, and all that takes it out is without a call.
        A batch that is left out (`on_error`) is noted before that; if then interrupted, again.
        For one thread at a time: a lock's release would be such a call.
        """
        me = get_ident()
        if self._taker not in (0, me):
            raise RuntimeError("another thread is in next() of this iterator; take turns")
        self._taker = me
        try:
            while True:
                count, failed = self._num_yielded, None
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
                    is_left_out = progress.skip(failed, self._place)
                progress.yielded += 1
                number, state = self._behind
                if state is not None:
                    progress.states[number] = state
                if self._is_iterable:
                    progress.counts[number] += 1
                    if self._in_order:
                        progress.turn = (number + 1) % self._several
                self._error = None
                del self._received[:]
                if failed is None:
                    self._num_yielded = count + 1
                    return batch
                if is_left_out:
                    continue
                raise failed
        finally:
            self._taker = 0
            failed = None  # its traceback has this frame: the cycle would keep the workers alive
