"""Connections of a process to the one that fetches the shards of a folder.

A message is a line of JSON. A connection has one message at a time that waits for answers; so each
thread, and each handler of a signal, takes a free connection, or makes one. Who finds nobody at the
folder's socket starts the process that fetches.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from typing import TYPE_CHECKING, Any

from cseq.files import locked
from cseq.store import folder as folders

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["Client"]

# In a row, of a process that ends before it answers.
STARTS = 5
# That it may take to start.
SECONDS = 60.0
ERRORS = {"ValueError": ValueError, "OSError": OSError}


class Line:
    """A connection to the process that fetches."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = bytearray()

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; return whether the other end is there."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message, or return None if the other end is gone. An error is raised."""
        while b"\n" not in self._rest:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise ERRORS[message["kind"]](message["error"])
        return message


class Client:
    """The connections of this process to one folder.

    Parameters
    ----------
    folder : str
    spec : bytes
        A pickle of what the process that fetches needs to know.
    is_kept : bool
        False: the last process that has the folder open removes it.
    """

    def __init__(self, folder: str, spec: bytes, *, is_kept: bool) -> None:
        self.folder, self._spec = folder, spec
        self._free: list[Line] = []
        self._users = folders.users_of(folder)
        finish = weakref.finalize(self, _end, folder, self._users, self._free, os.getpid())
        if is_kept:
            finish.detach()
            weakref.finalize(self, _end, "", self._users, self._free, os.getpid())
        _clients.add(self)

    def forget(self) -> None:
        """Close, in a forked process, what belongs to its parent."""
        while self._free:
            self._free.pop().sock.close()

    def ask(self, message: dict[str, Any], *, begins: bool = False) -> dict[str, Any]:
        """Send a message, and return the answer. `begins`: of a run, which goes on with nothing."""
        for _ in range(STARTS):
            line = self._take(begins=begins)
            answer = self._talk(line, lambda line: line.receive() if line.send(message) else None)
            if answer is not None:
                found: dict[str, Any] = answer
                return found
        raise self._ended()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        for _ in range(STARTS):
            if self._talk(self._take(), lambda line: line.send(message)):
                return
        raise self._ended()

    def fetch(self, shards: list[int], files: dict[int, int], found: Callable[[int], bool]) -> None:
        """Wait for the shards of a batch; `found` opens one, and returns whether it is there."""

        def wait(line: Line) -> bool | None:
            missing = {each for each in shards if each not in files}
            is_there = line.send({"use": shards, "need": [*missing]})
            while is_there and missing:
                answer = line.receive()
                if answer is None:
                    return None
                number = answer["have"]
                if found(number):
                    missing.discard(number)
                # It had to make room for another one meanwhile.
                elif number in missing:
                    is_there = line.send({"use": shards, "need": [number]})
            return None if missing else True

        for _ in range(STARTS):
            if self._talk(self._take(), wait):
                return
        raise self._ended()

    def _talk(self, line: Line, act: Callable[[Line], Any]) -> Any:
        """Use a connection; one that is at its end, or in the middle of something, is closed."""
        answer = None
        try:
            answer = act(line)
        finally:
            if answer:
                self._free.append(line)
            else:
                line.sock.close()
        return answer

    def _ended(self) -> OSError:
        return OSError(
            f"the process that fetches shards into {self.folder} ended {STARTS} times in a row; "
            "its errors are on standard error"
        )

    def _take(self, *, begins: bool = False) -> Line:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        for _ in range(STARTS):
            sock = folders.dial(self.folder) or self._started(begins=begins)
            if sock is None:
                continue
            line = Line(sock)
            if self._talk(line, lambda line: line.receive() if line.send({"hello": 1}) else None):
                return self._free.pop()
        raise self._ended()

    def _started(self, *, begins: bool) -> socket.socket | None:
        """Start the process that fetches, unless another one does, and connect to it."""
        lock = locked(f"{self.folder}/starting")
        if lock is None:
            return None
        try:
            sock = folders.dial(self.folder)
            if sock is None:
                _start(self._spec, begins=begins)
                sock = folders.dial(self.folder)
            return sock
        finally:
            os.close(lock)


def _start(spec: bytes, *, begins: bool) -> None:
    """Start a process that fetches; return when it listens."""
    from cseq.processes.launcher.processes import describe_start, spawn

    child = spawn(describe_start("", "cseq.store.fetcher"), "cseq-fetch", 1)
    said = bytearray()
    with child.sock as sock:
        sock.settimeout(SECONDS)
        try:
            sock.sendall(folders.LENGTH.pack(len(spec)) + bytes([begins]) + spec)
            while data := sock.recv(1 << 16):
                said += data
        except ConnectionError:
            pass
        except TimeoutError:
            child.kill()
            said += b"it took longer than %d s" % SECONDS
    # It has left the work to a child of its own.
    child.status(SECONDS)
    if said:
        raise OSError(f"the process that fetches shards cannot start: {said.decode()}")


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget() -> None:
    for client in [*_clients]:
        client.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _end(folder: str, users: int, lines: list[Line], pid: int) -> None:
    """Close the connections; remove the folder, if this was the last process with it.

    Mostly, that is the process that fetches: it ends with its last connection.
    """
    if os.getpid() == pid:
        os.close(users)
        while lines:
            lines.pop().sock.close()
        if folder:
            folders.remove_unused(folder)
