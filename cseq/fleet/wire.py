"""The connection between a trainer and an agent.

Messages are unpickled, so both ends must first prove that they have the key.
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
    from collections.abc import Callable, Sequence

    # A pickle and the buffers it refers to.
    Message: TypeAlias = tuple[bytes, list[Any]]

__all__ = ["Buffers", "Connection"]

PROOF_SECONDS = 5.0
LENGTH = struct.Struct("<Q")
ALIGN = 64
SMALL = 1 << 17
# Blocks of at least this many bytes are reused.
LARGE = 1 << 20
# The other machine is considered lost if it does not respond for 25 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


class Buffers:
    """Memory for received batches. Large blocks are reused."""

    def __init__(self) -> None:
        self._free: list[Block] = []

    def take_memory(self, size: int) -> Memory:
        """Return `size` bytes of memory from a free block or a new one."""
        if size < LARGE:
            return Block(size)
        block = None
        with contextlib.suppress(IndexError):
            block = self._free.pop()
        if block is None or not size <= block.nbytes <= 2 * size:
            block = Block(size + size // 8)
        lent = Loan(block, size)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent


class Connection:
    """One end of a connection. The constructor fails if the other end does not have the key."""

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
        """Prove that this end has the key, and check that the other end does."""
        proofs = [connection.deliver_challenge, connection.answer_challenge]
        with connection.Connection(self._raw.dup().detach()) as copy:
            try:
                for proof in reversed(proofs) if is_agent else proofs:
                    proof(copy, key)
            except (AuthenticationError, AssertionError) as error:
                raise PermissionError(f"the other end does not have the key: {error}") from error

    def send(self, data: bytes, buffers: Sequence[memoryview]) -> None:
        """Send a message."""
        head = pickle.dumps((data, [buffer.nbytes for buffer in buffers]))
        self._out.write(LENGTH.pack(len(head)) + head)
        for buffer in buffers:
            self._out.write(buffer)
            self._out.write(bytes(-buffer.nbytes % ALIGN))
        self._out.flush()

    def wait(self, seconds: float | None) -> bool:
        """Wait at most `seconds`. Return True if there is data or the stream has ended."""
        self._raw.settimeout(seconds)
        return bool(connection.wait([self._raw], seconds))

    def receive(self, allocate: Callable[[int], Memory] = Block) -> Message:
        """Receive a message. Allocate the memory for its buffers with `allocate`."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        head: tuple[bytes, list[int]] = pickle.loads(self._read(size))
        data, sizes = head
        *offsets, total = accumulate((size + -size % ALIGN for size in sizes), initial=0)
        body = self._read(total, allocate)
        parts = [body[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        return data, parts

    def _read(self, size: int, allocate: Callable[[int], Memory] = Block) -> memoryview:
        data, offset = memoryview(allocate(size)), 0
        while offset < size:
            received = self._raw.recv_into(data[offset:], 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError("the other end closed the connection")
            offset += received
        return data

    def close(self) -> None:
        """Close the connection. Pending calls in other threads raise an exception."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        # Without a GIL, another thread may be closing the file (ValueError).
        with contextlib.suppress(OSError, ValueError):
            self._out.close()
        self._raw.close()
