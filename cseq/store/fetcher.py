"""The fetcher: a process that fetches shards, one per folder.

::

    <cache>/index      the name, size and tag of each object; each shard's row count and size
    <cache>/socket     the socket that workers connect to
    <cache>/fetcher    a file that this process locks until it exits
    <cache>/shards/5   a shard, named 5.part while it is being written

Only this process writes and removes shards. A shard is renamed when it is complete. Workers
that have mapped a shard can still read it after it is removed.

The process exits when its last connection is closed. Only `Reader.finish` runs in other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import os
import pickle
import shutil
import socket
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cseq.files import whole
from cseq.memory.descriptors import lifted
from cseq.processes.launcher.child import prepare, set_name
from cseq.store.folder import address, close, users_of
from cseq.store.objects import Object, Remote, changed
from cseq.store.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cseq.processes.launcher.base import Start
    from cseq.store.reader import Reader

__all__ = ["Fetcher", "begin_process"]

# Maximum length of a message in bytes.
LONGEST = 1 << 26


class Fetcher:
    """Fetches shards and answers requests from workers.

    Attributes
    ----------
    objects : list of Object
        The objects in the store.
    have : dict of int to int
        The sizes in bytes of the shards in the folder, most recently used last.
    running : dict of int to Task
        The fetches in progress, by shard.
    errors : dict of int to Exception
        Exceptions from fetches, by shard.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader, self.folder = reader, reader.folder
        self.remote = Remote(reader.place, reader.store, reader.timeout)
        self.objects: list[Object] = []
        self.have: dict[int, int] = {}
        self.held = self.fetched = self.fetched_nbytes = 0
        self.running: dict[int, asyncio.Task[None]] = {}
        self.errors: dict[int, Exception] = {}
        self.plan: Plan | None = None
        # For each connection, the shards it is waiting for, and the shards it has yet to map.
        self._needed: dict[asyncio.StreamWriter, list[int]] = {}
        self._given: dict[asyncio.StreamWriter, list[int]] = {}
        self._users = 0
        self._changed, self._over = asyncio.Event(), asyncio.Event()

    async def serve(self, first: socket.socket, listening: socket.socket) -> None:
        """Handle connections until the last one is closed."""
        self._opening = asyncio.create_task(self._open())
        streams = await asyncio.open_unix_connection(sock=first, limit=LONGEST)
        attending = asyncio.create_task(self._attend(*streams))
        server = await asyncio.start_unix_server(self._attend, sock=listening, limit=LONGEST)
        await self._over.wait()
        await attending
        server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages from a connection until it is closed."""
        self._users += 1
        try:
            while True:
                line = await reader.readline()
                if not line:
                    return
                verb, *given = json.loads(line)
                # Every message, including "used", ends the claim on the given shards.
                self._given.pop(writer, None)
                await asyncio.wait([self._opening])
                if error := self._opening.exception():
                    writer.write(_line(error))
                    await writer.drain()
                    return
                if verb == "need":
                    writer.write(_line(await self._await(writer, *given)))
                elif verb == "stats":
                    amounts = len(self.have), self.held, self.reader.limit
                    writer.write(_line([*amounts, self.fetched, self.fetched_nbytes]))
                elif verb == "plan":
                    self._read_at(*given)
                elif verb == "use":
                    self._use(*given)
                self._schedule()
        except ConnectionError:
            pass
        finally:
            self._given.pop(writer, None)
            writer.close()
            self._users -= 1
            if self._users:
                self._schedule()
            else:
                self._over.set()

    async def _await(self, writer: asyncio.StreamWriter, missing: list[int]) -> Any:
        """Wait for at least one of the shards. Return the available ones, or an error."""
        for number in missing:
            self.errors.pop(number, None)
            # Another program must have removed the file.
            if number in self.have and not os.path.exists(f"{self.folder}/shards/{number}"):
                self.held -= self.have.pop(number)
        self._needed[writer] = missing
        try:
            while not {*missing} & (self.have.keys() | self.errors.keys()):
                self._schedule()
                await self._changed.wait()
        finally:
            del self._needed[writer]
        for number in missing:
            if number in self.errors:
                return self.errors[number]
        # The others may be removed before the worker asks for them again, and are then fetched
        # again. A claim on them would block other workers if this one were interrupted.
        self._given[writer] = [number for number in missing if number in self.have]
        return self._given[writer]

    def _read_at(self, *place: int) -> None:
        """Record a trainer's position in the order."""
        if self.plan is None or not self.plan.has(*place):
            self.plan = Plan(self.reader.sizes, *place)

    def _use(self, shards: list[int], reader: int) -> None:
        for number in shards:
            if number in self.have:
                self.have[number] = self.have.pop(number)
        if self.plan is not None:
            self.plan.advance(shards, reader)

    async def _open(self) -> None:
        """Read or create the index, and find the shards already in the folder."""
        shards, path = f"{self.folder}/shards", f"{self.folder}/index"
        os.makedirs(shards, exist_ok=True)
        try:
            with open(path, encoding="utf-8") as file:
                self.objects = [Object(*one) for one in json.load(file)["objects"]]
        except FileNotFoundError:
            shutil.rmtree(shards)
            os.makedirs(shards)
            self.objects = await self.remote.list()
            self.reader.nbytes = np.array([one.nbytes for one in self.objects])
            facts = await self.reader.survey(self.remote, self.objects, self.put)
            with whole(path) as file:
                json.dump({"objects": self.objects, **facts}, file)
        else:
            await self._compare()
        self.reader.load()
        for name in os.listdir(shards):
            if name.isdigit():
                self.keep(int(name), os.path.getsize(f"{shards}/{name}"))
            else:
                os.unlink(f"{shards}/{name}")
        while self.held > self.reader.limit:
            self.remove(next(iter(self.have)))

    async def _compare(self) -> None:
        """Compare the objects with the index, if they can be listed with one request."""
        if self.reader.place.names:
            # Objects that were passed by name are checked when they are read.
            return
        there = {one.name: one for one in await self.remote.list()}
        for before in self.objects:
            now = there.pop(before.name, None)
            if now != before:
                raise changed(self.remote.describe(before), before, now)
        for new in there.values():
            raise ValueError(
                f"shard {self.remote.describe(new)} was added after the index in "
                f"cache={self.folder!r} was created; pass a different folder, or delete this one"
            )

    def _schedule(self) -> None:
        """Start fetches: first for waiting workers, then for the plan."""
        needed = {number: None for missing in self._needed.values() for number in missing}
        coming = [] if self.plan is None else self.plan.coming(self.reader.ahead)
        for number in dict.fromkeys([*needed, *coming]):
            if number in self.have or number in self.running or number in self.errors:
                continue
            is_needed = number in needed
            if not is_needed and len(self.running) >= self.reader.ahead:
                return
            if not self._make_room(number, needed, is_needed=is_needed):
                return
            self.running[number] = asyncio.create_task(self._fetch(number))

    def _make_room(self, number: int, needed: Iterable[int], *, is_needed: bool) -> bool:
        """Remove shards until there is room for the given one. Return False if the fetch must wait.

        The shard whose next use is furthest away is removed first or, without a plan, the most
        recently used one. Shards that workers have yet to map are not removed.
        """
        nbytes = self.reader.nbytes
        # Do not wait for room, because `put` will raise an error about the limit.
        if nbytes[number] > self.reader.limit:
            return True
        busy = {*needed}.union(*self._given.values())
        coming = [*{*self.running, number}]
        while self.held + int(nbytes[coming].sum()) > self.reader.limit:
            free = [one for one in self.have if one not in busy]
            if not free:
                return False
            last = free[-1]
            if self.plan is not None:
                uses = self.plan.uses()
                last = max(free, key=uses.__getitem__)
                if not is_needed and uses[last] <= uses[number]:
                    return False
            self.remove(last)
        return True

    def keep(self, number: int, nbytes: int) -> None:
        """Record that a shard is in the folder."""
        self.held += nbytes - self.have.get(number, 0)
        self.have[number] = nbytes

    def remove(self, number: int) -> None:
        """Remove a shard from the folder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/shards/{number}")
        self.held -= self.have.pop(number)

    async def _fetch(self, number: int) -> None:
        """Fetch a shard and wake up the connections that are waiting for it."""
        try:
            await self.put(number)
        except Exception as error:  # noqa: BLE001 - it is raised in the loop
            self.errors[number] = error
        finally:
            del self.running[number]
        self._changed.set()
        self._changed.clear()
        self._schedule()

    async def put(self, number: int) -> None:
        """Fetch a shard into the folder."""
        path, limit = f"{self.folder}/shards/{number}", self.reader.limit
        part = f"{path}.part"
        try:
            with open(part, "wb") as file:
                for shard, start, stop in self.reader.spans(self.objects, number):
                    async for chunk in self.remote.read(shard, start, stop):
                        file.write(chunk)
                        self.fetched_nbytes += len(chunk)
            await asyncio.to_thread(self._finish, number, part, self.remote.describe(shard))
            nbytes = os.path.getsize(part)
            self.reader.nbytes[number] = nbytes
            if nbytes > limit:
                raise ValueError(
                    f"limit={limit} is too small: shard {number} takes {nbytes} bytes in "
                    f"cache={self.folder!r}; pass a larger limit"
                )
            # Do not wait for room, because each fetch in progress may be waiting for the others.
            self._make_room(number, (), is_needed=True)
            os.replace(part, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    f"{error.strerror}: a shard could not be stored in cache={self.folder!r}, "
                    f"which holds {self.held} of at most {limit} bytes. Free some disk space, or "
                    "pass a smaller limit or a different folder"
                ) from error
            raise
        self.keep(number, nbytes)
        self.fetched += 1

    def _finish(self, number: int, part: str, named: str) -> None:
        try:
            self.reader.finish(number, part)
        except ValueError as error:
            raise ValueError(f"shard {named} {error}") from error
        # Make sure that a power failure does not leave a partial shard.
        with open(part, "rb") as file:
            os.fsync(file.fileno())


def _line(answer: object) -> bytes:
    """Encode an answer, or an exception as a ValueError or an OSError."""
    parts = [answer]
    if isinstance(answer, BaseException):
        kind = "ValueError" if isinstance(answer, ValueError) else "OSError"
        is_clear = type(answer) is ValueError or isinstance(answer, OSError)
        parts = [kind, str(answer) if is_clear else f"{type(answer).__name__}: {answer}"]
    return json.dumps(parts).encode() + b"\n"


def begin_process(start: Start) -> NoReturn:
    """Run the fetcher in a child of this process, and exit.

    If it were a child of the client, the fetcher would block calls that wait for all children.
    """
    first = prepare(start)
    gc.enable()
    if os.fork():
        os._exit(0)
    os.setsid()
    set_name("cseq-fetch")
    try:
        with first.makefile("rb") as file:
            kind, state = pickle.load(file)
        reader = kind.__new__(kind)
        vars(reader).update(state)
        users = users_of(reader.folder)
        # The previous fetcher may still be exiting.
        lock = os.open(f"{reader.folder}/fetcher", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        listening = lifted(socket.socket(socket.AF_UNIX))
        with address(reader.folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listening.bind(path)
            listening.listen(512)
        fetcher = Fetcher(reader)
    except BaseException as error:  # noqa: BLE001
        with contextlib.suppress(OSError):
            first.sendall(_line(error))
        os._exit(1)
    first.sendall(_line("it listens"))
    asyncio.run(_serve(fetcher, first, listening, users))
    os._exit(1)


async def _serve(
    fetcher: Fetcher, first: socket.socket, listening: socket.socket, users: int
) -> NoReturn:
    """Run the fetcher. Exit without cancelling tasks."""
    await fetcher.serve(first, listening)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{fetcher.folder}/socket")
    close(fetcher.folder, [users], os.getpid(), is_kept=fetcher.reader.is_kept)
    os._exit(0)
