"""The process that fetches the shards of a folder: one on a machine.

::

    <cache>/about      what the shards are of
    <cache>/index      names, sizes and tags of all objects; rows and bytes of each shard
    <cache>/plan       where the order is, for who replaces this process
    <cache>/socket     where workers connect
    <cache>/fetcher    locked by this process, until it ends
    <cache>/shards/5   a shard; 5.part while it is written

A shard is renamed when it is whole, so a kill leaves it whole or absent. This process alone writes
and removes shards. Who reads one has opened it, and keeps what it has opened.

The process ends with its last connection. What it knows of the workers is what they say in each
message: the shards of their batch, and which of these they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import pickle
import shutil
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cseq.files import whole
from cseq.memory import descriptors
from cseq.processes.launcher.child import prepare, set_name
from cseq.store import folder as folders
from cseq.store.place import Object, changed
from cseq.store.plan import Plan
from cseq.store.remote import Remote

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cseq.processes.launcher.base import Start
    from cseq.store.format import Spec

__all__ = ["Fetcher", "begin_process"]

log = logging.getLogger("cseq")

# Seconds without a connection at first; or for an earlier process to end.
PATIENCE = 20.0
# The most bytes of a message.
LINE = 1 << 26
# Seconds before a shard that nobody waits for is tried again.
AGAIN = 10.0


class Client:
    """A connection of a worker or trainer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        # Of its latest batch.
        self.shards: set[int] = set()
        # Of them, what it waits for.
        self.missing: set[int] = set()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the connection is closed."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")


