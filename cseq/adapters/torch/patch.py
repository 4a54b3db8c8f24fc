"""`install`: torch's own DataLoader class with cseq's worker processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cseq.adapters.torch.fallback import make_iterator, note
from cseq.adapters.torch.loader import DataLoader
from cseq.adapters.torch.options import Options, defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils import data

__all__ = ["install", "installed", "is_installed", "uninstall"]

_original: Callable[[Any], Any] | None = None
# torch's class, though a program may have put cseq's under its name.
_class: Any = DataLoader.__mro__[1]


def _get_iterator(self: data.DataLoader[Any]) -> object:
    """Make an iterator of cseq's; torch's own does without workers, unless a default says more.

    A loader of cseq's comes here if its own way cannot be: for torch's.
    """
    own, reason = _original, None
    assert own is not None
    if isinstance(self, DataLoader):
        return own(self)
    rng, on_error, method = defaults.rng, defaults.on_error, defaults.worker_method
    if self.num_workers == 0 and (rng, on_error) == ("worker", "raise"):
        reason = "with num_workers=0 the loop makes the batches"
    # Of a torch that has threads itself.
    elif getattr(self, "worker_method", None) == "thread":
        reason = "torch's worker threads are its own"
    if reason is None:
        return make_iterator(self, lambda: own(self), Options(rng, on_error, method))
    self._progress = None
    note(self, reason)
    return own(self)


def install() -> None:
    """Have every DataLoader of torch use cseq's worker processes, at its next `iter`.

    That includes the loaders of frameworks, which make their own, and of subclasses that do not
    make their iterators themselves. They get `stats`, as a cseq.DataLoader has. Twice is fine.

    Raises
    ------
    RuntimeError
        Something else has changed torch's class already.
    """
    global _original
    if is_installed():
        return
    present: Callable[[Any], object] = _class._get_iterator
    if getattr(present, "__module__", None) != "torch.utils.data.dataloader":
        raise RuntimeError(
            f"DataLoader._get_iterator is not torch's own any more, but {present!r}: install cseq "
            "first, or leave out the other one"
        )
    _original = present
    _class._get_iterator = _get_iterator
    _class.stats = DataLoader.stats


def uninstall() -> None:
    """Have torch's DataLoader use its own worker processes again. Iterators go on as they are."""
    global _original
    if not is_installed():
        return
    present = _class._get_iterator
    if present is not _get_iterator:
        raise RuntimeError(f"DataLoader._get_iterator is {present!r}: undo that first")
    _class._get_iterator = _original
    del _class.stats
    _original = None


def is_installed() -> bool:
    """Whether `install` was called, and not undone."""
    return _original is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Have every DataLoader of torch use cseq's worker processes inside a `with` statement."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
