"""Patches torch's DataLoader class to use cseq's worker processes."""

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
# torch's own class, even if `torch.utils.data.DataLoader` has been replaced with cseq's.
_class: Any = DataLoader.__mro__[1]


def _get_iterator(self: data.DataLoader[Any]) -> object:
    """Return cseq's iterator for a torch loader, or torch's own if cseq's is not needed or usable.

    A `cseq.DataLoader` calls this only to create torch's own iterator.
    """
    own, reason = _original, None
    assert own is not None
    if isinstance(self, DataLoader):
        return own(self)
    rng, on_error, method = defaults.rng, defaults.on_error, defaults.worker_method
    if self.num_workers == 0 and (rng, on_error) == ("worker", "raise"):
        reason = "with num_workers=0, the loop makes the batches"
    # Some versions of torch support worker threads.
    elif getattr(self, "worker_method", None) == "thread":
        reason = "its workers are torch's own threads"
    if reason is None:
        return make_iterator(self, lambda: own(self), Options(rng, on_error, method))
    self._progress = None
    note(self, reason)
    return own(self)


def install() -> None:
    """Make all torch DataLoaders use cseq's worker processes from their next `iter`.

    This includes loaders created by frameworks, and subclasses that do not override
    `_get_iterator`. It also adds a `stats` method to loaders. Calling it again has no effect.

    Raises
    ------
    RuntimeError
        If another library has already patched torch's class.
    """
    global _original
    if is_installed():
        return
    present: Callable[[Any], object] = _class._get_iterator
    if getattr(present, "__module__", None) != "torch.utils.data.dataloader":
        raise RuntimeError(
            f"another library has replaced torch's DataLoader._get_iterator with {present!r}; call "
            "cseq's install() first, or do without the other library"
        )
    _original = present
    _class._get_iterator = _get_iterator
    _class.stats = DataLoader.stats


def uninstall() -> None:
    """Make torch DataLoaders use torch's workers again, from their next `iter`."""
    global _original
    if not is_installed():
        return
    present = _class._get_iterator
    if present is not _get_iterator:
        raise RuntimeError(
            f"another library has replaced cseq's DataLoader._get_iterator with {present!r}; "
            "undo that first"
        )
    _class._get_iterator = _original
    del _class.stats
    _original = None


def is_installed() -> bool:
    """Return True if `install` is in effect."""
    return _original is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make all torch DataLoaders use cseq's workers within a `with` block."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
