"""Whatever happens to workers, trainer or machine: every sample once and in order, or one error."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exports as exporting
import numpy as np
import pytest
from interrupting import interrupted

import cseq
from cseq import testing
from cseq.converter import output
from cseq.launcher import make_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from conftest import RunScript

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")

GUARD = 60.0  # seconds after which something that should end is taken to hang
SAMPLES, BATCH = 400, 8


class Squares:
    """Indices and their squares, large enough to be leased, with the maker's process id."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        wide = np.repeat(indices[:, None] ** 2, 512, axis=1)
        return {"indices": indices, "squares": wide, "draw": cseq.rng().random(4)}


class Fatal(Squares):
    """Does something fatal once, at the first batch that holds `victim`, and marks that it did."""

    def __init__(self, folder: str, deed: Callable[[], None], victims: Iterable[int]) -> None:
        self.folder = Path(folder)
        self.deed = deed
        self.victims = list(victims)

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        for victim in self.victims:
            mark = self.folder / str(victim)
            if victim in indices and not mark.exists():
                mark.touch()
                self.deed()
        return super().__getitem__(indices)


def kill_myself() -> None:
    """Die as by the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    """Die as a C extension does that follows a wild pointer."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    """End the process behind everybody's back."""
    os._exit(3)


def hang() -> None:
    """Never come back."""
    while True:
        threading.Event().wait(1000)


def manager(worker: Any = Squares, **options: Any) -> cseq.MPSequence:
    """Make a manager of processes, started by fork, which is quickest."""
    options = {"start_method": "fork", "out_type": "null", "seed": 11, "num_workers": 3} | options
    return cseq.MPSequence(worker, SAMPLES, batch_size=BATCH, **options)


def digest(batches: Iterable[Any]) -> list[tuple[bytes, ...]]:
    """Reduce batches to what can be compared bit for bit."""
    return [tuple(np.asarray(b[name]).tobytes() for name in sorted(b)) for b in batches]


def reference(epochs: int = 1) -> list[tuple[bytes, ...]]:
    """What test mode gives."""
    with manager().start_test() as m:
        return [d for _ in range(epochs) for d in digest(m)]


def await_end(pids: Iterable[int]) -> None:
    """Wait until processes, which are not our children, have ended."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        ended = poll.poll(GUARD * 1000)
        os.close(fd)
        assert ended, f"process {pid} still runs"


# -- workers die


@pytest.mark.parametrize("deed", [kill_myself, crash, leave])
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_dead_worker_is_replaced_and_the_stream_does_not_show_it(
    tmp_path: Path, deed: Callable[[], None], start_method: str
) -> None:
    """Killed, crashed or gone: its tickets run again, bit for bit as in test mode."""
    from functools import partial

    worker = partial(Fatal, str(tmp_path), deed, [7, 77, 177])
    with manager(worker, start_method=start_method).start() as m:
        assert digest(m) == reference()
        stats = m.stats()
    assert len(list(tmp_path.iterdir())) == 3
    assert stats.restarts >= 1
    assert stats.retries >= 1


def test_all_workers_killed_again_and_again(tmp_path: Path) -> None:
    """Killing every worker, several times an epoch, changes nothing in the stream."""
    del tmp_path
    with manager(max_restarts=1000).start() as m:
        got = []
        for number, batch in enumerate(m):
            got += digest([batch])
            if number % 10 == 5:
                for worker in range(3):
                    testing.kill(m, worker)
        assert got == reference()


POINTS = ["claim", "slice", "index", "encode", "publish", "published", "notify"]


FAULTY = """
import sys, time
import numpy as np
import cseq
from cseq import _memory, deaths, testing
from cseq.converter import output

if sys.argv[2] == "cuda":
    output.resolve = output.rehearse  # converter processes also where there is no CUDA
deaths.TRIES = 1000  # all workers come to the fatal step at about the same time, maybe of one batch

class Worker:
    seconds = 0
    def __getitem__(self, indices):
        time.sleep(self.seconds)
        return indices.copy(), np.full(5000, indices[0])

def stream(m):
    return [(a.tolist(), int(b[0]), bool((b == a[0]).all())) for a, b in m]

assert _memory.DEBUG
m = cseq.MPSequence(Worker, 400, batch_size=4, num_workers=3, num_converters=2, dtype=None,
                    out_type=sys.argv[2], seed=1, max_restarts=1000, buffer=int(sys.argv[1]),
                    start_method="fork" if sys.argv[2] == "cuda" else None)
with m.start_test("numpy"):
    expected = stream(m)
for point in sys.argv[3:]:
    m.set_epoch(0)
    # It notifies only where the trainer sleeps, which it does for a batch that takes so long.
    Worker.seconds = 0.002 if point == "notify" else 0
    # A batch passes some points several times.
    with testing.dying(point, 5 if point == "notify" else 23):
        m.start(compat=False)
    got = stream(m)
    print(point, got == expected, m.stats().restarts > 0)
    m.finish()
"""


@pytest.mark.parametrize(("buffer", "out_type"), [("1", "null"), ("10", "null"), ("10", "cuda")])
def test_death_at_every_labelled_point(
    run_prepared: RunScript, debug_build: Path, buffer: str, out_type: str
) -> None:
    """A worker killed at any step of claim, slice, index, encode, publish loses nothing.

    With 'cuda', converters die there, too.
    """
    if out_type == "cuda":
        pytest.importorskip("torch")
    done = run_prepared(FAULTY, buffer, out_type, *POINTS, PYTHONPATH=str(debug_build))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{point} True True" for point in POINTS]


class Poison(Squares):
    """One sample kills whoever touches it."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        if 123 in indices:
            kill_myself()
        return super().__getitem__(indices)


