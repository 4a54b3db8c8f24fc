"""Workers that die, raise and hang: every sample comes once and in order, or one error does."""

import itertools
import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path

import adverse
import numpy as np
import pytest
from adverse import BATCH, SAMPLES, Fatal, Squares, digest, hang, manager, reference
from killing import CODE, WORDS
from kinds import QUICK, QUICKEST, THREAD, by_name, start_methods

import cseq
from cseq import testing

# A signal makes a process print its stacks.
STACKS = pytest.param(QUICKEST, marks=pytest.mark.needs("POSIX"), id=QUICKEST.name)
# In seconds; a spawned worker must start within ten times as many.
TIMEOUT = 0.2 if hasattr(os, "fork") else 3.0
ORDER = cseq.permutation(SAMPLES, 11, 0).tolist()
# The batch with sample 123.
NUMBER = ORDER.index(123) // BATCH
INDICES = ORDER[NUMBER * BATCH : (NUMBER + 1) * BATCH]


@pytest.mark.parametrize("deed", [adverse.kill_myself, adverse.crash, adverse.leave])
@pytest.mark.parametrize("start_method", sorted({start_methods()[0], QUICKEST.start_method}))
def test_a_dead_worker_is_replaced_and_the_stream_does_not_show_it(tmp_path, deed, start_method):
    """Its tickets run again after a kill, a crash or an exit, bit for bit as in test mode."""
    worker = partial(Fatal, str(tmp_path), deed, [7, 77, 177])
    with manager(worker, start_method=start_method).start() as m:
        assert digest(m) == reference()
        stats = m.stats()
    assert len(list(tmp_path.iterdir())) == 3
    assert stats.restarts >= 1
    assert stats.retries >= 1


def test_all_workers_killed_again_and_again():
    """Killing every worker several times an epoch leaves the stream unchanged."""
    with manager(max_restarts=1000).start() as m:
        got = []
        for number, batch in enumerate(m):
            got += digest([batch])
            if number % 10 == 5:
                for worker in range(3):
                    testing.kill(m, worker)
        assert got == reference()


class Parents:
    """Each sample is the id of the process that forked its worker."""

    def __getitem__(self, indices):
        return np.full(len(indices), os.getppid())


@pytest.mark.skipif("forkserver" not in start_methods(), reason="no fork server")
def test_a_death_that_the_fork_server_reports_late(caplog):
    """The worker's exit code is awaited, so that a busy machine logs the same text."""
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()  # type: ignore[method-assign]
    with manager(Parents, start_method="forkserver").start() as m:
        testing.await_workers(m)
        batches = iter(m)
        server = int(next(batches)[0])
        logging.getLogger("cseq").addHandler(handler)
        try:
            os.kill(server, signal.SIGSTOP)
            testing.kill(m, 0)
            # Nothing is logged, unless the supervisor gives up waiting for the code.
            logged.wait(1)
            os.kill(server, signal.SIGCONT)
            assert logged.wait(60)
            assert sum(len(batch) for batch in batches) == SAMPLES - BATCH
        finally:
            logging.getLogger("cseq").removeHandler(handler)
    assert [record.getMessage() for record in caplog.records] == [
        "worker 0 was killed by SIGKILL and is being replaced"
    ]


POINTS = ["claim", "slice", "index", "encode", "publish", "published", "notify"]


FAULTY = """
import os, sys, time
import numpy as np
import cseq
from cseq import _memory
from cseq.processes import deaths

if sys.argv[2] == "cuda":  # converter processes also where there is no CUDA
    import rehearsal
    rehearsal.install()
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
    os.environ["CSEQ_FAULT"] = f"{point}:{5 if point == 'notify' else 23}"
    m.start(compat=False)
    del os.environ["CSEQ_FAULT"]
    got = stream(m)
    stats = m.stats()
    m.finish()
    # A batch is counted before it is published: one that is lost in between is counted twice.
    made, counted = stats.index_seconds.count, sum(worker.batches for worker in stats.workers)
    valid = 100 <= made == counted <= 100 + stats.retries
    valid = valid and all(0 <= worker.busy <= 1 for worker in stats.workers)
    print(point, got == expected, stats.restarts > 0, valid)
"""


