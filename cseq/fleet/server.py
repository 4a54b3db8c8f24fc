"""A ticket server: worker processes that make the batches of parcels.

::

    any thread                this thread                              worker process
      make ── request ──►  ParcelFeed ── tickets, indices ──► ring ──►  Runner ──► indexer
           ◄── answer ───             ◄── raw bytes ── slots ◄────────  SlotWriter

It is the end of a fleet on the machine that makes the batches. It knows no epoch and no order: each
ticket says its seed, epoch and position, so any server makes the same batch of it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from cseq._lock import Latch
from cseq._parcel import Parcel, ParcelFeed
from cseq.converter.output import Output
from cseq.encoding import failure
from cseq.lanes import Lanes
from cseq.memory.shared import Shared
from cseq.pools.base import held_in, in_work
from cseq.pools.process import ENTRY, Task
from cseq.processes.deaths import Deaths
from cseq.processes.launcher import make_launcher
from cseq.processes.supervisor import Supervisor
from cseq.stage import INDEXER
from cseq.threads import Threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cseq.arguments import WorkerOptions

    Words = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

__all__ = ["TicketServer"]

CELLS = 256  # tickets in the ring; what the parcels of a carrier hold bounds their bytes
PARK_NS = 100_000_000  # longest sleep before the thread looks for errors and deadlines
CLOSE_SECONDS = 5.0
EPOCHS = 64  # whose parcels may come in turns, without each counting deaths anew

log = logging.getLogger("cseq")


class _Request:
    """A parcel, and the thread that waits for its answer."""

    def __init__(self, parcel: Parcel, key: tuple[int, int]) -> None:
        self.parcel = parcel
        self.key = key  # seed and epoch
        self.over = Latch()  # answered, or the server has failed or is closed


class TicketServer:
    """Worker processes that make the batches of parcels.

    Parameters
    ----------
    worker : object
        As in `MSequence`; or a `Pickled` one.
    num_workers : int
        Processes.
    batch_size : int
        The most samples of a batch.
    options : WorkerOptions
        Restarts are counted anew when the first parcel of an epoch comes.
    seed_globals : bool
        As in `MSequence`.
    """

    def __init__(
        self,
        worker: Any,
        num_workers: int,
        batch_size: int,
        options: WorkerOptions,
        *,
        seed_globals: bool = True,
    ) -> None:
        self._worker = worker
        self._num_workers, self._batch_size = num_workers, batch_size
        self._options = options
        self._seed_globals = seed_globals
        self._shared = Shared(
            CELLS,
            2 * batch_size,  # and the size of each unit, which has one sample at least
            num_workers,
            owners=num_workers,
            memory_limit=options.memory_limit,
        )
        (ring,) = self._shared.rings
        self._ring = ring
        ring.wake_at = 1
        self._feed = ParcelFeed(ring, self._shared.arena)
        advice = "look at what the indexer does with these indices"
        self.supervisor = Supervisor(
            make_launcher(options.start_method, entry=ENTRY, threads=options.threads),
            self._shared,
            readers=num_workers,
            task=self._task,
            describe=lambda _, cell: held_in(ring, cell),
            deaths=Deaths(options.max_restarts, num_workers, "batch", advice),
            lanes=Lanes(num_workers, "process"),
        )
        self._coming: deque[_Request] = deque()
        self._requests: dict[int, _Request] = {}  # by the id of the parcel; of this thread alone
        self._epochs: deque[tuple[int, int]] = deque(maxlen=EPOCHS)  # keys of the latest
        self._closed = self._ended = False
        self.failure = failure.Failure()
        self._thread = Threads()
        self._thread.add("cseq-server", self._run)

    def _task(self, _: int) -> Task:
        """Return what a worker is to do; called on the supervisor's thread."""
        return Task(
            stage=INDEXER,
            num_workers=self._num_workers,
            last=True,
            seed=0,
            seed_globals=self._seed_globals,
            on_error="raise",  # the batch is left out where the loop is
            cast=None,  # the trainer casts
            output=Output("null"),
        )

    def start(self) -> None:
        """Start the workers; do not wait until they are ready.

        Raises
        ------
        TypeError
            The worker cannot be pickled.
        """
        options = self._options
        self.supervisor.prepare(self._worker, preload=options.preload, timeout=options.timeout)
        self.supervisor.launch()
        self._thread.start()

    def make(self, request: Words | Bytes) -> list[Bytes]:
        """Make the batches of a parcel; on any thread, on several at a time.

        Parameters
        ----------
        request : numpy.ndarray
            See `_parcel`. It is read until this returns.

        Returns
        -------
        list of numpy.ndarray
            The answer. Exceptions of the indexer are in it, in place of their batches.

        Raises
        ------
        ValueError
            A batch has more than `batch_size` samples, or this is no request.
        WorkerDied, WorkerTimeout
            As in a training loop; also what the constructor of an indexer has raised. Each call
            raises it from then on.
        InterruptedError
            The server was closed.
        """
        parcel = Parcel(request, self._batch_size)
        if not parcel.count:
            return parcel.answer()
        words = request.view("<i8")
        asked = _Request(parcel, (int(words[1]), int(words[2])))
        self._coming.append(asked)
        self._ring.notify_all()
        if self._ended:  # before it looked at `_coming` for the last time
            asked.over.set()
        asked.over.wait()
        self.failure.check()
        if not parcel.is_answered:
            raise InterruptedError("the server was closed while it made a parcel")
        return parcel.answer()

    def close(self) -> None:
        """End the workers; calls of `make` that wait raise InterruptedError."""
        self._closed = True
        self._ring.notify_all()
        stuck = self._thread.join(time.monotonic() + CLOSE_SECONDS)
        if stuck:
            log.warning("thread %s did not end within %g s", stuck[0], CLOSE_SECONDS)
        self.supervisor.close()
        self._shared.close()
        self._worker = None

    # -- on the server's thread

    def _run(self) -> None:
        """Post and take, until the server is closed or a worker has ended it."""
        try:
            while not self._closed:
                self._step()
        except BaseException as error:  # noqa: BLE001 - it is raised in `make`
            if not self._closed:
                self.failure.note(error)
        finally:
            self._ended = True
            for asked in (*self._requests.values(), *self._coming):
                asked.over.set()

    def _step(self) -> None:
        """Look for parcels, errors and answers; then sleep until there may be more."""
        seen = self._ring.notices()
        while self._coming:
            asked = self._coming.popleft()
            self._requests[id(asked.parcel)] = asked
            if asked.key not in self._epochs:
                self._epochs.append(asked.key)
                self.supervisor.deaths.begin()
            self._feed.add(asked.parcel)
        self.supervisor.check()
        timeout, restart = self._options.timeout, self._options.on_timeout == "restart"
        if timeout is not None:
            working = in_work(self._ring, self._feed.cells())
            self.supervisor.check_time(working, timeout, restart=restart)
        for parcel in self._feed.advance():
            self._requests.pop(id(parcel)).over.set()
        if not self._coming:
            self._feed.wait(seen, PARK_NS)
