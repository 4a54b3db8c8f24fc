"""The processes of a reading service, in the main process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq.adapters.torchdata.library import Epoch
from cseq.adapters.torchdata.relay import Relay
from cseq.adapters.torchdata.worker import Dispatcher
from cseq.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.adapters.torchdata.library import DataPipe, GraphFn, SeedGenerator
    from cseq.adapters.torchdata.worker import Worker

__all__ = ["Engine"]


class Engine:
    """The processes of one reading service."""

    def __init__(
        self, num_workers: int, worker_ahead: int, main_ahead: int, **options: Any
    ) -> None:
        self._num_workers = num_workers
        self._dispatched_ahead = num_workers * (1 + worker_ahead)
        self._ahead = 1 + worker_ahead - (-main_ahead // num_workers)
        self._options = options  # of `Streams`
        self._number = 0  # of the epoch
        self._relay: Relay | None = None
        self._streams: Streams | None = None

    def open(self, make_worker: Callable[..., Worker], dispatched: DataPipe) -> None:
        """Start the processes; if anything is raised, also by a signal handler, call `close`."""
        address = None
        if dispatched is not None:
            make = partial(Dispatcher, dispatched)
            ahead = self._dispatched_ahead
            streams = Streams(make, 1, prefetch=ahead, **self._options)
            self._relay = Relay(streams, self._num_workers)
            address = self._relay.open()
        worker = partial(make_worker, address)
        self._streams = Streams(worker, self._num_workers, prefetch=self._ahead, **self._options)

    @property
    def streams(self) -> Streams:
        """The workers."""
        assert self._streams is not None, "open() comes first"
        return self._streams

    def begin(self, seeds: SeedGenerator, reset_fn: GraphFn | None) -> None:
        """Begin an epoch in all processes."""
        self._number += 1
        if self._relay is not None:
            self._relay.begin(Epoch(self._number, seeds.spawn(0), reset_fn))
        self.streams.begin(
            [
                Epoch(self._number, seeds.spawn(worker), reset_fn)
                for worker in range(self._num_workers)
            ]
        )

    def ask(self, verb: str, function: GraphFn | None, *, first_dispatched: bool = False) -> None:
        """Make all processes pause or resume, after the items that were asked for."""
        if self._relay is not None and first_dispatched:
            self._relay.ask(verb, function)
        self.streams.ask(verb, function, behind=True)
        if self._relay is not None and not first_dispatched:
            self._relay.ask(verb, function)

    def stop(self) -> None:
        """End the epoch: a call that waits for an item of it raises InterruptedError."""
        if self._relay is not None:
            self._relay.stop()
        if self._streams is not None:
            self._streams.interrupt()

    def close(self) -> None:
        """End all processes; in a forked process, there are none to end.

        Calling it twice is fine, also if the first call was interrupted.
        """
        self.stop()
        if self._streams is not None:
            self._streams.close()
        if self._relay is not None:
            self._relay.close()