@pytest.mark.needs("fork")
@pytest.mark.parametrize(("buffer", "out_type"), [("1", "null"), ("10", "null"), ("10", "cuda")])
def test_death_at_every_labelled_point(run_prepared, debug_build, buffer, out_type):
    """A worker killed at any labelled step loses no batch, and leaves valid meters.

    With 'cuda', converters die at these steps, too.
    """
    if out_type == "cuda":
        pytest.importorskip("torch")
    path = os.pathsep.join([str(debug_build), str(Path(adverse.__file__).parent)])
    done = run_prepared(FAULTY, buffer, out_type, *POINTS, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{point} True True True" for point in POINTS]


class Poison(Squares):
    def __getitem__(self, indices):
        if 123 in indices:
            adverse.kill_myself()
        return super().__getitem__(indices)


def test_a_batch_that_kills_again_and_again_is_named(monkeypatch):
    """WorkerDied names epoch, batch, indices and signal; the loop has got the batches before it.

    After SIGKILL, it says how many out-of-memory kills the system has counted.
    """
    counts = itertools.count(5)
    monkeypatch.setattr("cseq.processes.deaths.oom_kills", lambda: next(counts))
    with manager(Poison).start() as m:
        iterator = iter(m)
        for _ in range(NUMBER):
            next(iterator)
        with pytest.raises(cseq.WorkerDied, match=rf"{WORDS}.* has killed 3 workers") as caught:
            next(iterator)
        assert m.stats().restarts == 2
    died = caught.value
    assert (died.epoch, died.batch, died.exitcode) == (0, NUMBER, CODE)
    assert died.indices == INDICES
    assert ("kills in its cgroup: 1; use fewer workers" in str(died)) == (os.name == "posix")


def test_the_budget_of_restarts_is_kept(tmp_path):
    """More deaths in an epoch than `max_restarts` raise WorkerDied."""
    worker = partial(Fatal, str(tmp_path), adverse.leave, [1, 100, 200, 300])
    with (
        manager(worker, max_restarts=2).start() as m,
        pytest.raises(cseq.WorkerDied, match="max_restarts=2"),
    ):
        list(m)


class Raises(Squares):
    def __getitem__(self, indices):
        if 123 in indices:
            raise KeyError("sample 123 is broken")
        return super().__getitem__(indices)


def refuse(array):
    """Convert all arrays except those with sample 123."""
    if 123 in array:
        raise ValueError("sample 123 is broken")
    return array


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("worker", "out_type"), [(Raises, "null"), (Squares, refuse)], ids=["indexer", "out_type"]
)
@pytest.mark.parametrize("kind", QUICK, ids=by_name)
def test_a_batch_that_raises(kind, worker, out_type, on_error, caplog):
    """An exception of an indexer or a callable `out_type` is raised, and all other batches come.

    With on_error='skip', it is logged, counted and listed instead.
    """
    options = {"batch_size": BATCH, "seed": 11, "out_type": out_type, "on_error": on_error}
    m = kind.make(worker, SAMPLES, **options)
    got, raised = [], []
    with caplog.at_level(logging.ERROR, "cseq"), kind.begin(m):
        iterator = iter(m)
        while True:
            try:
                got += digest([next(iterator)])
            except StopIteration:
                break
            except (KeyError, ValueError) as error:
                raised.append(str(error))
        skips = m.stats().skips
    skipped = [entry.error for entry in m.skipped if entry[:2] == (0, NUMBER)]
    logged = [record.getMessage() for record in caplog.records]
    assert got == [d for k, d in enumerate(reference()) if k != NUMBER]
    assert (len(raised), skips) == ((1, 0) if on_error == "raise" else (0, 1))
    assert len(m.skipped) == len(skipped) == skips
    assert all("sample 123 is broken" in text for text in raised + skipped)
    assert sum("sample 123 is broken" in text for text in logged) == skips


@pytest.mark.parametrize("method", start_methods())
def test_skip_leaves_out_a_batch_that_ends_three_workers(method):
    """All other batches come; the skipped one is listed with its indices, and counted."""
    with manager(Poison, on_error="skip", start_method=method, num_workers=2).start() as m:
        got = digest(m)
        assert m.stats().skips == 1
        [entry] = m.skipped
    assert entry[:3] == (0, NUMBER, None)
    assert entry.indices == INDICES
    assert entry.error.startswith("WorkerDied: ")
    assert got == [d for k, d in enumerate(reference()) if k != NUMBER]


