"""The fetcher: the process that fetches a folder's shards, one per machine.

::

    <cache>/index      names, sizes and tags of all objects; row and byte counts of each shard
    <cache>/socket     the socket for workers
    <cache>/fetcher    locked by this process until it exits
    <cache>/shards/5   a shard, named 5.part while it is written

A shard is renamed once it is whole, so a kill leaves it whole or absent. Only this process writes
and removes shards. A worker that has opened a shard can read it even after its removal.

The process exits when its last connection closes. One thread does all work except `Reader.finish`.
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

# The maximum length of a message in bytes.
LONGEST = 1 << 26


class Fetcher:
    """The state of the fetcher.

    Attributes
    ----------
    objects : list of Object
    have : dict of int to int
        The shards in the folder and their sizes in bytes, most recently used last.
    running : dict of int to Task
        The shards that are being fetched.
    errors : dict of int to Exception
        The errors of failed fetches. A shard is fetched again when a worker needs it.
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
        # The shards that connections wait for, and the shards that they have yet to open.
        self._needed: dict[asyncio.StreamWriter, list[int]] = {}
        self._given: dict[asyncio.StreamWriter, list[int]] = {}
        self._users = 0
        self._changed, self._over = asyncio.Event(), asyncio.Event()

    # -- the connections

    async def serve(self, first: socket.socket, listening: socket.socket) -> None:
        """Serve until the last connection is closed."""
        self._opening = asyncio.create_task(self._open())
        streams = await asyncio.open_unix_connection(sock=first, limit=LONGEST)
        attending = asyncio.create_task(self._attend(*streams))
        server = await asyncio.start_unix_server(self._attend, sock=listening, limit=LONGEST)
        await self._over.wait()
        await attending
        server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of a connection until it is closed."""
        self._users += 1
        try:
            while True:
                line = await reader.readline()
                if not line:
                    return
                verb, *given = json.loads(line)
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
                else:
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
        """Wait for at least one of the missing shards; return those now present, or an error."""
        for number in missing:
            self.errors.pop(number, None)
            # The worker did not find the file, so another program has removed it.
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
        self._given[writer] = [number for number in missing if number in self.have]
        return self._given[writer]

    def _read_at(self, *place: int) -> None:
        """Record the position at which a trainer reads the order."""
        if self.plan is None or not self.plan.has(*place):
            self.plan = Plan(self.reader.sizes, *place)

    def _use(self, shards: list[int]) -> None:
        """Record the shards that a batch uses."""
        for number in shards:
            if number in self.have:
                self.have[number] = self.have.pop(number)
        if self.plan is not None:
            self.plan.advance(shards)

    # -- the index

    async def _open(self) -> None:
        """Read or create the index, and find the shards in the folder."""
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
        """Compare the objects with the index if a single request can list them."""
        if self.reader.place.names:
            # Named objects are compared when they are fetched.
            return
        there = {one.name: one for one in await self.remote.list()}
        for before in self.objects:
            now = there.pop(before.name, None)
            if now != before:
                raise changed(self.remote.describe(before), before, now)
        for new in there.values():
            raise ValueError(
                f"shard {self.remote.describe(new)} is not in the index of cache={self.folder!r}: "
                "pass another folder, or remove this one"
            )

    # -- shards

    def _schedule(self) -> None:
        """Start to fetch the shards that workers wait for, then the next shards of the order."""
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
        """Remove shards until there is room for another; return False if it must wait.

        The shard whose next use is farthest away is removed first. Without a plan, this is the
        most recently used shard, because every epoch uses every shard. A shard is not removed
        before the workers that wait for it have opened it.
        """
        nbytes = self.reader.nbytes
        # The fetch then fails with an error that explains the limit.
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
        """Record a shard that is in the folder."""
        self.held += nbytes - self.have.get(number, 0)
        self.have[number] = nbytes

    def remove(self, number: int) -> None:
        """Remove a shard."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/shards/{number}")
        self.held -= self.have.pop(number)

    async def _fetch(self, number: int) -> None:
        """Fetch a shard, and wake the connections that wait for it."""
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
            self._make_room(number, (), is_needed=True)
            os.replace(part, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    f"{error.strerror}: no room for a shard in cache={self.folder!r}, which has "
                    f"{self.held} of at most {limit} bytes; make room, or pass a smaller limit or "
                    "another folder"
                ) from error
            raise
        self.keep(number, nbytes)
        self.fetched += 1

    def _finish(self, number: int, part: str, named: str) -> None:
        try:
            self.reader.finish(number, part)
        except ValueError as error:
            raise ValueError(f"shard {named} {error}") from error
        # Ensure that a power failure cannot leave a partial shard.
        with open(part, "rb") as file:
            os.fsync(file.fileno())


def _line(answer: object) -> bytes:
    """Encode an answer as a line, and an error as a ValueError or an OSError."""
    parts = [answer]
    if isinstance(answer, BaseException):
        kind = "ValueError" if isinstance(answer, ValueError) else "OSError"
        is_clear = type(answer) is ValueError or isinstance(answer, OSError)
        parts = [kind, str(answer) if is_clear else f"{type(answer).__name__}: {answer}"]
    return json.dumps(parts).encode() + b"\n"


def begin_process(start: Start) -> NoReturn:
    """Run the fetcher in this new interpreter, as the child of a process that then exits.

    The process that started it may therefore exit, be killed, or wait for its own children.
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
    """Serve, then exit the process directly, so that no task has to be cancelled."""
    await fetcher.serve(first, listening)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{fetcher.folder}/socket")
    close(fetcher.folder, [users], os.getpid(), is_kept=fetcher.reader.is_kept)
    os._exit(0)
