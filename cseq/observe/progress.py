"""A bar of tqdm that says how much a loop waits, and why: `progress`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from cseq.stats import Stats

    B = TypeVar("B")

__all__ = ["progress"]

NO_CAUSES = ("unknown", "none", "loop")  # of these, the share of waiting says enough


def progress(loader: Iterable[B], **options: Any) -> Iterable[B]:
    """Iterate with a bar of tqdm that says how much the loop waits, and why.

    ``for batch in cseq.progress(manager): …`` shows ``26%|██▌  | 412/1563 [00:21<01:00, 19.1it/s,
    waits 41 %: workers]``. The words are those of `manager.advice()`, for the time since the bar
    began; they are worked out when the bar is drawn, so a batch costs what tqdm alone costs.
    Where there is no terminal, nothing is drawn.

    Parameters
    ----------
    loader : iterable
        A manager, a `DataLoader` or anything else that can be iterated over; what has no
        ``stats()`` gets a bar of tqdm alone.
    **options
        Those of ``tqdm.tqdm``: ``desc``, ``initial`` (batches that were taken before a resume),
        ``leave`` and the like.

    Returns
    -------
    tqdm.tqdm
        The bar, which is iterated over; ``tqdm.auto`` chooses that of a notebook there.

    Raises
    ------
    ImportError
        tqdm is not installed.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null", seed=1)
    >>> with manager.start() as batches:  # doctest: +SKIP
    ...     for batch in cseq.progress(batches):
    ...         pass
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("cseq.progress needs tqdm: pip install tqdm", name="tqdm") from error
    options.setdefault("disable", None)  # where there is no terminal
    options.setdefault("unit", "batch")
    stats = getattr(loader, "stats", None)
    if stats is None:
        bar: Iterable[B] = tqdm(loader, **options)
        return bar
    waiting = _Waiting(stats)

    class Progress(tqdm):  # type: ignore[misc]
        def display(self, *args: Any, **kwargs: Any) -> Any:
            self.postfix = waiting.said(self.n - self.initial)
            return super().display(*args, **kwargs)

    told: Iterable[B] = Progress(loader, **options)
    return told


class _Waiting:
    """Says how much a loop waits since now."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats, self._before = stats, self._read(stats)

    @staticmethod
    def _read(stats: Callable[[], Stats]) -> Stats | None:
        """Return what was counted so far; None: nothing, of a loader that has no iterator yet."""
        try:
            return stats()
        except RuntimeError:
            return None

    def said(self, taken: float) -> str:
        """Say it, after so many batches; nothing where the loader has no figures."""
        now = self._read(self._stats)
        if not taken or now is None:
            return "" if taken else "starting"
        if not now.num_workers:
            return "num_workers=0"
        try:
            if self._before is not None:
                now = now.since(self._before)
        except ValueError:  # it was started again meanwhile
            self._before = None
        cause = now.bottleneck
        said = f"waits {now.loop_waiting:.0%}".replace("%", " %")
        return said if cause in NO_CAUSES else f"{said}: {cause}"
