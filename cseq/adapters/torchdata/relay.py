"""Relays items from the dispatching process to the workers.

Items pass through the main process, because it outlives the others.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

from torchdata.datapipes.iter import IterDataPipe

from cseq._lock import Lock
from cseq.encoding import failure
from cseq.errors import RemoteTraceback, WorkerDied, WorkerTimeout
from cseq.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.stream import Streams

    # An address and a secret that authenticates callers.
    Address = tuple[Any, bytes]

# Seconds to wait for the relay's thread to exit.
ENDING = 10.0


class Dispatched(IterDataPipe):  # type: ignore[misc]
    """A worker's datapipe that receives items from the dispatching process."""

    def __init__(self, address: Address, worker: int) -> None:
        self.epoch = 0
        self._address, self._secret = address
        self._worker = worker

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while True:
            items, has_failed = self._ask(epoch)
            yield from map(pickle.loads, items)
            if has_failed:
                raise DispatchingFailed
            if not items:
                return

    def _ask(self, epoch: int) -> tuple[list[bytes], bool]:
        """Request the next items. Threads of a cancelled epoch may also call this."""
        with Client(self._address, authkey=self._secret) as relay:
            relay.send((self._worker, epoch))
            answer: tuple[list[bytes], bool] = relay.recv()
            return answer


class Relay:
    """A server in the main process that sends dispatched items to the workers.

    Item i goes to worker i mod N. A single thread answers one request at a time. Its queues for
    the other workers are unbounded.
    """

    def __init__(self, streams: Streams, num_workers: int) -> None:
        self._streams = streams
        self._num_workers = num_workers
        # Protects the stream and the next four attributes. `stop` alone writes `_epoch` without it,
        # because a request may hold the lock while it waits for an item.
        self._lock = Lock()
        # The number of the current epoch, or 0 if no epoch is running.
        self._epoch = 0
        self._items: Iterator[tuple[int, bytes]] = iter(())
        # The items still to be sent to each worker.
        self._waiting: list[deque[bytes]] = []
        # The exception that ended the epoch in the dispatching process.
        self.error: Exception | None = None
        self._is_closed = False
        self._thread = Threads()
        # An abstract socket leaves no file behind.
        name = f"\0cseq-{os.urandom(16).hex()}" if sys.platform == "linux" else None
        secret = os.urandom(16)
        self._listener = Listener(name, backlog=num_workers, authkey=secret)
        self.address: Address = self._listener.address, secret

    def open(self) -> None:
        """Start answering requests. If this raises, call `close`."""
        self._thread.add("cseq-relay", self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            # The caller may have died, or may not know the secret.
            with (
                contextlib.suppress(OSError, EOFError, AuthenticationError),
                self._listener.accept() as caller,
            ):
                caller.send(self._answer(*caller.recv()))

    def _answer(self, worker: int, epoch: int) -> tuple[list[bytes], bool]:
        """Return the next items for a worker, and whether an exception follows them.

        The list is empty at the end of the epoch.
        """
        with self._lock.hold():
            if epoch != self._epoch:
                return [], False
            waiting = self._waiting[worker]
            try:
                with naming_dispatching():
                    while not waiting:
                        self._pull()
                    # Also fetch all other items that are ready.
                    for _ in range(self._streams.stats().depths[-1]):
                        self._pull()
            except InterruptedError:
                return [], False
            except StopIteration:
                pass
            except Exception as error:  # noqa: BLE001 - raised in the worker
                self.error = error
            items = list(waiting)
            waiting.clear()
            return items, self.error is not None

    def _pull(self) -> None:
        number, item = next(self._items)
        self._waiting[number % self._num_workers].append(item)

    def begin_epoch(self, epoch: Any) -> None:
        """Start an epoch in the dispatching process."""
        self.stop()
        with self._lock.hold(), naming_dispatching():
            self._waiting = [deque() for _ in range(self._num_workers)]
            self.error = None
            self._streams.begin([epoch])
            self._items = enumerate(self._streams)
            self._epoch = epoch.number

    def ask(self, verb: str, function: Any) -> None:
        """Pause or resume the dispatching process."""
        with self._lock.hold(), naming_dispatching():
            self._streams.ask(verb, function, behind=True)

    def stop(self) -> None:
        """Stop the epoch. Workers receive no more items."""
        self._epoch = 0
        self._streams.interrupt()

    def close(self) -> None:
        """Stop the dispatching process and the relay's thread. The workers must be closed already.

        After an interrupted call, call this again.
        """
        self.stop()
        # In a forked process, the dispatching process belongs to the parent.
        if not self._streams._run.is_ours:
            return
        self._is_closed = True
        # Connecting unblocks `accept`, or fails if the listener is already closed.
        with contextlib.suppress(OSError, EOFError):
            Client(self.address[0]).close()
        self._thread.join(time.monotonic() + ENDING)
        self._listener.close()
        self._streams.close()


# -- exceptions


class DispatchingFailed(Exception):
    """Raised in a worker after an exception in the dispatching process (see `Relay.error`)."""


class InDispatching(RemoteTraceback):
    """A traceback from the dispatching process."""

    place = "dispatching process"


@contextlib.contextmanager
def naming_dispatching() -> Iterator[None]:
    """Mention the dispatching process in exceptions from the `with` block."""
    try:
        yield
    except (WorkerDied, WorkerTimeout) as error:
        error.args = (f"the dispatching process: {error}",)
        raise
    except Exception as error:
        if isinstance(error.__cause__, RemoteTraceback):
            error.__cause__ = InDispatching(*error.__cause__.args)
        raise


@contextlib.contextmanager
def telling(relay: Relay | None) -> Iterator[None]:
    """Show original tracebacks, as torch does. Replace `DispatchingFailed` with `Relay.error`."""
    try:
        yield
    except DispatchingFailed:
        assert relay is not None
        assert relay.error is not None
        raise failure.show_traceback(relay.error) from relay.error.__cause__
    except Exception as error:
        failure.show_traceback(error)
        raise