def test_a_batch_that_kills_again_and_again_is_named() -> None:
    """WorkerDied names epoch, batch, indices and signal; the batches before it were delivered."""
    order = cseq.permutation(SAMPLES, 11, 0).tolist()
    number = order.index(123) // BATCH
    with manager(Poison).start() as m:
        iterator = iter(m)
        for _ in range(number):
            next(iterator)
        with pytest.raises(cseq.WorkerDied, match=r"SIGKILL.* has ended 3 workers") as caught:
            next(iterator)
        assert m.stats().restarts == 2
    died = caught.value
    assert (died.epoch, died.batch, died.exitcode) == (0, number, -signal.SIGKILL)
    assert died.indices == order[number * BATCH : (number + 1) * BATCH]


def test_a_kill_for_want_of_memory_is_told_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL, WorkerDied says how many kills for want of memory the system has counted."""
    counts = itertools.count(5)
    monkeypatch.setattr("cseq.deaths.oom_kills", lambda: next(counts))
    with (
        manager(Poison).start() as m,
        pytest.raises(cseq.WorkerDied, match=r"counted by the cgroup meanwhile: 1\)"),
    ):
        list(m)


def test_the_budget_of_restarts_is_kept(tmp_path: Path) -> None:
    """More deaths in an epoch than `max_restarts` raise WorkerDied."""
    from functools import partial

    worker = partial(Fatal, str(tmp_path), leave, [1, 100, 200, 300])
    with (
        manager(worker, max_restarts=2).start() as m,
        pytest.raises(cseq.WorkerDied, match="max_restarts=2"),
    ):
        list(m)


# -- workers fail


class Raises(Squares):
    """One sample cannot be read."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        if 123 in indices:
            raise KeyError("sample 123 is broken")
        return super().__getitem__(indices)


