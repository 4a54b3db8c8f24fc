"""Connections of a process to the one that fetches the shards of a folder.

A message is a line of JSON. A connection has one message at a time that waits for an answer, so
each thread, and each handler of a signal, takes a free connection or makes one. Who finds nobody at
the folder's socket starts the process that fetches, and has the first connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import weakref
from typing import Any

from cseq.files import locked
from cseq.memory.descriptors import lifted
from cseq.store.folder import Folder, address

__all__ = ["Client"]

# In a row, of a process that ends before it answers.
STARTS = 5
# That it may take to start.
SECONDS = 60.0
KINDS = {"ValueError": ValueError, "OSError": OSError}


class Line:
    """A connection to the process that fetches."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._file = sock, sock.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._sock.sendall(data)

    def receive(self) -> Any:
        """Wait for an answer; return what it has, or an error that it tells of."""
        line = self._file.readline()
        if not line:
            raise ConnectionResetError
        value, *error = json.loads(line)
        return KINDS[value](*error) if error else value

    def close(self) -> None:
        """Close it."""
        self._file.close()
        self._sock.close()


class Client(Folder):
    """The connections of this process to one folder."""

    argument = "cache"

    def __init__(self, path: str, about: dict[str, Any], *, is_kept: bool) -> None:
        self._free: list[Line] = []
        super().__init__(path, about, is_kept=is_kept)
        weakref.finalize(self, _close, self._free)

    def reset(self) -> None:
        """Begin without connections."""
        _close(self._free)

    def ask(self, start: bytes, *message: Any, answers: bool = True) -> Any:
        """Send a message, and return the answer, if it has one.

        Parameters
        ----------
        start : bytes
            A pickle of what the process that fetches needs to know, if it must be started.

        Raises
        ------
        OSError, ValueError
            What the process met as it did what the message asks for.
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
                is_whole = True
            except ConnectionError:
                # The process has ended, so the other connections are of no use, either.
                self.reset()
                continue
            finally:
                # Nor is one that is in the middle of a message.
                if is_whole:
                    self._free.append(line)
                else:
                    line.close()
            return _checked(answer)
        raise OSError(
            f"the process that fetches shards into {self.path} ended {STARTS} times in a row; "
            "its errors are on standard error"
        )

    def _connection(self, start: bytes) -> Line:
        """Connect to the process that fetches; start it if there is none."""
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
        """Start the process that fetches; return the connection to it when it listens."""
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
                f"the process that fetches shards into {self.path} does not start: its errors are "
                "on standard error; is the folder on a local disk?"
            ) from error
        except BaseException:
            line.close()
            raise
        finally:
            # It has left the work to a child of its own.
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
