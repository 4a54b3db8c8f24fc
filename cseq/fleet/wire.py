"""The connection between a trainer and an agent: a request, then its answer.

Both ends prove first that they have the agent's key. Then each unpickles what the other sends.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cseq._memory import Block, Memory, Window

if TYPE_CHECKING:
    from collections.abc import Callable

    Message: TypeAlias = tuple[bytes, list[Any]]  # a pickle, and the buffers beside it

__all__ = ["Buffers", "Connection", "Listener"]

log = logging.getLogger("cseq")

PROOF_SECONDS = 5.0  # for both proofs together
STRANGERS = 64  # connections at a time that have proved nothing yet; others wait
NONCE = 32  # bytes
ROLES = b"trainer", b"agent"
HEAD = struct.Struct("<QQ")  # bytes of the pickle, and how many buffers there are
ALIGN = 64  # bytes, of buffers
SMALL = 1 << 17  # bytes of a message that are copied together
LARGE = 1 << 20  # bytes from which on memory is used again
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # s: 25 for a lost machine


class Buffers:
    """Memory that batches are received in; that of large ones is used again when they are gone."""

    def __init__(self) -> None:
        self._free: deque[Block] = deque()  # they come back on any thread
        self._lock = threading.Lock()  # for those who take

    def take(self, size: int) -> Memory:
        """Return so many bytes. There are never more blocks than were in use at a time."""
        if size < LARGE:
            return Block(size)
        with self._lock:
            free = [self._free.popleft() for _ in range(len(self._free))]
            fits = [one for one in free if size <= one.nbytes <= 2 * size]
            block = fits[0] if fits else Block(size + size // 8)
            self._free.extend(one for one in (free if fits else free[1:]) if one is not block)
        lent = Window(block, size)  # what arrays refer to
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent


class Connection:
    """One end of a connection; the other one has proved that it has the key.

    Raises
    ------
    PermissionError
        It has another key.
    OSError, EOFError
        It is silent, or gone.
    """

    def __init__(self, raw: socket.socket, key: bytes, *, is_agent: bool) -> None:
        self._raw, deadline = raw, time.monotonic() + PROOF_SECONDS
        me, other = ROLES[is_agent], ROLES[not is_agent]
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                if hasattr(socket, name):
                    raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            raw.settimeout(PROOF_SECONDS)
            mine = secrets.token_bytes(NONCE)
            raw.sendall(mine)
            theirs = bytes(self._read(NONCE, deadline=deadline))
            raw.sendall(hmac.digest(key, me + theirs + mine, "sha256"))
            proof = bytes(self._read(NONCE, deadline=deadline))
            if not hmac.compare_digest(proof, hmac.digest(key, other + mine + theirs, "sha256")):
                raise PermissionError("the other end has not the key of the agent")
            raw.settimeout(None)
            self.wait_for = raw.settimeout  # TimeoutError, where nothing comes for so long
        except BaseException:
            raw.close()
            raise

    def send(self, data: bytes, buffers: list[Any]) -> None:
        """Send a message."""
        sizes = [buffer.nbytes for buffer in buffers]
        parts = [HEAD.pack(len(data), len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes), data]
        for buffer, size in zip(buffers, sizes, strict=True):
            parts += [buffer, bytes(-size % ALIGN)]
        for part in parts if sum(sizes) > SMALL else [b"".join(parts)]:
            self._raw.sendall(part)

    def receive(self, take: Callable[[int], Memory] = Block) -> Message:
        """Receive a message, its buffers in what `take` returns."""
        length, count = HEAD.unpack(self._read(HEAD.size))
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
        data = bytes(self._read(length))
        starts = np.cumsum([0, *(size + -size % ALIGN for size in sizes)]).tolist()
        body = self._read(starts.pop(), take)
        return data, [body[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def _read(
        self, size: int, take: Callable[[int], Memory] = Block, deadline: float | None = None
    ) -> memoryview:
        """Read so many bytes."""
        found, at = memoryview(take(size)), 0
        while at < size:
            if deadline is not None:
                self._raw.settimeout(max(deadline - time.monotonic(), 1e-3))
            got = self._raw.recv_into(found[at:], 0, socket.MSG_WAITALL)
            if not got:
                raise EOFError("the connection was closed at the other end")
            at += got
        return found

    def close(self) -> None:
        """End it; calls that wait in other threads raise."""
        with contextlib.suppress(OSError):  # it is over
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


class Listener:
    """Where trainers connect to an agent; each connection is served on a thread of its own."""

    def __init__(self, host: str, serve: Callable[[Connection], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.key = secrets.token_bytes(NONCE)
        self._serve, self._is_told = serve, False
        self._strangers = threading.Semaphore(STRANGERS)
        threading.Thread(target=self._accept, name="cseq-listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                raw, (host, *_) = self._socket.accept()
            except OSError:  # there is no descriptor left
                self._strangers.release()
                time.sleep(0.1)
            else:
                threading.Thread(target=self._meet, args=(raw, host), daemon=True).start()

    def _meet(self, raw: socket.socket, host: str) -> None:
        """Serve a connection whose other end has the key; tell of the first one that has not."""
        try:
            connection = Connection(raw, self.key, is_agent=True)
        except (OSError, EOFError) as error:
            if not self._is_told:
                self._is_told = True
                log.warning("refused a connection from %s, and tell of no other: %s", host, error)
            return
        finally:
            self._strangers.release()
        with contextlib.closing(connection), contextlib.suppress(OSError, EOFError):
            self._serve(connection)
