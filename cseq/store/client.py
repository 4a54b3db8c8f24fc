"""A process's connections to a folder's fetcher.

Messages are lines of JSON. A connection is used for one request at a time, so each thread and each
signal handler needs its own. A process that cannot connect starts the fetcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

from cseq.files import locked
from cseq.memory.descriptors import lifted
from cseq.store.folder import Folder, address

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Client"]

# Number of times that a fetcher may exit before a request fails.
STARTS = 5
# Time limit for a fetcher to start, in seconds.
SECONDS = 60.0
KINDS = {"ValueError": ValueError, "OSError": OSError}


class Line:
    """A connection to the fetcher."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._file = sock, sock.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send all bytes."""
        self._sock.sendall(data)

    def receive(self) -> Any:
        """Return the answer, or an exception if the fetcher reports one."""
        line = self._file.readline()
        if not line:
            raise ConnectionResetError
        value, *error = json.loads(line)
        return KINDS[value](*error) if error else value

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._sock.close()


class Client(Folder):
    """Connections from this process to a folder's fetcher."""

    argument = "cache"

    def __init__(self, path: str, about: dict[str, Any], *, is_kept: bool) -> None:
        self._free: list[Line] = []
        super().__init__(path, about, is_kept=is_kept)
        weakref.finalize(self, _close, self._free)

    def reset(self) -> None:
        """Close all idle connections."""
        _close(self._free)

    def ask(
        self,
        start: bytes,
        *message: Any,
        answers: bool = True,
        use: Callable[[Any], object] | None = None,
    ) -> Any:
        """Send a message. Return the answer if `answers` is set.

        Parameters
        ----------
        start : bytes
            The pickled class and state of the reader, used to start a fetcher.
        use : callable, optional
            A function to call with the answer. The fetcher learns when it has returned. If it
            raises, the connection is closed.

        Raises
        ------
        OSError, ValueError
            If the fetcher reports an error, or if fetchers have exited several times in a row.
        """
        for _ in range(STARTS):
            try:
                line = self._free.pop()
            except IndexError:
                line = self._connection(start)
            is_whole = False
            try:
                line.send(json.dumps(message).encode() + b"\n")
                answer = line.receive() if answers else None
                if use is not None and not isinstance(answer, Exception):
                    use(answer)
                    line.send(b'["used"]\n')
                is_whole = True
            except ConnectionError:
                # The other connections are dead as well.
                self.reset()
                continue
            finally:
                # Do not reuse a connection after an incomplete message.
                if is_whole:
                    self._free.append(line)
                else:
                    line.close()
            return _checked(answer)
        raise OSError(
            f"the process that fetches shards into {self.path} exited {STARTS} times in a row; "
            "its error messages are on standard error"
        )

    def _connection(self, start: bytes) -> Line:
        """Connect to the fetcher. Start it if necessary."""
        lock = locked(f"{self.path}/starting")
        sock = lifted(socket.socket(socket.AF_UNIX))
        try:
            with address(self.path) as path:
                sock.connect(path)
            return Line(sock)
        except (FileNotFoundError, ConnectionError):
            sock.close()
            return self._started(start)
        finally:
            if lock is not None:
                os.close(lock)

    def _started(self, start: bytes) -> Line:
        from cseq.processes.launcher.processes import describe_start, spawn

        child = spawn(describe_start("", "cseq.store.fetcher"), "cseq-fetch", 1)
        child.sock.settimeout(SECONDS)
        line = Line(child.sock)
        try:
            line.send(start)
            _checked(line.receive())
        except (ConnectionError, TimeoutError) as error:
            line.close()
            raise OSError(
                f"the process that fetches shards into {self.path} did not start. See its error "
                "messages on standard error, and check that the folder is on a local disk"
            ) from error
        except BaseException:
            line.close()
            raise
        finally:
            # The child exits after forking the fetcher.
            child.status(SECONDS)
        child.sock.settimeout(None)
        return line


def _checked(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _close(lines: list[Line]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            lines.pop().close()