class Never:
    def __getitem__(self, indices):
        raise LookupError(f"no {indices[0]}")


@pytest.mark.parametrize("kind", ["thread", "test"])
def test_the_list_of_skipped_batches_is_bounded(kind):
    """All are counted, and the last 1000 are listed."""
    m = cseq.MTSequence(
        Never, 1100, 1, batch_size=1, shuffle=False, out_type="null", on_error="skip"
    )
    with m.start_test() if kind == "test" else m.start():
        assert list(m) == []
        assert m.stats().skips == 1100
        assert [batch for _, batch, *_ in m.skipped] == list(range(100, 1100))
    assert (m.stats().skips, len(m.skipped)) == (1100, 1000)


class Stuck(Fatal):
    """Hangs in a method with a unique name."""

    def __getitem__(self, indices):
        return self.a_method_to_be_found(indices)

    def a_method_to_be_found(self, indices):
        return super().__getitem__(indices)


class StuckInTheMaking(Squares):
    """Its constructor acts unless a mark says that an earlier one did."""

    def __init__(self, mark, deed):
        if not os.path.exists(mark):
            Path(mark).touch()
            self.a_method_to_be_found(deed)

    def a_method_to_be_found(self, deed):
        deed()


def stuck(where, folder, deed, victims):
    """Return a worker that acts once in its constructor, or once at each victim."""
    if where == "constructor":
        return partial(StuckInTheMaking, str(folder / "mark"), deed)
    return partial(Stuck, str(folder), deed, victims)


@pytest.mark.parametrize(
    ("where", "num_workers", "timeout", "said"),
    [
        ("indexer", 4, 0.5, ["epoch 0, batch 0"]),
        # A worker may take ten times the timeout to start, and no more.
        ("constructor", 1, 0.05, ["worker 0 has been starting for", "timeout=0.05"]),
    ],
)
@pytest.mark.parametrize("kind", [STACKS, pytest.param(THREAD, id="thread")])
def test_a_timeout_shows_where_the_worker_is(tmp_path, kind, where, num_workers, timeout, said):
    """WorkerTimeout names the batch or the start, and shows the worker's Python stack."""
    release = threading.Event()
    worker = stuck(where, tmp_path, hang if kind.processes else release.wait, ORDER[:1])
    options = {"batch_size": BATCH, "seed": 11, "timeout": timeout}
    with kind.start(worker, SAMPLES, num_workers, **options) as m:
        with pytest.raises(cseq.WorkerTimeout, match="a_method_to_be_found") as caught:
            next(iter(m))
        release.set()
        # This saves the test the patience of finish().
        for number in range(num_workers if kind.processes else 0):
            testing.kill(m, number)
    assert all(text in str(caught.value) for text in said)


@pytest.mark.parametrize(
    ("where", "num_workers", "timeout"),
    [("indexer", 3, 2.5 * TIMEOUT), ("constructor", 1, TIMEOUT)],
)
def test_a_hanging_worker_can_be_replaced(tmp_path, where, num_workers, timeout):
    """With on_timeout='restart', another process does its work; the stream is unchanged."""
    worker = stuck(where, tmp_path, hang, [5, 300])
    options = {"num_workers": num_workers, "timeout": timeout, "on_timeout": "restart"}
    with manager(worker, **options).start() as m:
        assert digest(m) == reference()
        assert m.stats().restarts >= 1


LESSER = """
import os
import sys
import numpy as np
import cseq
from cseq import testing

m = cseq.MPSequence(
    np.arange(1000), 1000, 2, batch_size=10, out_type="null", start_method=sys.argv[1]
)
m.start()
batches = iter(m)
next(batches)
testing.await_workers(m)
os.setgid(65534)
os.setuid(65534)
print(len(list(batches)))
m.finish()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none is left")
"""


@pytest.mark.needs("POSIX")
@pytest.mark.skipif(getattr(os, "getuid", int)() != 0 or os.name == "nt", reason="not root")
@pytest.mark.parametrize("method", start_methods())
def test_rights_that_are_given_up_after_the_start(run_script, method):
    """Workers that may no longer be killed end by themselves, and are reaped."""
    done = run_script(LESSER, method)
    assert (done.stdout, done.stderr) == ("99\nnone is left\n", "")
