"""From the dispatching process to the workers, by way of the main process.

Items are not decoded on their way. A large one stays in its slot of shared memory, which the main
process holds until the worker asks for what follows; small ones are sent.

Workers connect to a local socket: with an abstract name on Linux, in a folder of ours on macOS. On
Windows it is a port of this machine, and a worker proves by a secret that it was told of it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import select
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from cseq import codec, descriptors, failure
from cseq._lock import Lock
from cseq._memory import Block, copy_of
from cseq.adapters.torchdata.library import (
    Epoch,
    IterDataPipe,
)
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.launcher.forks import send_at_once
from cseq.producer import EncodedItem
from cseq.threads import Threads, imported
from cseq.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.adapters.torchdata.library import GraphFn
    from cseq.stream import Streams

    Address = str | tuple[int, bytes]  # on Windows, a port and a secret

    # How an item is sent: its record; its bytes, or its slot and how many bytes of that to map.
    Sent = tuple[tuple[int, ...], bytes | tuple[int, int]]

QUICK = 0.0005  # seconds in which a relay looks for more items to send along
ENDING = 10.0  # seconds that a thread without work may take to end
MOST_FOLDER = 72  # characters: macOS takes 103 for the name of a socket
MOST_TOGETHER = 64  # items that a relay sends in one message
DISPATCHING = "in dispatching process"
WIDTH = struct.Struct("=Q")  # bytes from one slot to the next

WINDOWS = os.name == "nt"
LOCALHOST = "127.0.0.1"
HELLO = struct.Struct("=16sQ")  # what a worker says first, on Windows: the secret, its process id
PROCESS_DUP_HANDLE = 0x40  # Windows' right to put a handle into a process


# The one that multiprocessing uses: without a descriptor of its own, which a fork would copy.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Dispatched(IterDataPipe):  # type: ignore[misc]
    """In a worker: the items that the dispatching process makes for it."""

    def __init__(self) -> None:
        self.epoch = 0
        self._connection: Connection[Any, Any] | None = None
        self._slots: Writer | None = None
        self._lock: threading.Lock | None = None

    def connect(self, address: Address, worker: int) -> None:
        """Connect to the relay in the main process."""
        self._lock = threading.Lock()
        self._connection, self._slots = _call(address)
        self._connection.send(worker)

    def _ask(self, epoch: int, position: int) -> tuple[list[EncodedItem], bytes | None]:
        """Ask for the items from `position` on; threads of an epoch that was given up do, too."""
        assert self._lock is not None
        assert self._connection is not None
        with self._lock:
            self._connection.send((epoch, position))
            items, error = pickle.loads(self._connection.recv_bytes())
            return [self._received(*item) for item in items], error  # asking again frees the slots

    def _received(self, record: tuple[int, ...], data: bytes | tuple[int, int]) -> EncodedItem:
        """Copy an item to memory of its own."""
        if isinstance(data, bytes):
            memory = Block(len(data))
            memory.store_bytes(0, data)
        else:
            assert self._slots is not None
            self._slots.select(*data)
            memory = copy_of(self._slots.memory, codec.used(record))
        return EncodedItem(memory, record)

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.epoch, 0
        while True:
            items, error = self._ask(epoch, position)
            for item in items:
                position += 1
                yield item.decode()
            if error is not None:
                raise failure.unpack(error)
            if not items:
                return


class Relay:
    """In the main process: hands the dispatching process's item i to worker i mod N, when asked.

    A thread for each worker sleeps on its connection. When its worker asks, it pulls from the
    stream until it reaches an item for this worker; items for other workers are queued, without
    bound. A worker that asks for what was sent before has replaced a dead one: then the stream is
    begun again.
    """

    def __init__(self, streams: Streams, num_workers: int) -> None:
        self._streams = streams
        self._num_workers = num_workers
        self._lock = Lock()  # around the stream and all that is below
        self._epoch: Epoch | None = None
        self._sent = [0] * num_workers
        self._together = 0  # items beyond the first that the next answer may look for
        self._next = 0  # number of the stream's next item
        self._over = False
        self._error: bytes | None = None
        self._waiting: list[deque[EncodedItem]] = []  # of each worker: items not yet sent
        # Of each worker: items that it may still read.
        self._held: list[list[EncodedItem]] = [[] for _ in range(num_workers)]
        self._rewind()
        self._folder: str | None = None
        self._secret = os.urandom(16) if WINDOWS else b""
        self._sockets: list[socket.socket] = []
        self._callers: list[socket.socket] = []
        self._accepting = Threads()
        self._serving: list[threading.Thread] = []

    def open(self) -> Address:
        """Listen for workers, and return the address; if anything is raised, call `close`."""
        name = None if WINDOWS else self._make_name()
        family = socket.AF_INET if name is None else socket.AF_UNIX
        self._sockets += map(descriptors.lifted, (socket.socket(family), *socket.socketpair()))
        listener, _, hung_up = self._sockets
        listener.bind(name or (LOCALHOST, 0))
        listener.listen(self._num_workers)
        self._accepting.add("cseq-relay", partial(self._accept, listener, hung_up))
        self._accepting.start()
        return name or (listener.getsockname()[1], self._secret)

    def _make_name(self) -> str:
        """Make a name for a socket: on Linux an abstract one, so that no file is left."""
        if sys.platform == "linux":
            return f"\0cseq-{os.urandom(16).hex()}"
        self._folder = tempfile.mkdtemp(prefix="cseq-", dir=_short_folder())  # of mode 0700
        return os.path.join(self._folder, "relay")

    def _accept(self, listener: socket.socket, hung_up: socket.socket) -> None:
        """Accept the workers' connections."""
        with Selector() as selector:
            for each in (listener, hung_up):
                selector.register(each, selectors.EVENT_READ)
            while all(key.fileobj is listener for key, _ in selector.select()):
                caller = descriptors.lifted(listener.accept()[0])
                send_at_once(caller)
                if not is_ours(caller):
                    caller.close()
                    continue
                self._callers.append(caller)
                thread = threading.Thread(
                    target=self._serve, args=(caller,), name="cseq-relay", daemon=True
                )
                self._serving.append(thread)
                thread.start()

    def _serve(self, caller: socket.socket) -> None:
        """Answer one worker until it is gone."""
        connection: Connection[Any, Any] = Connection(descriptors.lifted(caller.dup()).detach())
        with connection, contextlib.suppress(EOFError, ConnectionError):
            fd, width = self._streams.segment
            self._await(caller)
            with process_of(caller, self._secret) as process:
                descriptors.send(caller, WIDTH.pack(width), [fd], process)
            self._await(caller)
            worker = connection.recv()
            while True:
                self._await(caller)
                epoch, position = connection.recv()
                answer = self._answer(worker, epoch, position)
                connection.send_bytes(pickle.dumps(answer, protocol=5))

    def _await(self, caller: socket.socket) -> None:
        """Wait until a worker says something or is gone; EOFError: the relay is being closed.

        On Windows, where no `shutdown` ends the `recv` of another thread.
        """
        if WINDOWS:
            hung_up = self._sockets[2]
            if hung_up in select.select([caller, hung_up], [], [])[0]:
                raise EOFError

    def _answer(self, worker: int, epoch: int, position: int) -> tuple[list[Sent], bytes | None]:
        """Return items of a worker from `position` on, and the exception raised after them.

        No items: there are no more, or the epoch is over.
        """
        with self._lock.hold(), contextlib.suppress(InterruptedError):
            self._held[worker] = []
            if self._epoch is not None and self._epoch.number == epoch:
                if position < self._sent[worker]:
                    self._replay()
                self._sent[worker] = position
                self._held[worker] = items = self._collect(worker)
                return [_sent(item) for item in items], self._error
        return [], None

    def _collect(self, worker: int) -> list[EncodedItem]:
        """Take all items there are for a worker, at least one; pull more while that is quick."""
        waiting = self._waiting[worker]
        if not waiting:
            begun = time.perf_counter()
            while not waiting and self._pull():
                pass
            for _ in range(self._together * self._num_workers):
                if time.perf_counter() - begun > QUICK or not self._pull():
                    break
            was_quick = time.perf_counter() - begun <= QUICK
            self._together = min(2 * self._together + 1, MOST_TOGETHER) if was_quick else 0
        items = list(waiting)
        waiting.clear()
        self._sent[worker] += len(items)
        return items

    def _pull(self) -> bool:
        """Take an item from the stream and queue it for its worker; False: there are no more."""
        if self._over:
            return False
        try:
            item = self._streams.next(0)
        except StopIteration:
            self._over = True
            return False
        except InterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where the item is asked for
            self._over = True
            self._error = failure.pack(_of_dispatching(error))
            return False
        owner, place = self._next % self._num_workers, self._next // self._num_workers
        self._next += 1
        if place >= self._sent[owner]:
            self._waiting[owner].append(item)
        return True

    def _rewind(self) -> None:
        """Reset to the beginning of the stream."""
        self._next = 0
        self._over = False
        self._error = None
        self._waiting = [deque() for _ in range(self._num_workers)]

    def _replay(self) -> None:
        """Begin the epoch again; items that workers were sent are left out."""
        self._rewind()
        self._streams.begin([self._epoch])

    def begin(self, epoch: Epoch) -> None:
        """Begin an epoch in the dispatching process."""
        self.stop()
        with self._lock.hold():
            self._rewind()
            self._sent = [0] * self._num_workers
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
        if self._accepting.begun:
            with contextlib.suppress(OSError):  # it was closed
                # Closing it is no sign while forked processes have copies of it.
                self._sockets[1].send(b"!")
            self._accepting.join(time.monotonic() + ENDING)  # then no worker connects any more
        for caller in self._callers:
            with contextlib.suppress(OSError):  # it has hung up
                caller.shutdown(socket.SHUT_RDWR)
        for thread in self._serving:
            if thread is not threading.current_thread():  # garbage collection may run in one
                thread.join()
        for each in (*self._sockets, *self._callers):
            each.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._streams.close()


