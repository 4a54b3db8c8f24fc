"""From the dispatching process to the workers, by way of the main process.

That outlives both. An item is pickled where it is made and unpickled in its worker, which calls the
main process for it.
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

    # Of the relay, and the secret that its callers know.
    Address = tuple[Any, bytes]

# Seconds that the relay's thread may take to end.
ENDING = 10.0


class Dispatched(IterDataPipe):  # type: ignore[misc]
    """In a worker: the items that the dispatching process makes for it."""

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
        """Ask for the next items; threads of an epoch that was cancelled do, too."""
        with Client(self._address, authkey=self._secret) as relay:
            relay.send((self._worker, epoch))
            answer: tuple[list[bytes], bool] = relay.recv()
            return answer


class Relay:
    """In the main process: hands the dispatching process's item i to worker i mod N, when asked.

    Its thread answers one call after another. It takes items until it has one for the worker that
    calls; those for other workers are queued, without bound.
    """

    def __init__(self, streams: Streams, num_workers: int) -> None:
        self._streams = streams
        self._num_workers = num_workers
        # Around the stream and the next four.
        self._lock = Lock()
        # The one under way, or 0.
        self._epoch = 0
        self._items: Iterator[tuple[int, bytes]] = iter(())
        # Of each worker: items not yet sent.
        self._waiting: list[deque[bytes]] = []
        # What has ended the items.
        self.error: Exception | None = None
        self._is_closed = False
        self._thread = Threads()
        # An abstract name leaves no file.
        name = f"\0cseq-{os.urandom(16).hex()}" if sys.platform == "linux" else None
        secret = os.urandom(16)
        self._listener = Listener(name, backlog=num_workers, authkey=secret)
        self.address: Address = self._listener.address, secret

    def open(self) -> None:
        """Begin to answer workers; if anything is raised, call `close`."""
        self._thread.add("cseq-relay", self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            # A caller may have died, or not know the secret.
            with (
                contextlib.suppress(OSError, EOFError, AuthenticationError),
                self._listener.accept() as caller,
            ):
                caller.send(self._answer(*caller.recv()))

    def _answer(self, worker: int, epoch: int) -> tuple[list[bytes], bool]:
        """Return the next items of a worker, and whether there is an exception after them.

        No items: there are no more, or the epoch is over.
        """
        with self._lock.hold():
            if epoch != self._epoch:
                return [], False
            waiting = self._waiting[worker]
            try:
                with naming_dispatching():
                    while not waiting:
                        self._pull()
                    # Those that are ready.
                    for _ in range(self._streams.stats().depths[-1]):
                        self._pull()
            except InterruptedError:
                return [], False
            except StopIteration:
                pass
            except Exception as error:  # noqa: BLE001 - it is raised where the item is asked for
                self.error = error
            items = list(waiting)
            waiting.clear()
            return items, self.error is not None

    def _pull(self) -> None:
        number, item = next(self._items)
        self._waiting[number % self._num_workers].append(item)

    def begin_epoch(self, epoch: Any) -> None:
        """Begin an epoch in the dispatching process."""
        self.stop()
        with self._lock.hold(), naming_dispatching():
            self._waiting = [deque() for _ in range(self._num_workers)]
            self.error = None
            self._streams.begin([epoch])
            self._items = enumerate(self._streams)
            self._epoch = epoch.number

    def ask(self, verb: str, function: Any) -> None:
        """Make the dispatching process pause or resume."""
        with self._lock.hold(), naming_dispatching():
            self._streams.ask(verb, function, behind=True)

    def stop(self) -> None:
        """End the epoch: a worker that waits or asks for an item gets none."""
        self._epoch = 0
        self._streams.interrupt()

    def close(self) -> None:
        """End the dispatching process and the thread; the workers have ended before.

        Calling it twice is fine, even if the first call was interrupted.
        """
        self.stop()
        # They may belong to the parent process.
        if not self._streams._run.is_ours:
            return
        self._is_closed = True
        # This ends `accept`, unless the listener was closed.
        with contextlib.suppress(OSError, EOFError):
            Client(self.address[0]).close()
        self._thread.join(time.monotonic() + ENDING)
        self._listener.close()
        self._streams.close()


# -- exceptions


class DispatchingFailed(Exception):
    """Stands in a worker for what the dispatching process has raised, which is `Relay.error`."""


class InDispatching(RemoteTraceback):
    """A traceback in the dispatching process."""

    place = "dispatching process"


@contextlib.contextmanager
def naming_dispatching() -> Iterator[None]:
    """In this context, have exceptions name the dispatching process."""
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
    """In this context, have exceptions say in their text where they were raised, as torch does."""
    try:
        yield
    except DispatchingFailed:
        assert relay is not None
        assert relay.error is not None
        raise failure.show_traceback(relay.error) from relay.error.__cause__
    except Exception as error:
        failure.show_traceback(error)
        raise
