"""`progress`: a tqdm bar that also shows the waiting time and its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.measure.stats import added, counting, read_stats

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeVar

    from cseq.measure.stats import Stats

    B = TypeVar("B")

__all__ = ["progress"]

# Causes that are not displayed after the waiting time.
NO_CAUSES = ("unknown", "loop")


def progress(loader: Iterable[B], **options: Any) -> Iterable[B]:
    """Iterate over a loader with a tqdm bar that also shows the waiting time and its cause.

    ``for batch in cseq.progress(manager): …`` shows ``26%|██▌  | 412/1563 [00:21<01:00, 19.1it/s,
    waits 41 %: workers]``. The cause comes from `manager.advice()`.

    Parameters
    ----------
    loader : iterable
        A manager, a `DataLoader`, or any other iterable. If it has no method ``stats``, the bar
        does not show the waiting time.
    **options
        Options of ``tqdm.tqdm``, such as ``desc``, ``leave`` and ``initial`` (the number of batches
        that were consumed before a resume).

    Returns
    -------
    tqdm.tqdm
        The bar to iterate over. It is not drawn without a terminal.

    Examples
    --------
    >>> for batch in cseq.progress(manager):  # doctest: +SKIP
    ...     pass
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("cseq.progress needs tqdm; run pip install tqdm", name="tqdm") from error
    options = {"disable": None, "unit": "batch"} | options
    if not hasattr(loader, "stats"):
        bar: Iterable[B] = tqdm(loader, **options)
        return bar
    counts = counting(loader)
    before = read_stats(counts)

    class Bar(tqdm):  # type: ignore[misc]
        def display(self, *args: object, **kwargs: object) -> object:
            self.postfix = (
                _said(before, read_stats(counts)) if self.n > self.initial else "starting"
            )
            return super().display(*args, **kwargs)

    shown: Iterable[B] = Bar(loader, **options)
    return shown


def _said(before: Stats | None, now: Stats | None) -> str:
    if now is None or not now.num_workers:
        return "" if now is None else "num_workers=0"
    now = added(now, before)
    cause, waits = now.bottleneck, f"waits {now.loop_waiting * 100:.0f} %"
    return waits if cause in NO_CAUSES else f"{waits}: {cause}"
