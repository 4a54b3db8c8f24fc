"""Starts, replaces and stops the worker processes of a pool.

The supervisor is a thread in the trainer. When a worker's socket reaches EOF, the supervisor makes
sure that the worker has exited, then reposts its tickets.

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
from typing import TYPE_CHECKING

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
from cseq.threads import Latch, Threads, await_logged, log_later, thread_limits

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from cseq._memory import Descriptor
    from cseq.errors import WorkerDied
    from cseq.measure.lanes import Lanes
    from cseq.processes.deaths import Deaths, Held
    from cseq.processes.launcher import Child, Launcher

__all__ = ["Supervisor"]

# Other selectors open a descriptor, which could take the number of a closed standard stream.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
# A warning is logged if the first item takes longer than SLOW seconds and twice `slowest`.
SLOW, slowest = 10.0, 0.0
# Seconds that a worker may take to exit: on its own, after being killed, and after closing its
# socket.
GRACE, LAST_GRACE, ENDING = 5.0, 2.0, 0.1
STARTING = (ENTERED, LOADED)


class Supervisor:
    """Supervises the worker processes of a pool.

    The constructor does not start anything.

    Parameters
    ----------
    shared : Arena
        The shared memory. The caller must close it after calling `close`.
    readers : int
        The maximum number of workers. Processes with higher numbers are converters.
    task, describe : callable
        ``task(runner_number)`` returns `Setup.task`, and ``describe(worker, cell)`` describes a
        ticket. Both must be thread-safe.

    Attributes
    ----------
    failure : Failure
        The failure that `check` raises, if any.
    takes_objects : bool
        Whether workers inherit objects without pickling.
    closed : bool
        Whether `close` was called.
    processes : dict
        The latest process of each worker, by number.
    """

    def __init__(
        self,
        launcher: Launcher,
        shared: Arena,
        *,
        readers: int,
        task: Callable[[int], object],
        describe: Callable[[int, int], Held],
        deaths: Deaths,
        lanes: Lanes,
    ) -> None:
        self.shared, self.deaths, self._lanes = shared, deaths, lanes
        self.failure = failure.Failure()
        self.closed = False
        self.processes: dict[int, Child] = {}
        self.takes_objects = launcher.takes_objects
        self._launcher = launcher
        self._readers, self._task, self._describe = readers, task, describe
        # The number of workers to run, and the id of the thread that called `launch`.
        self._active, self._caller = readers, 0
        # The runners to fork while the loop's thread is waiting, and the latches it is waiting for.
        self._missing: list[int] = []
        self._waiting: deque[Latch] = deque()
        self._beside = ""
        self._object: Descriptor | None = None
        self._record: codec.Record | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._failed: dict[str, WorkerDied] = {}
        self._noted, self._preloads, self._gone = False, True, False
        self._records = Records()
        # Set once `Launcher.prepare` returns, once workers may start, once all have started, and
        # once the supervisor thread ends, respectively.
        self._prepared, self._wanted = Latch(), Latch()
        self._launched, self._ended = Latch(), Latch()
        # Only the supervisor thread uses the selector. Other threads use the waker to wake it up.
        self._selector: selectors.BaseSelector
        self._waker: socket.socket | None = None
        self._thread = Threads()
        self._thread.add("cseq-supervisor", self._run)

    def prepare(
        self,
        worker: object,
        *,
        name: str = "worker",
        preload: bool = True,
        needs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        """Start the supervisor thread, and prepare the user's object for the workers.

        The supervisor thread starts all processes, because signal handlers do not run there. If
        this method raises, `close` cleans up.

        Parameters
        ----------
        worker : object
            The user's object, or a `Pickled`.
        name : str
            The name of `worker` in error messages.
        preload : bool
            Whether a fork server imports the modules, once for all workers.
        needs : sequence of str
            Modules that workers import in addition to the pickled object's modules.
        timeout : float, optional
            The time limit for a batch or item in seconds. Imports may take `START_SHARE` times as
            long.
        """
        launcher = self._launcher
        self._preloads = preload
        self._thread.start()
        # Wait, because this thread would otherwise compete with the supervisor for the GIL.
        self._prepared.wait()
        modules: list[str] = []
        if launcher.takes_objects:
            launcher.local = worker
        else:
            with contextlib.ExitStack() as stack:
                reducers = {}
                if "multiprocessing" in sys.modules:
                    from cseq.processes.spawning import spawning

                    reducers = stack.enter_context(spawning())
                pickled = dump(worker, name=name, reducers=reducers)
            self._write(pickled, name)
            modules = [*needs, *pickled.modules]
            # Drop the pickle, because its buffers keep the user's object in memory.
            del pickled
        launcher.preload(modules, FOREVER if timeout is None else START_SHARE * timeout)

    def launch(self) -> None:
        """Start the workers, without waiting until they are ready.

        If a signal handler raises an exception, the next call picks up where this one stopped.

        Raises
        ------
        OSError
            If a worker cannot be forked.
        """
        if not self._wanted.wait(0):
            self._launcher.context = contextvars.copy_context()
            self._caller = threading.get_ident()
            self._wanted.set()
        if self.takes_objects:
            # Wait, because a child forked while this thread holds a lock (such as an import lock)
            # would deadlock. See `_staff`.
            self._launched.wait()
        # Exceptions from workers are raised in the loop, so check only if the supervisor has ended.
        if self._ended.wait(0):
            self.check()

    def begin_epoch(self) -> None:
        """Reset the count of worker deaths, and free unused memory."""
        self.deaths.begin_epoch()
        self.shared.tidy()

    def _write(self, pickled: Pickled, name: str) -> None:
        """Write the user's object to a file, in the same format as requests in slots."""
        nbytes = len(pickled.data) + sum(view.nbytes for view in pickled.buffers)
        # An upper bound on the total size of the buffers, their table and the structure.
        width = nbytes + 128 * len(pickled.buffers) + GRAIN
        self._object = sparse_file(width)
        room = Room(self._object.fd, width)
        try:
            room.select(0, 0)
            self._record = codec.encode_pickled(pickled, Encoder(room))
        except MemoryError as error:
            text = f"not enough memory for a copy of the {name} ({nbytes} bytes): {error}"
            raise MemoryError(text) from error
        finally:
            room.close()

    # -- in the supervisor thread

    def _run(self) -> None:
        try:
            waker, woken = pair()
            with waker, woken, Selector() as self._selector:
                self._selector.register(woken, selectors.EVENT_READ, None)
                self._waker = waker
                self._serve()
        except BlockingIOError as error:
            self._fail(BlockingIOError(error.errno, f"{error.strerror}: {thread_limits()}"))
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
        try:
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        finally:
            # Set this first, because `_await_forks` adds a latch before it checks `_ended`.
            self._ended.set()
            self._prepared.set()
            self._launched.set()
            self._let_go()

    def _serve(self) -> None:
        """Start and watch the workers until `close` has been called and all are gone."""
        self._launcher.prepare(preload=self._preloads)
        self._prepared.set()
        self._wanted.wait()
        if self.takes_objects:
            self._beside = _other_threads(self._caller)
        for runner_number in self.wanted():
            self._launch(runner_number)
        self._launched.set()
        while not (self.closed and not self._workers):
            self._handle_events()
            self._staff()
            if self.shared.ended:
                # A worker that sent LOADED before the ring was closed must not be killed.
                self._handle_events(0)
                self._kill_starting()

    def _handle_events(self, timeout: float | None = None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                key.fileobj.recv(64)  # type: ignore[union-attr]
            else:
                self._receive(key.data)

    def _staff(self) -> None:
        """Start all missing workers.

        This process is forked only while the loop's thread waits in `_await_forks`. At other times,
        that thread may hold a lock that a child would wait for.
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
        with contextlib.suppress(IndexError):
            while self._waiting:
                self._waiting.popleft().set()

    def _kill_starting(self) -> None:
        """Kill workers that have not yet loaded the user's object, because imports may be slow."""
        for worker in self._workers.values():
            if worker.state in (b"", ENTERED):
                worker.child.kill()

    def _launch(self, runner_number: int) -> None:
        try:
            child = self._launcher.launch(runner_number - 1)
        except OSError:
            if self.closed:
                return
            raise
        worker = WorkerProcess(runner_number, child)
        self._workers[runner_number] = worker
        self.processes[runner_number - 1] = child
        self._selector.register(child.sock, selectors.EVENT_READ, worker)
        reads = runner_number <= self._readers
        layout = self.shared.setup_of(runner_number, has_slots=reads)
        record = self._record if reads else None
        log_levels = None if self.takes_objects else levels()
        setup = Setup(runner_number - 1, *layout, self._task(runner_number), record, log_levels)
        fds = [self._object.fd] if reads and self._object is not None else []
        worker.handshake(setup, *self.shared.fds, *fds)

    def _receive(self, worker: WorkerProcess) -> None:
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
            elif not self._noted:
                self._noted = True
                log_later(logging.WARNING, "%s", body.decode())

    def _reap(self, worker: WorkerProcess) -> None:
        """Make sure that a worker has exited, and repost its tickets."""
        child, runner_number = worker.child, worker.runner_number
        exitcode = child.status(ENDING)
        # The process may have closed its socket and kept running, or the exit report may be late.
        if exitcode is None:
            if not child.gone:
                child.kill()
            exitcode = child.status(GRACE)
        if not child.gone:
            raise RuntimeError(
                f"worker {runner_number - 1} (pid {child.pid}) was killed but is still running"
            )
        self._selector.unregister(child.sock)
        del self._workers[runner_number]
        worker.close()
        if self.closed:
            if exitcode not in (0, None, KILLED):
                log_later(
                    logging.WARNING, "worker %d %s", runner_number - 1, describe_exit(exitcode)
                )
            return
        begun = self.shared.held(runner_number)
        held = [self._describe(runner_number - 1, cell) for cell, _ in begun]
        lost = ((since, f"{h.epoch}/{h.batch}") for (_, since), h in zip(begun, held, strict=True))
        text = describe_exit(exitcode)
        was_ready = worker.state == READY
        # Whether the worker exited because of `resize`.
        left = was_ready and exitcode == 0 and not held
        event = "end" if left else "death"
        self._lanes.note(event, runner_number, child.pid, text=text, held=tuple(lost))
        counts = not left and (held or runner_number in self.wanted()) and not self.failure
        error, has_failed = None, False
        # Count the death first, because the epoch may end as soon as the tickets are reposted.
        if counts:
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
            self._failed[held[0].location] = error
        self.shared.reclaim(runner_number, RAISED if has_failed else 0)
        if error is not None and not has_failed:
            self._fail(error)
        elif counts:
            done = "; other workers take over its work"
            if runner_number in self.wanted():
                done = " and is being replaced"
            log_later(
                logging.WARNING, "worker %d %s%s%s", runner_number - 1, text, done, self.deaths.lost
            )

    def _fail(self, error: BaseException) -> None:
        self.failure.note(error)
        self.shared.notify_all()

    # -- in any thread

    def died_of(self, ring_number: int, cell: int) -> WorkerDied | None:
        """Return the error if the batch in a cell has killed its workers, or None."""
        if not self._failed:
            return None
        return self._failed.pop(self._describe(ring_number, cell).location, None)

    def check(self) -> None:
        """Raise an error from a worker or the supervisor thread.

        The loop's thread calls this before it waits. Replacements for dead workers are then forked.
        """
        if self.closed:
            raise InterruptedError(
                "the workers were stopped while the loop was waiting for a batch or an item"
            )
        if self._missing:
            self._await_forks()
        self.failure.check()

    def check_start(self, began: int) -> None:
        """Log the likely cause of a long wait for the first item. `began` is a `now_ns` time."""
        global slowest
        seconds = (now_ns() - began) / 1e9
        if seconds < max(SLOW, 2 * slowest):
            return
        slowest = seconds
        at_work = [w for w in self._snapshot() if w.state]
        doing, beside = "their processes are starting", ""
        if self._launcher.importing:
            doing = f"module {self._launcher.importing} is being imported for all of them"
        elif at_work:
            worker = next((w for w in at_work if self.shared.held(w.runner_number)), at_work[0])
            doing = f"worker {worker.runner_number - 1} {location_in(worker.stack())}"
        if self._beside:
            beside = (
                f". The workers were forked while other threads were running ({self._beside}). If "
                "one of these threads held a lock, a worker may wait for that lock forever. Start "
                "workers before such threads, or use start_method='forkserver' (for a DataLoader, "
                "multiprocessing_context='forkserver')"
            )
        text = "nothing has arrived from the workers after %.0f s: %s; cseq is still waiting%s"
        log_later(logging.WARNING, text, seconds, doing, beside)

    def _await_forks(self) -> None:
        forked = Latch()
        try:
            self._waiting.append(forked)
            if not self._ended.wait(0):
                self._wake()
                forked.wait()
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(forked)

    def _wake(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def _snapshot(self) -> list[WorkerProcess]:
        """Return the current workers.

        No lock is needed, because only the supervisor thread changes the dict, and `list` copies it
        in a single C call.
        """
        return list(self._workers.values())

    def check_time(
        self, working: Sequence[tuple[int, int, str]], timeout: float, *, restart: bool
    ) -> None:
        """If a worker exceeds `timeout`, raise WorkerTimeout, or kill it if `restart` is set.

        `working` contains the number, start time and task of each busy runner; see `overdue`.
        """
        starting = [(w.runner_number, w.entered) for w in self._snapshot() if w.state in STARTING]
        for runner_number, took in overdue(working, starting, timeout):
            worker = self._workers.get(runner_number)
            stack = NO_STACK if worker is None else worker.stack()
            message = f"{took}; stack of worker {runner_number - 1}:\n{stack}"
            if not restart:
                raise WorkerTimeout(message)
            log_later(logging.ERROR, "%sworker %d is being restarted", message, runner_number - 1)
            if worker is not None:
                worker.is_overdue = True
                worker.child.kill()

    def await_launch(self) -> None:
        """If `launch` was called, wait until all workers have started."""
        if self._thread.begun and self._wanted.wait(0):
            self._launched.wait()

    def wanted(self) -> list[int]:
        """Return the runner numbers of the workers to run and of all converters."""
        runner_numbers = range(1, self.shared.owners + 1)
        return [k for k in runner_numbers if not self._active < k <= self._readers]

    def resize(self, count: int) -> None:
        """Change the number of workers to `count` (at least 1).

        Surplus workers exit after a call to `Ring.fit`.
        """
        if count != self._active:
            self._active = count
            self._wake()

    def is_ready(self, runner_number: int) -> bool:
        """Return True if a worker has reported READY and has not exited."""
        worker = self._workers.get(runner_number)
        return worker is not None and worker.state == READY

    def pids(self) -> list[int | None]:
        """Return the process id of each worker and converter, or None if it is missing."""
        workers = [self._workers.get(runner_number) for runner_number in self.wanted()]
        return [None if worker is None else worker.child.pid for worker in workers]

    def close(self, *, hurried: bool = False) -> None:
        """Close the rings and stop all workers. Kill those that do not exit within `GRACE` seconds.

        Workers that are still loading the user's object are killed immediately. If `hurried` is
        set, busy workers are killed after `HURRY` seconds. If a signal handler raises, call this
        again.

        Raises
        ------
        RuntimeError
            If a killed process does not exit.
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
                    k = worker.runner_number - 1
                    text = "worker %d was still exiting after %g s and was killed"
                    if self._is_busy(worker):
                        text = "worker %d was still busy after %g s and was killed"
                    log_later(logging.WARNING, text, k, GRACE)
                    worker.child.kill()
                self._ended.wait(LAST_GRACE)
        # The thread never started or is stuck, or some processes are still alive.
        if not self._gone:
            self._gone = self._launcher.close(time.monotonic() + LAST_GRACE)
        await_logged(time.monotonic() + LAST_GRACE)
        if not self._gone:
            raise RuntimeError("worker processes were killed but are still running")
        self._thread.join(time.monotonic() + LAST_GRACE)
        # Break a reference cycle that would keep the user's object alive.
        self._launcher.local = None
        for worker in self._snapshot():
            worker.close()
        if self._object is not None:
            self._object.close()

    def hurry(self, deadline: float) -> None:
        """If `close` was called, kill workers that are busy at `deadline`. Thread-safe."""
        if not (self.closed and self._thread.begun):
            return
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            for worker in filter(self._is_busy, self._snapshot()):
                worker.child.kill()

    def _is_busy(self, worker: WorkerProcess) -> bool:
        return worker.state != READY or bool(self.shared.held(worker.runner_number))


def _other_threads(caller: int) -> str:
    """Describe all threads except `caller` and cseq's own. A fork would not copy them."""
    threads = threading.enumerate()
    pythons = {str(thread.native_id) for thread in threads} | {str(os.getpid())}
    both = (caller, threading.get_ident())
    names = Counter(thread.name for thread in threads if thread.ident not in both)
    with contextlib.suppress(OSError):
        for tid in set(os.listdir("/proc/self/task")) - pythons:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as file:
                names[file.read().strip()] += 1
    user_threads = [(name, count) for name, count in names.items() if not name.startswith("cseq-")]
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in user_threads)