class Fetcher:
    """What the process has, and what it fetches.

    Attributes
    ----------
    objects : list of Object
    have : dict of int to int
        The shards that are there, and their bytes.
    running : dict of int to Task
        The shards that are being fetched.
    """

    def __init__(self, spec: Spec, *, begins: bool) -> None:
        self.spec, self.begins = spec, begins
        self.folder, self.format, self.limit = spec.folder, spec.format, spec.limit
        self.shards = f"{spec.folder}/shards"
        self.objects: list[Object] = []
        self.have: dict[int, int] = {}
        # Bytes of these.
        self.held = 0
        self.running: dict[int, asyncio.Task[None]] = {}
        self.clients: set[Client] = set()
        self.plan: Plan | None = None
        self.fetched = self.fetched_nbytes = 0
        # When a shard that nobody waits for failed.
        self._refused: dict[int, float] = {}
        # The latest use of each shard, by a count of messages.
        self._used: dict[int, int] = {}
        self._uses = 0
        self._over = asyncio.Event()

    # -- the connections

    def listen(self) -> socket.socket | None:
        """Return the socket that listens, or None if another process serves the folder."""
        self._lock = os.open(f"{self.folder}/fetcher", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            other = folders.dial(self.folder)
            if other is not None:
                other.close()
                return None
            if time.monotonic() > end:
                raise OSError(
                    f"cache={self.folder!r} is in use by a process that does not answer; is it "
                    "another machine's? Give a folder on a local disk"
                )
            # The one before is ending.
            time.sleep(0.01)
        listening = socket.socket(socket.AF_UNIX)
        with folders.address(self.folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listening.bind(path)
            listening.listen(512)
        return listening

    async def serve(self, listening: socket.socket) -> None:
        """Serve until the last connection is closed."""
        opening = asyncio.create_task(self._open())

        async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            client = Client(writer)
            self.clients.add(client)
            try:
                while line := await reader.readline():
                    await asyncio.wait([opening])
                    if error := opening.exception():
                        client.send(_error(error))
                        await writer.drain()
                        break
                    self._told(client, json.loads(line))
            except ConnectionError:
                pass
            finally:
                self.clients.discard(client)
                writer.close()
                if not self.clients:
                    self._over.set()

        server = await asyncio.start_unix_server(attend, sock=listening, limit=LINE)
        loop = asyncio.get_running_loop()
        loop.call_later(PATIENCE, self._end_unused)
        await self._over.wait()
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/socket")
        tasks = [opening, *self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_unused(self) -> None:
        if not self.clients:
            self._over.set()

    def _told(self, client: Client, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
        if "hello" in message:
            client.send({"hello": 1})
        if "stats" in message:
            client.send(self._stats())
        if "plan" in message:
            window, seed, epoch, unit = message["plan"]
            if self.plan is None or not self.plan.has(window, seed, epoch, unit):
                self.plan = Plan(self.format.rows, window, seed, epoch, unit)
                self._note_plan()
        if "use" in message:
            client.shards = {*message["use"]}
            self._uses += 1
            self._used.update(dict.fromkeys(client.shards, self._uses))
            if self.plan is not None and self.plan.advance(client.shards):
                self._note_plan()
        for number in message.get("need", ()):
            if number in self.have:
                client.send({"have": number})
            else:
                client.missing.add(number)
        self.schedule()

    def _stats(self) -> dict[str, int]:
        return {
            "kept": len(self.have),
            "nbytes": self.held,
            "limit": self.limit,
            "fetched": self.fetched,
            "fetched_nbytes": self.fetched_nbytes,
            "retried": self.remote.retried,
        }

    def _note_plan(self) -> None:
        assert self.plan is not None
        with whole(f"{self.folder}/plan") as file:
            json.dump(self.plan.place, file)

    # -- the index

    async def _open(self) -> None:
        """Read the index, or make it; find the shards that are there."""
        spec = self.spec
        self.remote = Remote(spec.place, spec.store, spec.timeout)
        path = f"{self.folder}/index"
        os.makedirs(self.shards, exist_ok=True)
        try:
            with open(path, encoding="utf-8") as file:
                index = json.load(file)
            self.objects = [Object(*each) for each in index["objects"]]
        except FileNotFoundError:
            shutil.rmtree(self.shards)
            os.makedirs(self.shards)
            self.objects = await self.remote.list()
            facts = await self.format.survey(self)
            with whole(path) as file:
                json.dump({"objects": self.objects, **facts}, file)
        else:
            await self._check()
        self.format.load(self.folder)
        self._look()
        if not self.begins:
            with contextlib.suppress(FileNotFoundError), open(f"{self.folder}/plan") as file:
                self.plan = Plan.at(self.format.rows, json.load(file))

    async def _check(self) -> None:
        """Compare the objects with the index, where one request names many."""
        if self.spec.place.names:
            # Each is compared when it is fetched.
            return
        there = {each.name: each for each in await self.remote.list()}
        for each in self.objects:
            now = there.pop(each.name, None)
            if now != each:
                raise ValueError(changed(self.remote.describe(each), each, now))
        for new in there.values():
            raise ValueError(
                f"shard {self.remote.describe(new)} is not in the index of cache={self.folder!r}: "
                "give another folder, or remove this one"
            )

    def _look(self) -> None:
        """Find the shards that are there; remove what is not whole."""
        for name in os.listdir(self.shards):
            path = f"{self.shards}/{name}"
            nbytes = os.path.getsize(path)
            expected = int(self.format.nbytes[int(name)]) if name.isdigit() else -1
            if expected == nbytes or (expected >= 0 and not self.format.is_exact):
                self._keep(int(name), nbytes)
            else:
                os.unlink(path)
        while self.held > self.limit:
            self._remove(next(iter(self.have)))

    # -- shards

    def schedule(self) -> None:
        """Begin to fetch what workers wait for, then what comes next."""
        needed = {each: None for client in self.clients for each in client.missing}
        for number in needed:
            if number in self.running:
                continue
            if self._make_room(number, {*needed}, is_needed=True):
                self._begin(number)
            elif not self.running:
                self._answer(number, _error(ValueError(self._too_small(number))))
        uses = None if self.plan is None else self.plan.uses()
        coming = () if self.plan is None else self.plan.coming(self.spec.ahead)
        now = time.monotonic()
        for number in coming:
            if len(self.running) >= self.spec.ahead:
                return
            if number in self.have or number in self.running or number in needed:
                continue
            if now - self._refused.get(number, -AGAIN) < AGAIN:
                continue
            if not self._make_room(number, {*needed}, is_needed=False, uses=uses):
                return
            self._begin(number)

    def _begin(self, number: int) -> None:
        self.running[number] = asyncio.create_task(self._fetch(number))

    def _make_room(
        self, number: int, needed: set[int], *, is_needed: bool, uses: Any = None
    ) -> bool:
        """Remove shards until there is room for one; False: that must wait.

        A shard is removed for one that is used earlier. Shards of batches in hand go last.
        """
        wanted = int(self.format.nbytes[number])
        while self._taken() + wanted > self.limit:
            held = {each for client in self.clients for each in client.shards}
            there = np.array([each for each in self.have if each not in needed], np.int64)
            if not is_needed:
                there = there[[each not in held for each in there.tolist()]]
            if not len(there):
                return False
            if self.plan is None:
                later = -np.array([self._used.get(each, 0) for each in there.tolist()])
            else:
                later = (self.plan.uses() if uses is None else uses)[there]
            # Of batches in hand only if there are no others.
            if is_needed:
                later = later - np.isin(there, [*held]) * (int(np.ptp(later)) + 1)
            chosen = int(later.argmax())
            if uses is not None and later[chosen] <= uses[number]:
                return False
            self._remove(int(there[chosen]))
        return True

    def _taken(self) -> int:
        """Return the bytes of shards that are there or on their way."""
        return self.held + int(self.format.nbytes[[*self.running]].sum())

    def _keep(self, number: int, nbytes: int) -> None:
        self.held += nbytes - self.have.get(number, 0)
        self.have[number] = nbytes

    def _remove(self, number: int) -> None:
        os.unlink(f"{self.shards}/{number}")
        self.held -= self.have.pop(number)

    async def _fetch(self, number: int) -> None:
        """Fetch a shard, and tell who waits for it."""
        answer: dict[str, Any] = {"have": number}
        try:
            await self.put(number)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._shrink(number, error):
                answer = {}
            else:
                answer = _error(error)
        except Exception as error:  # noqa: BLE001 - it is raised in the loop
            answer = _error(error)
        finally:
            self.running.pop(number, None)
        if "error" in answer:
            self._refused[number] = time.monotonic()
        if answer:
            self._answer(number, answer)
        self.schedule()

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        """Tell who waits for a shard."""
        for client in self.clients:
            if number in client.missing:
                client.missing.discard(number)
                client.send(answer)

    def _too_small(self, number: int) -> str:
        return (
            f"limit={self.limit} is too small: shard {number} takes "
            f"{int(self.format.nbytes[number])} bytes in cache={self.folder!r}; give a larger limit"
        )

    def _shrink(self, number: int, error: OSError) -> bool:
        """Go on with what room there is; False: there is none to be made."""
        limit = self.held + sum(
            int(self.format.nbytes[each]) for each in self.running if each != number
        )
        if not limit:
            error.strerror = (
                f"{error.strerror}: no room for a shard of {int(self.format.nbytes[number])} bytes "
                f"in cache={self.folder!r}; make room, or give another folder"
            )
            return False
        self.limit = min(self.limit, limit)
        log.warning("cache=%r: %s; it goes on with %d bytes", self.folder, error.strerror, limit)
        return True

    async def put(self, number: int) -> int:
        """Fetch a shard into the folder; return its bytes."""
        part, nbytes = f"{self.shards}/{number}.part", 0
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            async for chunk in self.format.chunks(self, number):
                folders.write(fd, chunk, nbytes)
                nbytes += memoryview(chunk).nbytes
            # A power cut leaves no half of a shard.
            await asyncio.to_thread(os.fsync, fd)
        except BaseException:
            os.unlink(part)
            raise
        finally:
            os.close(fd)
        os.replace(part, f"{self.shards}/{number}")
        self._keep(number, nbytes)
        self.fetched += 1
        return nbytes

    async def read(
        self, shard: Object, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[Any]:
        """Read bytes of an object, as `Remote.read`, and count them."""
        async for chunk in self.remote.read(shard, start, stop):
            self.fetched_nbytes += memoryview(chunk).nbytes
            yield chunk

    def describe(self, shard: Object) -> str:
        """Name an object for a message, with its store."""
        return self.remote.describe(shard)


def _error(error: BaseException) -> dict[str, Any]:
    """Return an exception as a message."""
    kind = "ValueError" if isinstance(error, ValueError) else "OSError"
    own = type(error) in (ValueError, OSError) or isinstance(error, OSError)
    return {"kind": kind, "error": str(error) if own else f"{type(error).__name__}: {error}"}


def begin_process(start: Start) -> NoReturn:
    """Run this new interpreter, as a child of a process that ends at once.

    So it is nobody's child: whoever started it may end, be killed, or wait for its own children.
    """
    sock = prepare(start)
    gc.enable()
    if os.fork():
        os._exit(0)
    os.setsid()
    set_name("cseq-fetch")
    code = 1
    try:
        head = descriptors.receive_exactly(sock, folders.LENGTH.size + 1) or os._exit(1)
        (nbytes,) = folders.LENGTH.unpack(head[:-1])
        spec: Spec = pickle.loads(descriptors.receive_exactly(sock, nbytes) or os._exit(1))
        users = folders.users_of(spec.folder)
        fetcher = Fetcher(spec, begins=bool(head[-1]))
        listening = fetcher.listen()
        sock.close()
        if listening is not None:
            asyncio.run(fetcher.serve(listening))
        folders.close(spec.folder, [users], os.getpid(), is_kept=spec.is_kept)
        code = 0
    except BaseException as error:  # noqa: BLE001 - nobody is above
        with contextlib.suppress(OSError):
            sock.sendall(f"{type(error).__name__}: {error}".encode())
        traceback.print_exc()
    os._exit(code)
