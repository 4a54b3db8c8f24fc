"""The worker processes of one pool: set up, replaced when they die, ended.

The parts that all pools of processes have in common. The trainer makes a `Staff`; a worker process
begins with `enter`.

::

    trainer                                        worker process
      Staff ── setup ──► socket ────────────────►  enter ──► ring, writer, the user's object
      rings, arena ────► shared memory ─────────►
      keeper ◄── end of file ── socket ──────────  its end
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import pickle
import socket
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from cseq import descriptors, failure, payload
from cseq._core import (
    Descriptor,
    Mapping,
    Ring,
    arm_fault,
    commit,
    exit_on_hangup,
    keep_freed,
    ring_bytes,
)
from cseq.arena import Arena, Segment, Writer, oom_kills
from cseq.errors import WorkerDied, WorkerTimeout
from cseq.keeper import ENTERED, STACK_SIGNAL, Keeper, send_state
from cseq.launcher import describe_exit, make_launcher, reading
from cseq.launcher.base import FOREVER
from cseq.stage import START_SHARE, look_ns, overdue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cseq.arena import Locks
    from cseq.launcher import Child

__all__ = ["Deaths", "Entered", "Held", "Setup", "Staff", "enter"]

log = logging.getLogger("cseq")

GRAIN = 1 << 16  # bytes; a mapping can begin at any multiple of it, on any system
TRIES = 3  # deaths that one ticket may cause, or each worker before it is ready
SHORT, LONG = 2.0, 10.0  # seconds: a start that takes longer is logged as INFO, as WARNING
LENGTH = struct.Struct("<Q")


class Setup(NamedTuple):
    """What a worker process gets from the trainer, beside file descriptors."""

    owner: int  # its number at the ring
    ring: tuple[int, int]  # where the ring lies in the file: offset and bytes
    width: int  # bytes between the slots in their file
    spares: list[tuple[int, int]] | None  # slots that it owns, and committed bytes; see `Writer`
    task: Any  # of its pool: what it has to do


class Held(NamedTuple):
    """A ticket that a worker works on, for messages and errors."""

    epoch: int
    batch: int
    indices: list[int]
    place: str  # names it


# ── in the worker ──────────────────────────────────────────────────────────────────────────


class Entered(NamedTuple):
    """What a worker process begins with."""

    setup: Setup
    ring: Ring
    writer: Writer
    payload_fd: list[int]

    def read(self, local: Any) -> Any:
        """Return the user's object: from its file, or as `os.fork` has copied it."""
        if not self.payload_fd:
            return local
        with reading():
            return payload.read(self.payload_fd[0])


def enter(sock: socket.socket, *, grace_ns: Callable[[Any], int] | None = None) -> Entered:
    """Set a worker process up; it ends with the trainer (when `sock` does), or so much later."""
    arm_fault()
    if os.environ.get("CSEQ_MALLOC", "") != "default":
        keep_freed()
    setup, (ring_fd, arena_fd, stacks_fd, *payload_fd) = _receive(sock)
    watch = (sock.fileno(), 0 if grace_ns is None else grace_ns(setup.task))
    threading.Thread(target=exit_on_hangup, args=watch, daemon=True).start()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=stacks_fd, all_threads=True)
    send_state(sock, ENTERED)
    at, nbytes = setup.ring
    ring = Ring(Mapping(ring_fd, 0, at + nbytes), at=at)
    os.close(ring_fd)
    return Entered(setup, ring, Writer(arena_fd, setup.width, setup.spares), payload_fd)


def _receive(sock: socket.socket) -> tuple[Setup, list[int]]:
    """Read the setup and the descriptors that come with it."""
    head, fds = descriptors.receive(sock, LENGTH.size, 8)
    (length,) = LENGTH.unpack(head or _leave())
    body = bytearray()
    while len(body) < length:
        body += sock.recv(length - len(body)) or _leave()
    setup: Setup = pickle.loads(body)
    return setup, fds