@pytest.mark.parametrize("kind", ["proc", "thread", "test"])
def test_skip_leaves_out_the_batch_that_raised(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """on_error='skip': all other batches come, the skipped one is logged, counted and listed."""
    m = cseq.MSequence(
        Raises, SAMPLES, batch_size=BATCH, seed=11, out_type="null", on_error="skip",
        thread_type="thread" if kind == "thread" else "proc",
        **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    number = cseq.permutation(SAMPLES, 11, 0).tolist().index(123) // BATCH
    with caplog.at_level(logging.ERROR, "cseq"), m.start_test() if kind == "test" else m.start():
        got = digest(m)
        assert m.stats().skips == 1
        assert [s[:2] for s in m.skipped] == [(0, number)]
        assert "sample 123 is broken" in m.skipped[0][2]
    assert got == [d for k, d in enumerate(reference()) if k != number]
    assert sum("sample 123 is broken" in r.getMessage() for r in caplog.records) == 1


class Nameless(Exception):
    """Its name cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


class RaisesNameless(Squares):
    """Raises that at one sample."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        if 123 in indices:
            raise Nameless
        return super().__getitem__(indices)


@pytest.mark.parametrize("kind", ["thread", "test"])
def test_an_exception_without_a_name_is_skipped_too(kind: str) -> None:
    """What the user's exception class raises in its turn does not come out of the loop."""
    m = cseq.MTSequence(RaisesNameless, SAMPLES, batch_size=BATCH, out_type="null", on_error="skip")
    with m.start_test() if kind == "test" else m.start():
        assert len(list(m)) == SAMPLES // BATCH - 1
        assert "Nameless" in m.skipped[0][2]


def refuse(array: np.ndarray) -> np.ndarray:
    """Convert all arrays but those with sample 123."""
    if 123 in array:
        raise ValueError("123 cannot be converted")
    return array


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["proc", "thread", "test"])
def test_a_batch_that_cannot_be_converted(kind: str, on_error: str) -> None:
    """What a callable `out_type` raises is dealt with as what an indexer raises, in every pool."""
    m = cseq.MSequence(
        np.arange(SAMPLES), SAMPLES, batch_size=BATCH, seed=11, out_type=refuse,
        on_error=on_error, thread_type="thread" if kind == "thread" else "proc",
    )  # fmt: skip
    order = cseq.permutation(SAMPLES, 11, 0).astype(np.int64).reshape(-1, BATCH)
    expected = [batch.tolist() for batch in order if 123 not in batch]
    got, raised = [], []
    with m.start_test() if kind == "test" else m.start():
        iterator = iter(m)
        while True:
            try:
                got.append(next(iterator).tolist())
            except StopIteration:
                break
            except ValueError as error:
                raised.append(str(error))
        skips = [batch for _, batch, _ in m.skipped]
    assert got == expected
    at = order.ravel().tolist().index(123) // BATCH
    assert (len(raised), skips) == ((1, []) if on_error == "raise" else (0, [at]))


class Unbuildable:
    """Its file is not there."""

    def __init__(self) -> None:
        raise FileNotFoundError(2, "no such data set", "/data/set")

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return indices


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_worker_that_cannot_be_built_says_so(kind: str) -> None:
    """The original exception comes out of the loop, with its attributes, and is final."""
    m = cseq.MSequence(Unbuildable, SAMPLES, thread_type=kind, out_type="null")
    with m.start(), pytest.raises(FileNotFoundError, match="no such data set") as caught:
        list(m)
    assert caught.value.filename == "/data/set"


def test_a_worker_that_dies_while_it_starts_is_not_started_for_ever() -> None:
    """Workers that never get ready are given up after three rounds."""
    with (
        manager(leave, max_restarts=10**6).start() as m,
        pytest.raises(cseq.WorkerDied, match="before they were ready"),
    ):
        list(m)


# -- workers hang


class Stuck(Fatal):
    """Hangs in a method whose name can be found again."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        return self.a_method_to_be_found(indices)

    def a_method_to_be_found(self, indices: np.ndarray) -> dict[str, Any]:
        return super().__getitem__(indices)


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_timeout_shows_where_the_worker_is(tmp_path: Path, kind: str) -> None:
    """WorkerTimeout names the batch and shows the worker's Python stack."""
    from functools import partial

    release = threading.Event()
    deed = hang if kind == "proc" else release.wait
    worker = partial(Stuck, str(tmp_path), deed, [int(cseq.permutation(SAMPLES, 11, 0)[0])])
    m = cseq.MSequence(
        worker, SAMPLES, batch_size=BATCH, seed=11, out_type="null", timeout=0.5,
        thread_type=kind, **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    with m.start():
        with pytest.raises(cseq.WorkerTimeout, match="a_method_to_be_found") as caught:
            next(iter(m))
        release.set()
        if kind == "proc":
            for worker in range(4):  # spares the test the patience of finish()
                testing.kill(m, worker)
    assert "epoch 0, batch 0" in str(caught.value)


def test_a_hanging_worker_can_be_replaced(tmp_path: Path) -> None:
    """on_timeout='restart': the batch is made again, and the stream does not show it."""
    from functools import partial

    worker = partial(Stuck, str(tmp_path), hang, [5, 300])
    with manager(worker, timeout=0.5, on_timeout="restart").start() as m:
        assert digest(m) == reference()
        assert m.stats().restarts >= 1


class StuckInTheMaking(Squares):
    """Does something while it is made, unless it finds a mark that this was done."""

    def __init__(self, mark: str, deed: Callable[[], None]) -> None:
        if not os.path.exists(mark):
            Path(mark).touch()
            self.a_method_to_be_found(deed)

    def a_method_to_be_found(self, deed: Callable[[], None]) -> None:
        deed()


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_timeout_shows_where_a_constructor_is(tmp_path: Path, kind: str) -> None:
    """A worker may take ten times the timeout to get ready, and no more."""
    from functools import partial

    release = threading.Event()
    deed = hang if kind == "proc" else release.wait
    m = cseq.MSequence(
        partial(StuckInTheMaking, str(tmp_path / "mark"), deed), SAMPLES, num_workers=1,
        batch_size=BATCH, seed=11, out_type="null", timeout=0.05, thread_type=kind,
        **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    with m.start():
        with pytest.raises(cseq.WorkerTimeout, match="a_method_to_be_found") as caught:
            next(iter(m))
        release.set()
        if kind == "proc":
            testing.kill(m, 0)
    assert "worker 0 has been starting for" in str(caught.value)
    assert "timeout=0.05" in str(caught.value)


def test_a_hanging_constructor_is_called_again(tmp_path: Path) -> None:
    """on_timeout='restart': in another process, and the stream does not show it."""
    from functools import partial

    worker = partial(StuckInTheMaking, str(tmp_path / "mark"), hang)
    with manager(worker, num_workers=1, timeout=0.2, on_timeout="restart").start() as m:
        assert digest(m) == reference()
        assert m.stats().restarts >= 1


# -- converters


@pytest.fixture
def converters_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 'cuda' run its whole path with the CPU in the part of the device."""
    pytest.importorskip("torch")
    monkeypatch.setattr(output, "resolve", output.rehearse)


@pytest.mark.usefixtures("converters_on_the_cpu")
@pytest.mark.parametrize("compat", [True, False])
def test_converters_give_what_test_mode_gives(compat: bool) -> None:
    """The second stage, in threads and in processes, changes neither order nor values."""
    m = manager(out_type="cuda", num_converters=2)
    with m.start_test("cpu"):
        expected = digest(m)
    m.set_epoch(0)
    with m.start(compat=compat):
        assert digest(m) == expected


@pytest.mark.usefixtures("converters_on_the_cpu")
def test_a_dead_converter_is_replaced() -> None:
    """A converter process that is killed is a worker like any other."""
    m = manager(out_type="cuda", num_converters=1)
    with m.start_test("cpu"):
        expected = digest(m)
    m.set_epoch(0)
    with m.start(compat=False):
        got = []
        for number, batch in enumerate(m):
            got += digest([batch])
            if number in (3, 20):
                testing.kill(m, 3)  # behind the three workers
        assert m.stats().restarts >= 1
    assert got == expected


@pytest.fixture
def exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., exporting.Exports]]:
    """Let converter processes export their tensors as to a device."""
    pytest.importorskip("torch")
    (tmp_path / "exported").mkdir()
    made: list[exporting.Exports] = []

    def make(**options: int) -> exporting.Exports:
        made.append(exporting.Exports(tmp_path / "exported", **options))
        made[0].install(monkeypatch)
        return made[0]

    yield make
    made[0].close()


def converted() -> list[tuple[bytes, ...]]:
    """What test mode gives on the CPU."""
    with manager(out_type="cuda", num_converters=1).start_test("cpu") as m:
        return digest(m)


MakeExports = "Callable[..., exporting.Exports]"


def test_batches_of_a_dead_converter_are_converted_again(exports: MakeExports) -> None:
    """What a converter has finished and the loop has not had is gone with it, and made again."""
    theirs = exports(die_at=6)
    m = manager(out_type="cuda", num_converters=1)
    with m.start(compat=False):
        iterator = iter(m)
        await_end([theirs.heard()])  # five batches are ready, and the sixth nearly
        assert digest(iterator) == converted()
        stats = m.stats()
    assert (stats.restarts, stats.retries) == (1, 6)
    left = {name.partition("-")[0] for name in theirs.left()}
    assert len(left) == 1  # the dead one's


@pytest.mark.parametrize("large", [True, False])
def test_converters_get_the_memory_of_given_up_batches_back(
    exports: MakeExports, large: bool
) -> None:
    """Converted batches of an epoch that is broken off are let go of, each tensor once."""
    theirs = exports(tell_at=10)
    worker = Squares if large else Small
    m = manager(worker, out_type="cuda", num_converters=1)
    with m.start(compat=False):
        iterator = iter(m)
        first = digest([next(iterator)])
        theirs.heard()
        for _ in range(2):
            for _, _batch in zip(range(3), m, strict=False):
                pass
        list(m)
        assert theirs.left() == []
        assert m.stats().retries == 0
    m.set_epoch(0)
    with m.start_test("cpu"):
        assert digest([next(iter(m))]) == first


class Small(Squares):
    """Batches that are copied out of their slots."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        return {"indices": indices, "text": [str(index) for index in indices]}


def test_an_interrupted_import_is_made_again(
    exports: MakeExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a batch comes out of a converter process: the next one is that batch."""
    theirs = exports()
    strikes = {3, 30, 31, 55}
    calls = []
    open_once = exporting.open_once

    def strike(*place: Any) -> Any:
        calls.append(place)
        if len(calls) in strikes:
            raise KeyboardInterrupt
        return open_once(*place)

    strike.__qualname__ = "open_once"  # so that it is found where a handle names it
    strike.__module__ = "exports"

    monkeypatch.setattr(exporting, "open_once", strike)
    m = manager(out_type="cuda", num_converters=1)
    got = []
    with m.start(compat=False):
        iterator = iter(m)
        while True:
            try:
                got += digest([next(iterator)])
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
    assert len(calls) > max(strikes)
    assert got == converted()
    assert not [name for name in theirs.left() if name.startswith("twice")]


@pytest.mark.parametrize("how", ["finish", "kill", "drop"])
def test_converters_leave_no_counts_in_dev_shm(exports: MakeExports, how: str) -> None:
    """Torch's files of reference counts go with their converters, however these end."""
    theirs = exports(tell_at=10)
    m = manager(out_type="cuda", num_converters=1)
    m.start(compat=False)
    iterator = iter(m)
    if how == "kill":
        next(iterator)  # only then does the trainer know of the file
    pid = theirs.heard()
    assert counts_of(pid)
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
        await_end([pid])
    if how == "drop":
        del iterator, m
        gc.collect()
    else:
        m.finish()
    await_end([pid])
    assert not counts_of(pid)


def counts_of(pid: int) -> list[str]:
    """Name a converter's files of reference counts."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]


ORPHANS = """
import os, signal, sys
from pathlib import Path
import pytest
from interrupting import interrupted
import cseq
import exports
import test_adversity as t

theirs = exports.Exports(Path(sys.argv[1]), tell_at=10)
theirs.install(pytest.MonkeyPatch())
m = t.manager(out_type="cuda", num_converters=1)
m.start(compat=False)
iterator = iter(m)
next(iterator)
print(theirs.heard(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_converters_without_a_trainer_leave_no_counts(
    run_prepared: RunScript, tmp_path: Path
) -> None:
    """When the trainer is killed, converters remove their files before they go."""
    pytest.importorskip("torch")
    (tmp_path / "exported").mkdir()
    done = run_prepared(ORPHANS, str(tmp_path / "exported"), PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    await_end([int(done.stdout)])
    assert not counts_of(int(done.stdout))


# -- signals


STARTING = """
import gc, os, random, signal, sys, threading, time
import numpy as np
import cseq
from cseq.run import await_closings

def left():
    gc.collect()
    await_closings(60)  # what was dropped ends on other threads
    mine = [pid for pid in filter(str.isdecimal, os.listdir("/proc")) if parent(pid) == os.getpid()]
    # What `threading` has not started stays in its list when it has ended, as a dummy.
    threads = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
    return len(mine), len(threads), len(os.listdir("/proc/self/fd"))

def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0

def interrupt(number, frame):
    if armed:
        raise KeyboardInterrupt

armed, struck = False, 0
signal.signal(signal.SIGINT, interrupt)
ear, mouth = os.pipe()
if os.fork() == 0:  # strikes when it is told to
    os.close(mouth)
    while delay := os.read(ear, 10):
        time.sleep(float(delay))
        os.kill(os.getppid(), signal.SIGINT)
    os._exit(0)
kind, method = sys.argv[1:]
options = {"start_method": method} if kind == "MPSequence" else {}
random.seed(7)
before = left()
for _ in range(25):
    m = getattr(cseq, kind)(np.arange(100), 100, out_type="null", **options)
    os.write(mouth, f"{random.random() * 0.02:10.7f}".encode())
    try:
        armed = True
        m.start()
        armed = False
    except KeyboardInterrupt:
        armed = False
        struck += 1
    if struck % 2:
        m.finish()
    else:
        del m
with cseq.MTSequence(np.arange(100), 100, out_type="null").start() as m:
    assert len(list(m)) == 4
print(before == left(), before, left(), struck)
os.close(mouth)
os.wait()  # it may be about to strike
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts what is left in /proc")
@pytest.mark.parametrize(
    ("kind", "method"), [("MPSequence", "fork"), ("MPSequence", "forkserver"), ("MTSequence", "")]
)
def test_ctrl_c_while_it_starts(run_script: RunScript, kind: str, method: str) -> None:
    """Ctrl-C in `start` leaves no process, thread or descriptor, and the next start works."""
    done = run_script(STARTING, kind, method)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True"), done.stdout


IMPORTS = """
import sys
import numpy as np
import cseq

begun = []

def look(frame, event, argument):  # an import that finds its module there takes no locks
    if frame.f_code.co_name == "_get_module_lock":
        begun.append(frame.f_locals["name"])

class Draws:
    def __getitem__(self, indices):
        return indices + cseq.rng().integers(2)

kind, method, out_type = sys.argv[1:]
options = {"start_method": method} if method not in ("", "test") else {}
m = getattr(cseq, kind)(Draws, 100, out_type=out_type, **options)
sys.settrace(look)
with m.start_test() if method == "test" else m.start():
    for batch in m:
        pass
sys.settrace(None)
print(begun)
"""


@pytest.mark.parametrize("out_type", ["null", "cpu"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [("MPSequence", "fork"), ("MPSequence", "forkserver"), ("MPSequence", "spawn"),
     ("MTSequence", ""), ("MTSequence", "test")],
)  # fmt: skip
def test_the_main_thread_imports_nothing(
    run_script: RunScript, run_prepared: RunScript, kind: str, method: str, out_type: str
) -> None:
    """Ctrl-C in an import can leave locks behind that the next start would wait for."""
    done = (run_prepared if out_type == "cpu" else run_script)(IMPORTS, kind, method, out_type)
    assert (done.stdout, done.stderr) == ("[]\n", "")


START = [("MPSequence", "fork", 3), ("MPSequence", "forkserver", 17), ("MTSequence", None, 1)]


@pytest.mark.skipif(os.name == "nt", reason="worker processes need descriptors over sockets")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of a pair that was just made
@pytest.mark.parametrize("verb", ["start", "finish"])
@pytest.mark.parametrize(("kind", "method", "step"), START)
def test_ctrl_c_anywhere_in_start_and_finish(
    verb: str, kind: str, method: str | None, step: int
) -> None:
    """Wherever in `start` or `finish` a signal handler raises: nothing is left, both work again."""
    options = {"start_method": method} if method else {}
    hits = 0
    for countdown in itertools.count(1, step):
        m = getattr(cseq, kind)(np.arange(8), 8, out_type="null", num_workers=2, **options)
        if verb == "finish":
            m.start()
        with interrupted(countdown, anywhere=True) as struck:
            getattr(m, verb)()
        hits += struck.is_set()
        if struck.is_set() and countdown % 2:
            m.finish()
        elif not struck.is_set():
            break
    assert len(list(m.start())) == 1
    m.finish()
    assert hits * step > 20


class Paced:
    """Is waited for: what threads have made by then is taken in C alone, between no two lines."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        time.sleep(0.002)
        return indices


TAKING = (
    "feed.py", "transport.py", "arena.py", "slot_size.py", "codec.py", "pools/process.py",
    "pools/thread.py",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["proc", "thread"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("ahead", [1, 4])
def test_ctrl_c_anywhere_in_the_taking_of_a_batch(kind: str, ordered: bool, ahead: int) -> None:
    """Wherever in the taking of a batch a signal handler raises: no batch is lost or doubled.

    In an epoch's middle or at its end, where there are no tickets to be posted any more. What was
    taken is always in the caller's hands: there is no place between the two.
    """
    worker = Wide if kind == "proc" else Paced
    m = cseq.MSequence(
        worker, 60, batch_size=10, shuffle=False, out_type="null", thread_type=kind, buffer=3,
        num_workers=1, ordered=ordered, **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    hits = 0
    with m.start():
        for countdown in range(1, 80):
            iterator = iter(m)
            got = [next(iterator)[0] for _ in range(ahead)]
            with interrupted(countdown, *TAKING) as struck:
                got.append(next(iterator)[0])
            hits += struck.is_set()
            assert len(got) == ahead + (not struck.is_set())
            if ordered:
                assert m.state_dict()["consumed"] // 10 == len(got)
            got += [batch[0] for batch in iterator]
            assert sorted(int(np.ravel(first)[0]) for first in got) == list(range(0, 60, 10))
        assert hits >= 5
        if kind == "proc":
            assert testing.slots(m).total == 16


@pytest.mark.parametrize("bad", [True, False])
def test_ctrl_c_anywhere_in_test_mode(bad: bool) -> None:
    """Wherever in the making of a batch a signal handler raises: none is lost, or skipped twice."""
    worker = RaisesOnce(10) if bad else np.arange(60)
    m = cseq.MTSequence(worker, 60, batch_size=10, shuffle=False, out_type="null", on_error="skip")
    with m.start_test():
        for countdown in range(1, 30):
            iterator = iter(m)
            got = [next(iterator)[0]]
            with interrupted(countdown, "pools/inline.py", "failure.py"):
                got.append(next(iterator)[0])
            skipped = len(m.skipped) - bad * (countdown - 1)
            assert m.state_dict()["consumed"] // 10 == len(got) + skipped
            got += [batch[0] for batch in iterator]
            assert got == [0, *range(20 if bad else 10, 60, 10)]
            assert len(m.skipped) == bad * countdown


class RaisesOnce:
    """Has one sample that cannot be read."""

    def __init__(self, sample: int) -> None:
        self.sample = sample

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if self.sample in indices:
            raise KeyError(self.sample)
        return indices


class Wide:
    """Batches that are handed out where they lie."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return np.repeat(indices[:, None], 512, axis=1)


INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
import cseq

class Worker:
    def __getitem__(self, indices):
        if indices[0] > 40:
            threading.Event().wait(3600)
        return indices

m = cseq.MPSequence(Worker, 1000, batch_size=8, out_type="null", shuffle=False, num_workers=2)
m.start()
how = sys.argv[1]
for number, batch in enumerate(m):
    if number == 2:
        if how == "thread":  # the kernel may hand the signal to any thread
            other = threading.Thread(target=threading.Event().wait, args=(3600,), daemon=True)
            other.start()
            threading.Timer(0.3, signal.pthread_kill, (other.ident, signal.SIGINT)).start()
        else:
            threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
"""


@pytest.mark.parametrize("how", ["group", "thread"])
def test_ctrl_c_gives_one_traceback(tmp_path: Path, how: str) -> None:
    """KeyboardInterrupt comes out of the loop while it waits; workers print nothing.

    Behind it, only that those which the indexer keeps busy were killed.
    """
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script), how],
        env=os.environ | {"PYTHONPATH": str(Path(cseq.__file__).parents[1])},
        start_new_session=True, capture_output=True, text=True, timeout=GUARD, check=False,
    )  # fmt: skip
    assert done.stderr.count("Traceback") == 1
    _, found, behind = done.stderr.rpartition("\nKeyboardInterrupt\n")
    assert found, done.stderr
    assert sorted(behind.splitlines()) == [f"worker {k} is busy: killed after 5 s" for k in (0, 1)]


PREEMPTED = """
import os, signal, sys, threading
import cseq

class Worker:
    def __getitem__(self, indices):
        return indices

stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
m = cseq.MPSequence(Worker, 10**6, batch_size=8, out_type="null", num_workers=2)
with m.start():
    iterator = iter(m)
    next(iterator)
    os.killpg(0, signal.SIGTERM)
    while not stop:
        next(iterator)
    for _ in range(100):  # while the trainer writes its checkpoint, workers go on
        next(iterator)
    print("checkpoint", m.stats().restarts)
"""


def test_sigterm_leaves_the_workers_to_the_trainer(tmp_path: Path) -> None:
    """A notice to the process group ends no worker: the trainer finishes what it is at."""
    script = tmp_path / "script.py"
    script.write_text(PREEMPTED)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(Path(cseq.__file__).parents[1])},
        start_new_session=True, capture_output=True, text=True, timeout=GUARD, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "checkpoint 0\n", "")


ORPHANED = """
import ctypes, os, sys, threading
import cseq

class Worker:
    def __getitem__(self, indices):
        if sys.argv[1] == "gil" and indices[0] > 100:
            ctypes.PyDLL(None).sleep(3600)  # holds the GIL
        return indices * 0 + os.getpid()

m = cseq.MPSequence(Worker, 10**6, batch_size=8, out_type="null", num_workers=3, shuffle=False)
m.start()
pids = set()
for batch in m:
    pids.add(int(batch[0]))
    if len(pids) >= 2 or batch[0] > 0 and len(pids) and sys.argv[1] == "gil":
        break
children = os.popen(f"pgrep -s 0").read().split()
print(*{*map(int, children)} - {os.getpid()}, flush=True)
threading.Event().wait(3600)
"""


@pytest.mark.parametrize("state", ["idle", "gil"])
def test_workers_go_with_a_killed_trainer(tmp_path: Path, state: str) -> None:
    """SIGKILL of the trainer leaves no process, no name in /dev/shm and no message."""
    script = tmp_path / "script.py"
    script.write_text(ORPHANED)
    names = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(script), state],
        env=os.environ | {"PYTHONPATH": str(Path(cseq.__file__).parents[1])},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) >= 3
        trainer.kill()
        await_end(pids)
        _, errors = trainer.communicate(timeout=GUARD)
    assert errors == ""
    assert set(os.listdir("/dev/shm")) == names


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_start_go_silently(capfd: pytest.CaptureFixture[str], method: str) -> None:
    """Workers that the trainer has had no time to tell what they are say nothing of its end."""
    launcher = make_launcher(method)
    child = launcher.launch(0)
    child.sock.close()
    assert child.status(GUARD) == 1
    assert launcher.close(time.monotonic() + GUARD)
    assert capfd.readouterr() == ("", "")


# -- the loop is left


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_leaving_a_loop_mixes_nothing_into_the_next_epoch(kind: str) -> None:
    """break, an exception in the body, a second iter(): the next epoch is as in test mode."""
    m = cseq.MSequence(
        Squares, SAMPLES, batch_size=BATCH, seed=11, out_type="null", thread_type=kind
    )
    with m.start():
        for _ in m:
            break
        with pytest.raises(ZeroDivisionError):
            for _ in m:
                1 / 0  # noqa: B018
        stale = iter(m)
        next(stale)
        fresh = iter(m)
        with pytest.raises(InterruptedError):
            next(stale)
        assert digest(fresh) == reference(4)[3 * SAMPLES // BATCH :]


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_finish_inside_the_loop_interrupts_it(kind: str) -> None:
    """finish() in the loop body ends the pool; the iterator says InterruptedError."""
    m = cseq.MSequence(Squares, SAMPLES, batch_size=BATCH, thread_type=kind, out_type="null")
    m.start()
    with pytest.raises(InterruptedError):
        for _ in m:
            m.finish()


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_running_manager_can_be_dropped(kind: str) -> None:
    """Garbage collection ends the pool (the fixture looks for what is left)."""
    m = cseq.MSequence(Squares, SAMPLES, thread_type=kind, out_type="null").start()
    iterator = iter(m)
    next(iterator)
    del m, iterator
    gc.collect()


EXITS = """
import sys
import numpy as np
import cseq

class Worker:
    def __getitem__(self, indices):
        return np.repeat(indices, 10000)

m = cseq.MSequence(Worker, 1000, thread_type=sys.argv[1], out_type="null").start()
kept = [batch for batch, _ in zip(m, range(3))]
print("end")
"""


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_script_may_end_without_finish(run_script: RunScript, kind: str) -> None:
    """Interpreter exit ends everything, and prints nothing."""
    done = run_script(EXITS, kind)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_a_forked_child_takes_no_batches(kind: str) -> None:
    """os.fork by the user: the child cannot iterate what it inherited, and ends nothing of it."""
    m = cseq.MSequence(
        Squares, SAMPLES, batch_size=BATCH, seed=11, out_type="null", thread_type=kind
    )
    with m.start():
        iterator = iter(m)
        got = digest([next(iterator)])
        child = os.fork()
        if not child:
            code = 1
            try:
                try:
                    next(iterator)
                except InterruptedError:
                    try:
                        iter(m)
                    except OSError:
                        code = 0
                del iterator, m
                gc.collect()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert got + digest(iterator) == reference()


# -- batches are kept


@pytest.mark.parametrize("limit", ["0 B", "1 MiB", None])
def test_keeping_every_batch_is_safe(limit: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """list(manager), slices of slices, after finish and without the manager: intact."""
    m = manager(memory_limit=limit, buffer=4)
    with caplog.at_level(logging.WARNING, "cseq"):
        with m.start():
            kept = [{k: v[:][...] for k, v in batch.items()} for _ in range(2) for batch in m]
            copies = m.stats().copies
        del m
        gc.collect()
    assert digest(kept) == reference(2)
    said = sum("memory_limit" in record.getMessage() for record in caplog.records)
    assert (said, copies > 0) == ((0, False) if limit is None else (1, True))


LIFETIMES = """
import pickle, random, sys
import numpy as np
import cseq
from cseq import _memory
try:
    import torch
except ImportError:
    torch = None

class Worker:
    def __getitem__(self, indices):
        return {"a": np.repeat(indices[:, None], 6000, axis=1), "b": np.repeat(indices, 4000)}

def derive(rng, value):
    ways = [
        lambda v: v[1:], lambda v: v[..., ::2], lambda v: v.T, lambda v: v.reshape(-1),
        lambda v: v.view(np.uint64), lambda v: np.asarray(memoryview(v)), np.from_dlpack,
        lambda v: pickle.loads(pickle.dumps(v)), lambda v: v[rng.randrange(len(v)):],
    ]
    if torch is not None:
        ways += [lambda v: torch.from_numpy(v)[1:].numpy(),
                 lambda v: torch.utils.dlpack.from_dlpack(v).numpy()]
    try:
        return rng.choice(ways)(value)
    except (ValueError, TypeError, RuntimeError, BufferError):
        return value  # this way is closed to this layout

rng = random.Random(int(sys.argv[1]))
assert _memory.DEBUG
m = cseq.MPSequence(Worker, 400, batch_size=4, num_workers=2, out_type="null", seed=1, buffer=4)
held = []
with m.start():
    for _ in range(3):
        for batch in m:
            value = batch[rng.choice("ab")]
            for _ in range(rng.randrange(4)):
                if value.size > 8 and len(value) > 1:
                    value = derive(rng, value)
            held.append((value, value.copy()))
            rng.shuffle(held)
            del held[12:]
            for value, copy in held:
                assert np.array_equal(value, copy), "a held view has changed"
for value, copy in held:
    assert np.array_equal(value, copy), "a held view has changed after finish"
print(m.stats().batches)
"""


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_views_of_views_never_change(run_prepared: RunScript, debug_build: Path, seed: str) -> None:
    """Slices, tensors, DLPack exports and pickles hold while slots are used again and poisoned."""
    done = run_prepared(LIFETIMES, seed, PYTHONPATH=str(debug_build))
    assert (done.returncode, done.stdout) == (0, "300\n"), done.stderr


class Grows:
    """Asks for more address space than its process may have."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 26)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return cseq.empty((1 << 27,), np.uint8)


def test_want_of_memory_is_an_exception() -> None:
    """A slot that cannot grow raises MemoryError in the loop; nothing dies of SIGBUS."""
    with manager(Grows).start() as m, pytest.raises(MemoryError):
        list(m)
    with manager(Huge).start() as m, pytest.raises(MemoryError):
        list(m)


class Huge:
    """Asks for more than any machine has."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return cseq.empty((1 << 39,), np.uint8)


FULL_DISK = """
import os, sys, tempfile
import numpy as np

what, size, method = sys.argv[1:4]
if len(sys.argv) == 4:  # a file system of that size, which this process and its children see
    mount = 'mount -t tmpfs -o size="$0" none . 2> mount.log || exit 77; exec "$@"'
    script = [sys.executable, "-X", "faulthandler", os.path.abspath(__file__)]
    os.mkdir("full")
    os.chdir("full")
    os.execvp("unshare", ["unshare", "-Urm", "sh", "-c", mount, size, *script,
                          *sys.argv[1:], "inside"])

os.chdir(os.getcwd())  # into what was mounted here
tempfile.tempdir = os.getcwd()
del os.memfd_create  # what is mapped then lies in files there
import cseq

class Wide:
    def __getitem__(self, indices):
        return np.repeat(indices[:, None], 4096, axis=1)

m = cseq.MPSequence(Wide, 160, batch_size=4, out_type="null", num_workers=2, shuffle=False,
                    start_method=method)
got, errors = [], 0
try:
    with m.start():
        iterator = iter(m)
        while errors < 3:
            try:
                batch = next(iterator)
            except MemoryError:
                errors += 1
                got.append(None)
            except StopIteration:
                break
            else:
                assert (batch == batch[:, :1]).all()
                got.append(batch if what == "keep" else int(batch[0, 0]))
                del batch
except MemoryError as error:
    got.append(None)
numbers = [entry if entry is None else int(np.ravel(entry)[0]) for entry in got]
delivered = [number for number in numbers if number is not None]
assert delivered == sorted(set(delivered)) and not any(n % 4 for n in delivered), numbers
print(None in numbers, len(delivered))
"""


@pytest.mark.parametrize(
    ("what", "size", "errors", "method"),
    [  # workers of a server have what they map from it: it may be missing at the start, or later
        ("drop", "4k", True, "fork"),  # no room for the first slot, at the start
        ("drop", "4k", True, "forkserver"),
        ("drop", "200k", True, "fork"),  # nor for the slots of all tickets, in the trainer
        ("drop", "1m", True, "fork"),  # nor for all batches, in a worker
        ("drop", "1m", True, "forkserver"),
        ("keep", "4m", True, "fork"),  # nor for those that are kept
        ("drop", "8m", False, "forkserver"),
    ],
)
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a small file system")
def test_a_full_disk_is_an_exception(
    run_script: RunScript, what: str, size: str, errors: bool, method: str
) -> None:
    """Where mapped files lie on a full disk: MemoryError in the loop, and nobody gets SIGBUS."""
    done = run_script(FULL_DISK, what, size, method)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("this machine lets nobody mount a file system of his own")
    assert done.returncode == 0, done.stderr
    raised, delivered = done.stdout.split()
    assert raised == str(errors)
    assert (int(delivered) == 40) == (not errors)


def test_nothing_lies_in_dev_shm() -> None:
    """Shared memory has no name and is not bounded by the size of /dev/shm."""
    names = set(os.listdir("/dev/shm"))
    with manager().start() as m:
        next(iter(m))
        maps = Path("/proc/self/maps").read_text()
        assert set(os.listdir("/dev/shm")) == names
    assert "memfd:cseq" in maps
    assert "/dev/shm" not in maps


OWN_SHM = """
import os, sys
if len(sys.argv) == 2:  # this process and its children see another /dev/shm, or another /dev
    small = 'mount -t tmpfs -o size=64k none /dev/shm'
    none = '''mkdir dev && mount -t tmpfs none dev && for name in null zero random urandom; do
               touch dev/$name && mount --bind /dev/$name dev/$name || exit 1; done
               mount --rbind dev /dev'''
    mount = {"small": small, "none": none}[sys.argv[1]]
    script = [sys.executable, os.path.abspath(__file__), sys.argv[1], "inside"]
    os.execvp("unshare", ["unshare", "-Urm", "sh", "-c",
                          f'({mount}) 2> mount.log || exit 77; exec "$@"', "sh", *script])

assert os.path.exists("/dev/shm") == (sys.argv[1] == "small")
import numpy as np
import cseq

class Wide:
    def __getitem__(self, indices):
        return np.repeat(indices[:, None], 4096, axis=1)

with cseq.MPSequence(Wide, 160, batch_size=4, shuffle=False, num_workers=2, out_type="null",
                     memory_limit="1GiB").start() as m:
    kept = list(m)
    print(m.stats().copies)
assert (np.concatenate(kept) == np.arange(160)[:, None]).all()
"""


@pytest.mark.parametrize("there", ["small", "none"])
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a /dev/shm of its own")
def test_dev_shm_may_be_small_or_absent(run_script: RunScript, there: str) -> None:
    """Five megabytes of kept batches, none of them copied, whatever /dev/shm is like."""
    done = run_script(OWN_SHM, there)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("this machine lets nobody mount a file system of his own")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# -- again and again


def census() -> tuple[int, int, int]:
    """Count descriptors, threads and mappings."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


@pytest.mark.parametrize(("kind", "times"), [("proc", 30), ("thread", 300)])
def test_starts_and_finishes_leave_nothing(kind: str, times: int) -> None:
    """Descriptors, threads and mappings are as many after many starts as after one."""
    m = cseq.MSequence(
        Squares, 32, batch_size=BATCH, thread_type=kind, out_type="null", num_workers=2,
        **({"start_method": "fork"} if kind == "proc" else {}),
    )  # fmt: skip
    before = census()
    for _ in range(times):
        with m.start():
            next(iter(m))
    # A thread that closed something for an earlier test may have ended meanwhile.
    assert all(now <= then for now, then in zip(census(), before, strict=True))


IN_USE = """
import ctypes, gc, os, sys
import numpy as np
import cseq

class Counts(ctypes.Structure):  # struct mallinfo2, over all of the allocator's arenas
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split())]

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    raise SystemExit(77)
libc.mallinfo2.restype = Counts

class Worker:
    def __getitem__(self, indices):
        return np.repeat(indices, int(sys.argv[1]))

alone = len(os.listdir("/proc/self/task"))

def in_use():
    gc.collect()
    while len(os.listdir("/proc/self/task")) > alone:  # joined, but not gone yet, with its cache
        os.sched_yield()
    counts = libc.mallinfo2()
    return counts.uordblks + counts.hblkhd

def go(times):
    for _ in range(times):
        with m.start():
            next(iter(m))
    return in_use()

m = cseq.MTSequence(Worker, 32, batch_size=8, out_type="null", num_workers=2)
go(100)
print(*(go(500) for _ in range(3)))
"""


@pytest.mark.parametrize("width", ["1", "4096"])
def test_starts_and_finishes_of_threads_keep_no_memory(run_script: RunScript, width: str) -> None:
    """What is allocated is as much after 1600 starts as after 600, to a few bytes a start.

    What the process has of the system (RSS) says less: glibc keeps what the threads of each start
    have freed, in one arena for each, and it grows and shrinks by tens of megabytes. And what it
    keeps ready for each thread counts as allocated, unless it is told to keep nothing.
    """
    none_ready = "glibc.malloc.tcache_count=0"
    done = run_script(IN_USE, width, PYTHONMALLOC="malloc", GLIBC_TUNABLES=none_ready)
    if done.returncode == 77:
        pytest.skip("this C library does not say what is in use")
    assert done.returncode == 0, done.stderr
    used = list(map(int, done.stdout.split()))
    assert used[2] - used[0] < 16_000, used


def test_epochs_leave_nothing() -> None:
    """Descriptors, threads, mappings and slots are as many after many epochs as after two."""
    with manager().start() as m:
        for _ in range(2):
            list(m)
        before = census()
        slots = testing.slots(m).total
        for _ in range(20):
            for _ in m:
                pass
        assert census()[:2] == before[:2]
        assert testing.slots(m).total == slots


# -- many at once


def test_managers_in_several_threads() -> None:
    """Managers know nothing of each other."""
    results: dict[int, list[Any]] = {}

    def train(number: int) -> None:
        with manager(num_workers=2).start() as m:
            results[number] = digest(m)

    threads = [threading.Thread(target=train, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), reference())


class Nested(Squares):
    """Makes its batch with a manager of its own."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, Any]:
        with cseq.MPSequence(
            Squares, indices, batch_size=3, shuffle=False, out_type="null", num_workers=2
        ).start() as m:
            parts = [part["squares"] for part in m]
        outer = cseq.rng().random(4)
        return {"indices": indices, "squares": np.concatenate(parts), "draw": outer}


def test_a_manager_inside_a_worker() -> None:
    """A worker may use a manager of processes of its own."""
    m = cseq.MPSequence(Nested, SAMPLES, batch_size=100, seed=11, out_type="null", num_workers=2)
    plain = cseq.MPSequence(Squares, SAMPLES, batch_size=100, seed=11, out_type="null")
    with m.start(), plain.start_test():
        assert digest(m) == digest(plain)


def iterate(m: cseq.MSequence) -> Iterator[Any]:
    """Go through an epoch."""
    yield from m
