"""The first and the last datapipe in the main process."""

from __future__ import annotations

import contextlib
import itertools
from types import GeneratorType
from typing import TYPE_CHECKING

from torchdata.datapipes.iter import IterDataPipe

from cseq.adapters.torchdata.relay import telling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.adapters.torchdata.graph import DataPipe
    from cseq.adapters.torchdata.relay import Relay
    from cseq.stream import Streams

__all__ = ["Outlet", "PipeReader"]


class _Unhooked:
    """A mixin that avoids torch's wrapper around ``__iter__``."""

    def __iter__(self) -> Iterator[object]:
        return self._iterate()

    def _iterate(self) -> Iterator[object]:
        raise NotImplementedError


class PipeReader(_Unhooked, IterDataPipe):  # type: ignore[misc]
    """The first datapipe in the main process. It yields the workers' items."""

    def __init__(self, streams: Streams, relay: Relay | None) -> None:
        self._streams = streams
        self._relay = relay

    def _iterate(self) -> Iterator[object]:
        with telling(self._relay):
            yield from self._streams


class Outlet(_Unhooked, IterDataPipe):  # type: ignore[misc]
    """The last datapipe of the graph.

    Attributes
    ----------
    position : int or None
        The number of items returned in this epoch, or None outside an epoch.
    """

    def __init__(self, pipe: DataPipe) -> None:
        self.source_datapipe = pipe
        self.position: int | None = None
        self._skip = 0
        self._running: Iterator[object] | None = None

    def begin_epoch(self, skip: int) -> None:
        """Start an epoch, skipping the first `skip` items."""
        self.position = self._skip = skip

    def _iterate(self) -> Iterator[object]:
        self._running = self._items(self._skip)
        return self._running

    def _items(self, skip: int) -> Iterator[object]:
        items = iter(self.source_datapipe)
        skipped = sum(1 for _ in itertools.islice(items, skip))
        if skipped < skip:
            raise RuntimeError(
                f"the state was saved after {skip} items of the epoch, but the epoch now has only "
                f"{skipped}: the data has changed, or the graph yields different items for the "
                "same seeds"
            )
        for position, item in enumerate(items, skip + 1):
            self.position = position
            yield item
        self.position = None

    def close(self) -> None:
        """Stop the epoch. Closing the iterators also stops the graph's threads."""
        running, self._running = self._running, None
        self.position = None
        if isinstance(running, GeneratorType):
            # The generator may still be running in an interrupted thread.
            with contextlib.suppress(ValueError):
                running.close()