def _short_folder() -> str | None:
    """Return a folder for a socket; None: the usual one, whose name is short enough."""
    return None if len(tempfile.gettempdir()) < MOST_FOLDER else "/tmp"


def is_ours(caller: socket.socket) -> bool:
    """Whether the caller is the same user: an abstract address is open to all."""
    if sys.platform != "linux":
        return True
    format_ = struct.Struct("3i")  # process, user, group
    _, user, _ = format_.unpack(
        caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, format_.size)
    )
    return bool(user == os.getuid())


@contextlib.contextmanager
def process_of(caller: socket.socket, secret: bytes) -> Iterator[int | None]:
    """Open the caller's process, on Windows: it gets a handle of its own there."""
    if not WINDOWS:
        yield None
        return
    hello = descriptors.receive_exactly(caller, HELLO.size)
    given, pid = HELLO.unpack(hello or bytes(HELLO.size))
    if not hmac.compare_digest(given, secret):
        raise ConnectionRefusedError("the caller does not know the secret")
    winapi = imported("_winapi")
    try:
        process: int = winapi.OpenProcess(PROCESS_DUP_HANDLE, False, pid)  # noqa: FBT003
    except OSError as error:  # it has ended
        raise ConnectionResetError(error.errno, error.strerror) from error
    try:
        yield process
    finally:
        winapi.CloseHandle(process)


def _sent(item: EncodedItem) -> Sent:
    """Return an item as it is sent to a worker."""
    record = item.record[:4]
    if item.slot >= 0:
        return record, (item.slot, item.memory.nbytes)
    return record, item.memory.load_bytes(0, codec.used(record))


def _call(address: Address) -> tuple[Connection[Any, Any], Writer]:
    """Connect to a relay; it sends the file of the dispatching process's slots."""
    caller = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        if isinstance(address, str):
            caller.connect(address)
        else:
            port, secret = address
            caller.connect((LOCALHOST, port))
            send_at_once(caller)
            caller.sendall(HELLO.pack(secret, os.getpid()))
        width, (fd,) = descriptors.receive(caller, WIDTH.size, 1)
    except BaseException:
        caller.close()
        raise
    return Connection(caller.detach()), Writer(fd, *WIDTH.unpack(width))


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
