"""The worker processes of one pool: started, replaced when they die, ended.

The supervisor's thread, in the trainer, sleeps on the workers' sockets. End of file means that a
worker process is ending; its tickets are posted again once its exit status is known.

::

    trainer                                      worker process
      Supervisor ── handshake ──► socket ─────►  enter (`worker`)
                 ◄── states, end of file ── socket
      Arena ◄───────── rings, slots ──────────►
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import selectors
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from cseq._core import now_ns
from cseq.encoding import codec, failure
from cseq.encoding._codec import Encoder
from cseq.encoding._room import Room
from cseq.encoding.pickling import Pickled, dump
from cseq.errors import WorkerTimeout
from cseq.memory.arena import GRAIN, Arena
from cseq.memory.descriptors import sparse_file
from cseq.processes.launcher import describe_exit
from cseq.processes.launcher.base import FOREVER, KILLED
from cseq.processes.launcher.forks import pair
from cseq.processes.logs import Records, levels
from cseq.processes.stacks import location_in
from cseq.processes.worker import (
    ENTERED,
    FAILED,
    LOADED,
    LOGGED,
    NO_STACK,
    READY,
    Setup,
    WorkerProcess,
)
from cseq.stage import HURRY, RAISED, START_SHARE, overdue
from cseq.threads import Latch, Threads, await_told, tell, thread_limits

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from cseq.errors import WorkerDied
    from cseq.measure.lanes import Lanes
    from cseq.processes.deaths import Deaths, Held
    from cseq.processes.launcher import Child, Launcher

__all__ = ["Supervisor"]

# One that has no descriptor, and so none that a closed standard stream's number could go to.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
SLOW = 10.0  # seconds without a first item, after which the log says what is waited for
slowest = 0.0  # the longest that it has said in this process; it says only what is twice as long
GRACE = 5.0  # seconds that workers get to end by themselves
ENDING = 0.1  # for a process to end once its socket has
LAST_GRACE = 2.0  # and to be gone after they were killed
STARTING = (ENTERED, LOADED)  # states of a worker whose start has a time limit


class Supervisor:
    """The worker processes that use rings and slots in shared memory.

    The constructor starts nothing.

    Parameters
    ----------
    shared : Arena
        Stays the caller's, to be closed after `close`.
    readers : int
        The first so many processes get the user's object: the most workers there may be.
    task : callable
        ``task(runner_number)`` is its ``Setup.task``; called on the supervisor's thread.
    describe : callable
        ``describe(number, cell)``: the ticket that a worker holds there; called on the supervisor's
        thread, too.

    lanes : Lanes
        Where starts and deaths are noted.

    Attributes
    ----------
    failure : Failure
        Of a worker or of the supervisor's thread; `check` raises it.
    takes_objects : bool
        Whether workers are forked from this process: objects are inherited, not pickled.
    closed : bool
        `close` was called: workers that end are not replaced.
    processes : dict
        The latest process of each worker, by its number from 0; it stays when that has ended.
    """

    def __init__(
        self,
        launcher: Launcher,
        shared: Arena,
        *,
        readers: int,
        task: Callable[[int], Any],
        describe: Callable[[int, int], Held],
        deaths: Deaths,
        lanes: Lanes,
    ) -> None:
        self.shared = shared
        self.deaths = deaths
        self._lanes = lanes
        self.failure = failure.Failure()
        self.closed = False
        self.processes: dict[int, Child] = {}
        self.takes_objects = launcher.takes_objects
        self._launcher = launcher
        self._readers, self._task, self._describe = readers, task, describe
        self._active = readers  # how many of these there are to be
        self._caller = 0  # the thread that wants the workers
        self._missing: list[
            int
        ] = []  # numbers of runners to be forked while the loop's thread waits
        self._waiting: deque[Latch] = deque()  # of threads that wait for that, in `check`
        self._beside = ""  # the threads beside which workers were forked
        self._object: Any = None  # and the file where they read it
        self._record: codec.Record | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._failed: dict[str, WorkerDied] = {}  # batches, by their places
        self._noted = False
        self._records = Records()
        self._preloads = True
        self._prepared = Latch()  # `Launcher.prepare` has returned
        self._wanted = Latch()  # workers may be started
        self._launched = Latch()  # all workers have been started once
        self._ended = Latch()  # all workers are gone and no more will come
        self._gone = False  # what `Launcher.close` has returned
        self._selector: selectors.BaseSelector  # of the supervisor's thread alone
        self._waker: socket.socket | None = None  # wakes that thread
        self._thread = Threads()
        self._thread.add("cseq-supervisor", self._run)

    def prepare(
        self,
        worker: Any,
        *,
        name: str = "worker",
        preload: bool = True,
        needs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        """Get all that the workers need ready; `launch` starts them.

        The supervisor's thread starts the launcher and the workers: no signal handler runs there,
        so none can leak a process. If this raises, `close` ends what has begun.

        Parameters
        ----------
        worker : object
            The user's object, for the readers; or a `Pickled` one.
        name : str
            The name of `worker` in error messages.
        preload : bool
            A fork server imports once, for all workers, the modules that `worker` and the workers'
            code refer to.
        needs : sequence of str
            Modules that the workers' code will import.
        timeout : float, optional
            Seconds that a batch or item may take; the imports may take `START_SHARE` times as long.
        """
        launcher = self._launcher
        self._preloads = preload
        self._thread.start()
        self._prepared.wait()  # work on this thread would compete with that one for the GIL
        modules: list[str] = []
        if launcher.takes_objects:
            launcher.local = worker
        else:  # pickled once, into a file that every worker reads
            with contextlib.ExitStack() as stack:
                reducers = {}
                if "multiprocessing" in sys.modules:  # else there are no objects of it
                    from cseq.processes.spawning import spawning

                    reducers = stack.enter_context(spawning())
                pickled = dump(worker, name=name, reducers=reducers)
            self._write(pickled, name)
            modules = [*needs, *pickled.modules]
            del pickled  # its buffers are the worker's memory
        launcher.preload(modules, FOREVER if timeout is None else START_SHARE * timeout)

    def launch(self) -> None:
        """Start the workers, unless they are started, and do not wait for them to get ready.

        A signal handler may raise here, or call it: the next call goes on.

        Raises
        ------
        OSError
            A worker cannot be forked. Those that are started in other ways are not waited for.
        """
        if not self._wanted.wait(0):
            self._launcher.context = contextvars.copy_context()
            self._caller = threading.get_ident()
            self._wanted.set()
        if self.takes_objects:
            # This process must not be forked while this thread is importing something, or holds a
            # lock: the child would wait for ever. `_reap` says the same of replacements.
            self._launched.wait()
        if self._ended.wait(0):  # what a worker raises is for the loop, however early it is
            self.check()

    def begin_epoch(self) -> None:
        """Begin an epoch: with a new budget for deaths, and without memory that is not needed."""
        self.deaths.begin_epoch()
        self.shared.tidy()

    def _write(self, pickled: Pickled, name: str) -> None:
        """Write the user's object to a file of its own, as requests are written to slots."""
        nbytes = len(pickled.data) + sum(view.nbytes for view in pickled.buffers)
        # No wider than it can need: its buffers aligned, their table, its structure.
        width = nbytes + 128 * len(pickled.buffers) + GRAIN
        self._object = sparse_file(width)
        room = Room(self._object.fd, width)
        try:
            room.select(0, 0)
            self._record = codec.encode_pickled(pickled, Encoder(room))
        except MemoryError as error:
            raise MemoryError(f"no room for the {name}'s {nbytes} bytes: {error}") from error
        finally:
            room.close()

    # -- on the supervisor's thread

    def _run(self) -> None:
        try:
            waker, woken = pair()
            with waker, woken, Selector() as self._selector:
                self._selector.register(woken, selectors.EVENT_READ, None)
                self._waker = waker  # `close` sets `closed` before it looks for it
                self._serve()
        except BlockingIOError as error:  # of a fork
            self._fail(BlockingIOError(error.errno, f"{error.strerror}: {thread_limits()}"))
        except BaseException as error:  # noqa: BLE001 - it is raised in the loop
            self._fail(error)
        try:
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        finally:
            self._ended.set()  # first: `_await_forks` adds itself before it looks at it
            self._prepared.set()
            self._launched.set()
            self._let_go()

    def _serve(self) -> None:
        """Start the workers, and watch them until all are gone and no more are wanted."""
        self._launcher.prepare(preload=self._preloads)
        self._prepared.set()
        self._wanted.wait()
        if self.takes_objects:
            self._beside = _other_threads(self._caller)
        for runner_number in self.wanted():
            self._launch(runner_number)
        self._launched.set()
        while not (self.closed and not self._workers):
            self._take()
            self._staff()
            if self.shared.ended:
                self._take(0)  # LOADED of those that did not see the ring closed after it
                self._kill_starting()

    def _take(self, timeout: float | None = None) -> None:
        """Handle what has come from workers, and calls that wake this thread."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                key.fileobj.recv(64)  # type: ignore[union-attr]
            else:
                self._receive(key.data)

    def _staff(self) -> None:
        """Start the workers that are wanted and not there: they have died, or come anew.

        The loop's thread may be importing, or hold a lock, for which a copy of this process would
        wait for ever. So it is forked only while that thread waits for it, in `_await_forks`.
        """
        missing = [
            runner_number for runner_number in self.wanted() if runner_number not in self._workers
        ]
        if self.closed or self.failure:
            missing = []
        if self.takes_objects:
            before, self._missing = self._missing, missing
            if missing != before:
                self.shared.notify_all()
        for runner_number in missing:
            if not self.takes_objects or self._waiting:
                self._launch(runner_number)
                self._missing = self._missing[1:]
        self._let_go()

    def _let_go(self) -> None:
        """Let the threads that wait in `_await_forks` go on."""
        with contextlib.suppress(IndexError):  # a handler's exception has ended the wait
            while self._waiting:
                self._waiting.popleft().set()

    def _kill_starting(self) -> None:
        """Kill the workers that do not have the user's object yet; importing may take them long."""
        for worker in self._workers.values():
            if worker.state in (b"", ENTERED):
                worker.child.kill()

    def _launch(self, runner_number: int) -> None:
        """Start a worker and send it its setup."""
        try:
            child = self._launcher.launch(runner_number - 1)
        except OSError:
            if self.closed:  # which has cancelled it
                return
            raise
        worker = WorkerProcess(runner_number, child)
        self._workers[runner_number] = worker
        self.processes[runner_number - 1] = child
        self._selector.register(child.sock, selectors.EVENT_READ, worker)
        reads = runner_number <= self._readers
        place = self.shared.place(runner_number, has_slots=reads)
        record = self._record if reads else None
        known = None if self.takes_objects else levels()
        setup = Setup(runner_number - 1, *place, self._task(runner_number), record, known)
        fds = [self._object.fd] if reads and self._object is not None else []
        worker.handshake(setup, *self.shared.fds, *fds)

    def _receive(self, worker: WorkerProcess) -> None:
        """Handle what a worker has sent, or its end of file."""
        before = worker.state
        messages = worker.receive()
        if messages is None:
            self._reap(worker)
            return
        if not before and worker.state:
            self._lanes.note("start", worker.runner_number, worker.child.pid)
        for state, body in messages:
            if state == FAILED:
                self._fail(failure.unpack(body, worker.runner_number - 1))
            elif state == LOGGED:
                self._records.queue_record(body)
            elif not self._noted:  # all workers would send the same
                self._noted = True
                tell(logging.WARNING, "%s", body.decode())

    def _reap(self, worker: WorkerProcess) -> None:
        """Ensure that a worker has ended, and post its tickets again; `_staff` replaces it."""
        child, runner_number = worker.child, worker.runner_number
        exitcode = child.status(ENDING)
        if exitcode is None:  # a process may close its socket and live on; its server may be late
            if not child.gone:
                child.kill()
            exitcode = child.status(GRACE)
        if not child.gone:
            raise RuntimeError(
                f"worker {runner_number - 1} (pid {child.pid}) was killed and has not ended"
            )
        self._selector.unregister(child.sock)
        del self._workers[runner_number]
        worker.close()
        if self.closed:
            if exitcode not in (0, None, KILLED):
                tell(logging.WARNING, "worker %d %s", runner_number - 1, describe_exit(exitcode))
            return
        begun = self.shared.held(runner_number)
        held = [self._describe(runner_number - 1, cell) for cell, _ in begun]
        lost = ((since, f"{h.epoch}/{h.batch}") for (_, since), h in zip(begun, held, strict=True))
        text = describe_exit(exitcode)
        was_ready = worker.state == READY
        left = was_ready and exitcode == 0 and not held  # by itself, as `resize` wants it
        what = "end" if left else "death"
        self._lanes.note(what, runner_number, child.pid, text=text, held=tuple(lost))
        counts = not left and (held or runner_number in self.wanted()) and not self.failure
        error, has_failed = None, False
        if counts:  # first: what is posted again may end the epoch before this thread goes on
            error = self.deaths.count_death(
                runner_number - 1,
                exitcode,
                held,
                pid=child.pid,
                was_ready=was_ready,
                is_overdue=worker.is_overdue,
            )
        if error is not None and self.deaths.has_failed:
            has_failed = True
            self._failed[held[0].location] = error  # before it is published
        self.shared.reclaim(runner_number, RAISED if has_failed else 0)
        if error is not None and not has_failed:
            self._fail(error)
        elif counts:
            done = "replaced" if runner_number in self.wanted() else "its tickets go to others"
            tell(
                logging.WARNING,
                "worker %d %s: %s%s",
                runner_number - 1,
                text,
                done,
                self.deaths.lost,
            )

    def _fail(self, error: BaseException) -> None:
        """Store the first exception, which `check` raises in the consumer."""
        self.failure.note(error)
        self.shared.notify_all()

    # -- on any thread

    def died_of(self, number: int, cell: int) -> WorkerDied | None:
        """Return the error of a batch that has failed, since it has ended its workers."""
        if not self._failed:
            return None
        return self._failed.pop(self._describe(number, cell).location, None)

    def check(self) -> None:
        """Raise errors of workers and of the supervisor's thread.

        The loop's thread calls this before it waits; forked workers are replaced meanwhile.
        """
        if self.closed:
            raise InterruptedError("the workers were ended while a batch, or item, was awaited")
        if self._missing:
            self._await_forks()
        self.failure.check()

    def check_start(self, began: int) -> None:
        """Log what a first item waits for, in one line, if that takes long.

        `began`: when the wait for it did (ns of `now_ns`).
        """
        global slowest
        seconds = (now_ns() - began) / 1e9
        if seconds < max(SLOW, 2 * slowest):
            return
        slowest = seconds
        at_work = [w for w in self._snapshot() if w.state]
        doing, beside = "their processes start", ""
        if self._launcher.importing:
            doing = f"module {self._launcher.importing} is imported for all of them"
        elif at_work:
            worker = next((w for w in at_work if self.shared.held(w.runner_number)), at_work[0])
            doing = f"worker {worker.runner_number - 1} {location_in(worker.stack())}"
        if self._beside:
            beside = (
                f". They were forked beside other threads ({self._beside}): a lock that one of "
                "them held then stays locked in a worker, which waits for it for ever. If one "
                "does, start workers before such threads, or by start_method='forkserver' (of a "
                "DataLoader: multiprocessing_context='forkserver')"
            )
        text = "nothing has come from the workers after %.0f s: %s; cseq waits%s"
        tell(logging.WARNING, text, seconds, doing, beside)

    def _await_forks(self) -> None:
        """Let the supervisor's thread fork what replaces the dead, and wait for that."""
        forked = Latch()
        try:
            self._waiting.append(forked)
            if not self._ended.wait(0):
                self._wake()
                forked.wait()
        finally:  # a signal handler may have raised: this thread leaves the engine
            with contextlib.suppress(ValueError):
                self._waiting.remove(forked)

    def _wake(self) -> None:
        """Wake the supervisor's thread, if it has got so far."""
        if self._waker is not None:
            with contextlib.suppress(OSError):  # it is closed: the thread has ended
                self._waker.send(b"!")

    def _snapshot(self) -> list[WorkerProcess]:
        """Return the present workers.

        Without a lock, which an exception of a signal handler might leave acquired: only the
        supervisor's thread changes the dict, and this is one call of C.
        """
        return list(self._workers.values())

    def check_time(
        self, working: Sequence[tuple[int, int, str]], timeout: float, *, restart: bool
    ) -> None:
        """Raise WorkerTimeout, or (`restart`) kill the worker, if one takes longer than `timeout`.

        `working` lists runner numbers, since when, and on what; see `overdue`.
        Workers that are not ready are checked as well.
        """
        starting = [(w.runner_number, w.entered) for w in self._snapshot() if w.state in STARTING]
        for runner_number, took in overdue(working, starting, timeout):
            worker = self._workers.get(runner_number)
            stack = NO_STACK if worker is None else worker.stack()
            message = f"{took}; worker {runner_number - 1} is here:\n{stack}"
            if not restart:
                raise WorkerTimeout(message)
            tell(logging.ERROR, "%sworker %d is restarted", message, runner_number - 1)
            if worker is not None:  # this very process: it may have been replaced meanwhile
                worker.is_overdue = True
                worker.child.kill()

    def await_launch(self) -> None:
        """Wait until all workers have been started once; not if `launch` was not called."""
        if self._thread.begun and self._wanted.wait(0):
            self._launched.wait()

    def wanted(self) -> list[int]:
        """Return the numbers of the runners that should have a process."""
        owners = range(1, self.shared.owners + 1)
        return [
            runner_number
            for runner_number in owners
            if not self._active < runner_number <= self._readers
        ]

    def resize(self, count: int) -> None:
        """Have so many workers, at least 1: new ones are started.

        Those that are too many have to leave by themselves: a shared ring says so (`Ring.fit`).
        """
        if count != self._active:
            self._active = count
            self._wake()

    def is_ready(self, runner_number: int) -> bool:
        """Whether a worker has reported that it is ready, and is not known to have ended."""
        worker = self._workers.get(runner_number)
        return worker is not None and worker.state == READY

    def pids(self) -> list[int | None]:
        """Return the process ids of all workers; None for one that is started or replaced."""
        found = [self._workers.get(runner_number) for runner_number in self.wanted()]
        return [None if worker is None else worker.child.pid for worker in found]

    # -- the end

    def close(self, *, hurried: bool = False) -> None:
        """Close the rings and end all workers; kill those that do not end within `GRACE` seconds.

        Those that do not have the user's object yet, and may be importing its modules, are killed
        at once; if it is `hurried`, those that are not ready, or in a batch, after `HURRY` seconds.
        Calling it twice is fine, also if a signal handler has raised in the first call.

        Raises
        ------
        RuntimeError
            A process has not ended although it was killed.
        """
        self.closed = True
        self.shared.end()
        self._wanted.set()
        self._launcher.cancel()
        self._wake()
        if self._thread.begun:
            if hurried:
                self.hurry(time.monotonic() + HURRY)
            if not self._ended.wait(GRACE):
                for worker in self._snapshot():
                    number, text = (
                        worker.runner_number - 1,
                        "worker %d is ending: killed after %g s",
                    )
                    if self._is_busy(worker):
                        text = "worker %d is busy: killed after %g s"
                    tell(logging.WARNING, text, number, GRACE)
                    worker.child.kill()
                self._ended.wait(LAST_GRACE)
        if not self._gone:  # the thread was not started, or hangs; or processes lived on
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        await_told(time.monotonic() + LAST_GRACE)
        if not self._gone:
            raise RuntimeError("worker processes were killed and have not ended")
        self._thread.join(time.monotonic() + LAST_GRACE)
        self._launcher.local = None  # the supervisor is in a reference cycle, which would keep it
        for worker in self._snapshot():  # if the thread has failed, none was reaped
            worker.close()
        if self._object is not None:
            self._object.close()

    def hurry(self, deadline: float) -> None:
        """Kill the workers that are busy at `deadline`, if `close` was called; on any thread."""
        if not (self.closed and self._thread.begun):
            return
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            for worker in filter(self._is_busy, self._snapshot()):  # others close their indexers
                worker.child.kill()

    def _is_busy(self, worker: WorkerProcess) -> bool:
        """Whether a worker is not ready, or in a batch."""
        return worker.state != READY or bool(self.shared.held(worker.runner_number))


def _other_threads(caller: int) -> str:
    """Name the threads that a fork does not copy, but `caller`, this one and cseq's."""
    known = threading.enumerate()
    pythons = {str(each.native_id) for each in known} | {str(os.getpid())}
    both = (caller, threading.get_ident())
    names = Counter(each.name for each in known if each.ident not in both)
    with contextlib.suppress(OSError):  # there is no /proc
        for tid in set(os.listdir("/proc/self/task")) - pythons:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as file:
                names[file.read().strip()] += 1
    told = [(name, count) for name, count in names.items() if not name.startswith("cseq-")]
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in told)
