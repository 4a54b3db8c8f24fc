"""From the dispatching process to the workers, by way of the main process.

That outlives both. An item is pickled where it is made and unpickled in its worker, which asks for
it through a connection of `multiprocessing`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections import deque
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any, cast

from cseq._core import Lock
from cseq.adapters.torchdata.library import Epoch, IterDataPipe
from cseq.encoding import failure
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from cseq.adapters.torchdata.library import GraphFn
    from cseq.stream import Streams

    Address = tuple[Any, bytes]  # of the relay, and the secret that its callers know

ENDING = 10.0  # seconds that a thread without work may take to end
DISPATCHING = "in dispatching process"


class Dispatched(IterDataPipe):  # type: ignore[misc]
    """In a worker: the items that the dispatching process makes for it."""

    def __init__(self, address: Address, worker: int) -> None:
        self.epoch = 0
        self._worker = worker
        self._lock = threading.Lock()
        self._connection: Connection[Any, Any] = Client(address[0], authkey=address[1])

    def _ask(self, epoch: int) -> tuple[list[bytes], bytes | None]:
        """Ask for the next items; threads of an epoch that was given up do, too."""
        with self._lock:
            self._connection.send((self._worker, epoch))
            answer: tuple[list[bytes], bytes | None] = self._connection.recv()
            return answer

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while True:
            items, error = self._ask(epoch)
            yield from map(pickle.loads, items)
            if error is not None:
                raise failure.unpack(error)
            if not items:
                return


class Relay:
    """In the main process: hands the dispatching process's item i to worker i mod N, when asked.

    A thread for each worker answers it. It pulls from the stream until it reaches an item for this
    worker; items for other workers are queued, without bound.
    """

    def __init__(self, streams: Streams, num_workers: int) -> None:
        self._streams = streams
        self._num_workers = num_workers
        self._lock = Lock()  # around the stream and all that is below
        self._epoch: Epoch | None = None
        self._next = 0  # number of the stream's next item
        self._is_over = False
        self._error: bytes | None = None
        self._waiting: list[deque[bytes]] = []  # of each worker: items not yet sent
        self._secret = os.urandom(16)
        self._listener: Listener | None = None
        self._name: Any = None
        self._is_closed = False
        self._accepting = Threads()
        self._serving: list[threading.Thread] = []

    def open(self) -> Address:
        """Listen for workers, and return the address; if anything is raised, call `close`."""
        # An abstract name leaves no file.
        name = f"\0cseq-{os.urandom(16).hex()}" if sys.platform == "linux" else None
        self._listener = Listener(name, backlog=self._num_workers, authkey=self._secret)
        self._name = self._listener.address
        self._accepting.add("cseq-relay", self._accept)
        self._accepting.start()
        return self._name, self._secret

    def _accept(self) -> None:
        """Accept the workers' connections, until `close`."""
        assert self._listener is not None
        while not self._is_closed:
            # A caller may have died, or not know the secret.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                serve = partial(self._serve, self._listener.accept())
                thread = threading.Thread(target=serve, name="cseq-relay", daemon=True)
                self._serving.append(thread)
                thread.start()

    def _serve(self, caller: Connection[Any, Any]) -> None:
        """Answer one worker until it is gone."""
        with caller, contextlib.suppress(EOFError, OSError):
            while True:
                caller.send(self._answer(*caller.recv()))

    def _answer(self, worker: int, epoch: int) -> tuple[list[bytes], bytes | None]:
        """Return the next items of a worker, and the exception raised after them.

        No items: there are no more, or the epoch is over.
        """
        with self._lock.hold(), contextlib.suppress(InterruptedError):
            if self._epoch is not None and self._epoch.number == epoch:
                waiting = self._waiting[worker]
                while not waiting and self._pull():
                    pass
                for _ in range(self._streams.stats().depths[-1]):  # those that are ready
                    self._pull()
                items = list(waiting)
                waiting.clear()
                return items, self._error
        return [], None

    def _pull(self) -> bool:
        """Take an item from the stream and queue it for its worker; False: there are no more."""
        if self._is_over:
            return False
        try:
            item = self._streams.next(0)
        except InterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where the item is asked for
            self._is_over = True
            if not isinstance(error, StopIteration):
                self._error = failure.pack(_of_dispatching(error))
            return False
        self._waiting[self._next % self._num_workers].append(item)
        self._next += 1
        return True

    def begin(self, epoch: Epoch) -> None:
        """Begin an epoch in the dispatching process."""
        self.stop()
        with self._lock.hold():
            self._next, self._is_over, self._error = 0, False, None
            self._waiting = [deque() for _ in range(self._num_workers)]
            self._streams.begin([epoch])
            self._epoch = epoch

    def ask(self, verb: str, function: GraphFn | None) -> None:
        """Make the dispatching process pause or resume."""
        with self._lock.hold():
            self._streams.ask(verb, function, behind=True)

    def stop(self) -> None:
        """End the epoch: a worker that waits or asks for an item of it gets none."""
        self._epoch = None
        self._streams.interrupt()

    def close(self) -> None:
        """End the dispatching process and the threads; the workers have ended before.

        Calling it twice is fine, also if the first call was interrupted.
        """
        self.stop()
        if not self._streams._run.is_ours:  # those of the process that forked this one
            return
        self._is_closed = True
        deadline = time.monotonic() + ENDING
        if self._listener is not None:
            with contextlib.suppress(OSError, EOFError):  # it was closed
                Client(self._name).close()  # which ends `accept`
            self._accepting.join(deadline)
            self._listener.close()
        for thread in self._serving:
            if thread is not threading.current_thread():  # garbage collection may run in one
                thread.join(max(0.0, deadline - time.monotonic()))
        self._streams.close()


def _of_dispatching(error: Exception) -> Exception:
    """Name the dispatching process in an error about its death or timeout."""
    made: Any
    text = f"the dispatching process: {error}"
    if isinstance(error, WorkerDied):
        made = WorkerDied(text, exitcode=error.exitcode)
    elif isinstance(error, WorkerTimeout):
        made = WorkerTimeout(text)
    else:
        return error
    made._cseq_where = DISPATCHING
    return cast("Exception", made)