def _leave() -> NoReturn:
    """End this process without a message: the trainer is gone."""
    os._exit(1)


def _send(sock: socket.socket, setup: Setup, fds: list[int]) -> None:
    """Send the setup and the descriptors that come with it."""
    body = pickle.dumps(setup)
    socket.send_fds(sock, [LENGTH.pack(len(body))], fds)
    sock.sendall(body)


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


class Staff:
    """Rings and slots in shared memory, and the worker processes that serve them.

    Parameters
    ----------
    capacity, room, runners : int
        Of a ring: cells, indices in each, owners.
    rings : int
        1: all workers share it. Else each worker has one of its own, a queue (see `Ring`).
    calls : int
        Of a queue.
    deaths : Deaths
    memory_limit : int
        Of the arena.
    locks : Locks, optional
        Of the arena.
    tickets : int, optional
        The most that are posted at a time, if fewer than there are cells.

    Attributes
    ----------
    rings : list of Ring
    arena : Arena
    owners : int
        How many processes; known once started.
    failure : BaseException or None
        What went wrong on the keeper's thread; the consumer is to raise it.
    deaths : Deaths
    takes_objects : bool
        Whether workers are copies of this process, which know all that it knows by name.
    closed : bool
        Nothing is expected of the workers any more.
    """

    owners: int
    takes_objects: bool

    def __init__(
        self,
        capacity: int,
        room: int,
        runners: int,
        *,
        deaths: Deaths,
        memory_limit: int,
        locks: Locks | None = None,
        rings: int = 1,
        calls: int = 0,
        tickets: int | None = None,
    ) -> None:
        if not hasattr(socket, "send_fds"):
            raise OSError(
                "worker processes need file descriptors to be sent over a socket, which this "
                "system's Python cannot do; use threads (MTSequence) where there is a choice"
            )
        self._ring_bytes = size = ring_bytes(capacity, room, runners)
        self._segment = Segment.create(-(-size // GRAIN) * GRAIN, rings)
        self.rings: list[Ring] = []
        mapping = Mapping(self._segment.fd, 0, rings * self._segment.width)
        for k in range(rings):
            offset = k * self._segment.width
            commit(self._segment.fd, offset, size)
            self.rings.append(Ring(mapping, capacity, room, runners, calls, at=offset))
            self.rings[k].spin = look_ns()
        self.arena = Arena(memory_limit, locks, tickets=tickets or rings * capacity)
        for ring in self.rings:
            ring.arena = self.arena.slots
        self.deaths = deaths
        self.failure: BaseException | None = None
        self._keeper: Keeper | None = None
        self._payload: Descriptor | None = None
        self._begun = math.inf  # when workers were wanted
        self._patience = SHORT  # seconds after that, when the log says what they wait for
        self.closed = False

    def start(
        self,
        worker: Any,
        owners: int,
        *,
        readers: int,
        task: Callable[[int], Any],
        describe: Callable[[int, int], Held],
        method: str | None,
        entry: str,
        name: str = "worker",
        threads: int | None = 1,
        preload: Sequence[str] | Literal[False] | None = None,
        needs: Sequence[str] = (),
        timeout: float | None = None,
        spares: int = 0,
    ) -> None:
        """Start the workers, and do not wait for them to get ready.

        Parameters
        ----------
        worker : object
            What the user brought.
        owners : int
            How many processes, numbered from 1.
        readers : int
            How many of them, the first, get `worker`.
        task : callable
            Tells ``Setup.task`` of an owner, on the keeper's thread.
        describe : callable
            Names the ticket of an owner in a cell, on the keeper's thread.
        method, entry, threads
            See `make_launcher`.
        name : str
            What error messages call `worker`.
        preload : sequence of str, False or None
            Modules that a fork server imports once for all workers, beside those that `worker` and
            `entry` refer to; False: not even these.
        needs : sequence of str
            Modules that `entry` will import.
        timeout : float, optional
            Seconds that an item may take; `START_SHARE` times as many, to import those modules.
        spares : int
            How many slots each of the readers owns beside those of its tickets.
        """
        self._readers, self._task, self._describe = readers, task, describe
        self._spares = spares
        self.owners = owners
        launcher = make_launcher(method, entry=entry, threads=threads)
        self.takes_objects = launcher.takes_objects
        # From here on `close` ends whatever has begun: a signal handler may raise (Ctrl-C).
        self._keeper = keeper = Keeper(launcher, self, range(1, owners + 1), worker)
        keeper.prepare()
        modules: list[str] = []
        if not launcher.takes_objects:  # pickled once, where every worker can read it
            packed = payload.dump(worker, name=name)
            self._payload = packed.share()
            if preload is not False:
                modules = [*needs, *packed.modules, *(preload or ())]
            del packed  # its buffers are the worker's memory
        self._begun = time.monotonic()
        keeper.launch(modules, FOREVER if timeout is None else START_SHARE * timeout)
        self.check()
        if launcher.takes_objects:
            # This process must not be forked while this thread is importing something: the child
            # would wait for ever for the import to finish.
            keeper.launched.wait()

    # -- the keeper asks (on its thread)

    def greet(self, owner: int, sock: socket.socket, stacks: int) -> None:
        """Send a new worker its setup."""
        width = self.arena.segment.width
        reads = owner <= self._readers
        spares = self.arena.grant(owner, self._spares) if reads and self._spares else None
        ring, number = self._place(owner)
        where = ring * self._segment.width, self._ring_bytes
        setup = Setup(number, where, width, spares, self._task(owner))
        fds = [self._segment.fd, self.arena.segment.fd, stacks]
        if owner <= self._readers and self._payload is not None:
            fds.append(self._payload.fd)
        _send(sock, setup, fds)

    def _place(self, owner: int) -> tuple[int, int]:
        """Return a worker's ring, and its number there."""
        above, ring = divmod(owner - 1, len(self.rings))
        return ring, above + 1

    def broke(self, error: BaseException) -> None:
        """Store the error for which the keeper has ended."""
        self.fail(error)

    def failed(self, owner: int, packed: bytes) -> None:
        """Keep the first reason why a worker could not get ready."""
        self.fail(failure.unpack(packed, owner - 1))

    def died(self, owner: int, exitcode: int | None, *, was_ready: bool) -> bool:
        """Post again what a dead worker held; return whether to replace it."""
        at, number = self._place(owner)
        ring = self.rings[at]
        held = [self._describe(owner, cell) for cell in ring.held(number)]
        ring.repost(number)
        self.arena.bury(owner, self.rings)
        if self.failure is not None or self.closed:
            return False
        error = self.deaths.count(owner - 1, exitcode, held, was_ready=was_ready)
        if error is not None:
            self.fail(error)
            return False
        log.warning("worker %d %s: replaced", owner - 1, describe_exit(exitcode))
        return True

    def fail(self, error: BaseException) -> None:
        """Store an exception, which `check` raises in the consumer."""
        if self.failure is None:
            self.failure = error
        self.alarm()

    def alarm(self) -> None:
        """Wake the trainer at all rings."""
        for ring in self.rings:
            ring.alarm()

    # -- the consumer asks (on its thread)

    def check(self) -> None:
        """Raise errors of workers and of the keeper."""
        if self.closed:
            raise InterruptedError("the manager was finished while a batch was awaited")
        if self.failure is not None:
            raise self.failure
        waited = time.monotonic() - self._begun
        if waited > self._patience:
            self._tell(waited)

    def _tell(self, waited: float) -> None:
        """Log what a start waits for, if that takes long."""
        assert self._keeper is not None
        doing = self._keeper.waits_for()
        if not doing:
            self._patience = math.inf
            return
        level = logging.INFO if waited < LONG else logging.WARNING
        log.log(level, "no worker is ready %.0f s after the start: %s", waited, doing)
        self._patience = max(LONG, 2 * waited)

    def check_time(
        self, working: Sequence[tuple[int, int, str]], timeout: float, *, restart: bool
    ) -> None:
        """Raise, or kill the worker, if something has taken longer than `timeout` seconds.

        `working` says who works (the owner), since when (ns of `now_ns`), and on what; see
        `overdue`, also for workers that are not ready.
        """
        keeper = self._keeper
        assert keeper is not None
        for owner, took in overdue(working, keeper.starting(), timeout):
            message = f"{took}; worker {owner - 1} is here:\n{keeper.stack(owner)}"
            if not restart:
                raise WorkerTimeout(message)
            log.error("%sworker %d is restarted", message, owner - 1)
            keeper.kill(owner)

    def is_ready(self, owner: int) -> bool:
        """Whether a worker could be working."""
        return self._keeper is not None and self._keeper.is_ready(owner)

    def child(self, owner: int) -> Child | None:
        """Return a worker's process, if there is one."""
        return None if self._keeper is None else self._keeper.child(owner)

    def pid(self, owner: int) -> int | None:
        """Return a worker's process id, if it is known."""
        return None if self._keeper is None else self._keeper.pid(owner)

    def close(self) -> None:
        """End the workers; returns within a bounded time. Twice is fine."""
        self.closed = True
        for ring in self.rings:
            ring.close()
        if self._keeper is not None:
            self._keeper.close()

    def free(self) -> None:
        """Release the shared memory, once no process or thread uses it."""
        self.arena.close()
        self._segment.close()
        if self._payload is not None:
            self._payload.close()


class Deaths:
    """Counts deaths of workers in an epoch, and tells when they are too many.

    Parameters
    ----------
    budget : int
        Replacements that are allowed in an epoch.
    num_workers : int
    unit, advice : str
        What a ticket is to the user, and what to do when it ends its workers.
    """

    def __init__(self, budget: int, num_workers: int, unit: str, advice: str) -> None:
        self._budget = budget
        self._starts = TRIES * num_workers  # all of them may be struck at once while they start
        self._unit, self._advice = unit, advice
        self._deaths = 0
        self._unready = 0
        self._by_place: Counter[str] = Counter()
        self._oom_kills = oom_kills()
        self.restarts = 0
        self.retries = 0  # tickets that ran again

    def begin(self) -> None:
        """Reset the counts for a new epoch."""
        self._deaths = 0
        self._by_place.clear()

    def count(
        self, worker: int, exitcode: int | None, held: Sequence[Held], *, was_ready: bool
    ) -> WorkerDied | None:
        """Count a death; return the error if it is one too many."""
        self._deaths += 1
        self._unready = 0 if was_ready else self._unready + 1
        epoch, batch, indices, place = held[0] if held else (None, None, [], "")
        if held:
            self._by_place[place] += 1
        reason = self._too_many(place)
        if reason is None:
            self.restarts += 1
            self.retries += len(held)
            return None
        return WorkerDied(
            f"worker {worker} {describe_exit(exitcode)}{self._oom(exitcode)}"
            f"{f' while making {place}' if held else ''}; {reason}",
            epoch=epoch,
            batch=batch,
            indices=indices,
            exitcode=exitcode,
            worker=worker,
        )

    def _too_many(self, place: str) -> str | None:
        """Say why this death is one too many, if it is."""
        if place and self._by_place[place] >= TRIES:
            return f"this {self._unit} has ended {TRIES} workers: {self._advice}"
        if self._unready >= self._starts:
            return (
                f"{self._unready} workers in a row died before they were ready: look at how they "
                "start"
            )
        if self._deaths > self._budget:
            return (
                f"{self._deaths} workers died in this epoch, max_restarts={self._budget} allows "
                "no more replacements"
            )
        return None

    def _oom(self, exitcode: int | None) -> str:
        """Say whether the system counted a kill for lack of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        if exitcode != -9 or before is None or self._oom_kills is None:
            return ""
        killed = self._oom_kills - before
        return f" (out-of-memory kills counted by the cgroup meanwhile: {killed})"
