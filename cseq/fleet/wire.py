"""The connection between a trainer and an agent: a request, then its answer.

Both ends prove first that they have the key of the connection. Then each unpickles what the other
sends.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
import weakref
from itertools import accumulate
from multiprocessing import AuthenticationError, connection
from typing import TYPE_CHECKING, Any, TypeAlias

from cseq._memory import Block, Loan, Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    Message: TypeAlias = tuple[bytes, list[Any]]  # a pickle, and the buffers beside it

__all__ = ["Buffers", "Connection"]

PROOF_SECONDS = 5.0  # for both proofs together
LENGTH = struct.Struct("<Q")
ALIGN = 64  # bytes, of buffers
SMALL = 1 << 17  # bytes that are sent together
LARGE = 1 << 20  # bytes; the memory of as many, or more, is used again
KEEP_ALIVE = {  # 25 s for a machine that is lost, or takes nothing
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


class Buffers:
    """Memory that batches are received in; that of large ones is used again when they are gone."""

    def __init__(self) -> None:
        self._free: list[Block] = []  # they come back on any thread

    def take_memory(self, size: int) -> Memory:
        """Return so many bytes. There are never more blocks than were in use at a time."""
        if size < LARGE:
            return Block(size)
        block = None
        with contextlib.suppress(IndexError):  # all are in use
            block = self._free.pop()
        if block is None or not size <= block.nbytes <= 2 * size:
            block = Block(size + size // 8)
        lent = Loan(block, size)  # what arrays refer to
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent


class Connection:
    """One end of a connection; the other one has proved that it has the key, or this raises."""

    def __init__(self, raw: socket.socket, key: bytes, *, is_agent: bool) -> None:
        self._raw, self._out = raw, raw.makefile("wb", SMALL)
        deadline = threading.Timer(PROOF_SECONDS, self.close)
        deadline.start()
        try:
            raw.settimeout(None)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in KEEP_ALIVE.keys() & vars(socket).keys():
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEP_ALIVE[name])
            self._prove(key, is_agent=is_agent)
        except BaseException:
            self.close()
            raise
        finally:
            deadline.cancel()

    def _prove(self, key: bytes, *, is_agent: bool) -> None:
        """Prove that this end has the key, and have the other end prove it."""
        proofs = [connection.deliver_challenge, connection.answer_challenge]
        with connection.Connection(self._raw.dup().detach()) as copy:
            try:
                for proof in reversed(proofs) if is_agent else proofs:
                    proof(copy, key)
            except (AuthenticationError, AssertionError) as error:  # before Python 3.12, the latter
                raise PermissionError(f"the other end does not have the key: {error}") from error

    def send(self, data: bytes, buffers: list[Any]) -> None:
        """Send a message."""
        head = pickle.dumps((data, [buffer.nbytes for buffer in buffers]))
        self._out.write(LENGTH.pack(len(head)) + head)
        for buffer in buffers:
            self._out.write(buffer)
            self._out.write(bytes(-buffer.nbytes % ALIGN))
        self._out.flush()

    def wait(self, seconds: float | None) -> bool:
        """Wait at most so long; return whether a message comes, or the end."""
        self._raw.settimeout(seconds)  # between its parts, too
        return bool(connection.wait([self._raw], seconds))

    def receive(self, allocate: Callable[[int], Memory] = Block) -> Message:
        """Receive a message, its buffers in what `allocate` returns."""
        data, sizes = pickle.loads(self._read(*LENGTH.unpack(self._read(LENGTH.size))))
        *starts, total = accumulate((size + -size % ALIGN for size in sizes), initial=0)
        body = self._read(total, allocate)
        return data, [body[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def _read(self, size: int, allocate: Callable[[int], Memory] = Block) -> memoryview:
        """Read so many bytes."""
        found, at = memoryview(allocate(size)), 0
        while at < size:
            got = self._raw.recv_into(found[at:], 0, socket.MSG_WAITALL)
            if not got:
                raise EOFError("the connection was closed at the other end")
            at += got
        return found

    def close(self) -> None:
        """End it; calls that wait in other threads raise."""
        with contextlib.suppress(OSError):  # it is over
            self._raw.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # what was not sent is lost
            self._out.close()
        self._raw.close()
