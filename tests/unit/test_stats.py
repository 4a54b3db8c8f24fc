"""A manager's reports of what it has done."""

import logging
import os
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from indexers import Indices1, Large, Slow
from waiting import until

import cseq
from cseq._memory import HAS_GIL
from cseq.measure.stats import Stats
from cseq.system import cores

both = pytest.mark.parametrize("kind", ["proc", "thread"])
with_cpu_times = pytest.mark.skipif(sys.platform == "win32", reason="cseq reads no CPU time there")

FREE = 10
# In seconds.
PAUSE = 0.01


@both
def test_batches_and_samples_are_counted(kind):
    """They count all epochs since the start, even after the end."""
    m = cseq.MSequence(Large, 50, batch_size=8, thread_type=kind, out_type="null")
    with m.start():
        assert len([*m, *m]) == 14
        now = m.stats()
    assert (now.batches, now.samples) == (14, 100)
    assert m.stats().batches == 14
    assert (now.nbytes >= 100 * (1 << 16)) == (kind == "proc")
    assert now.depths == (0, 0, 0)
    assert now.loop_waited >= 0
    with m.start():
        assert m.stats().batches == 0


class Held:
    """Makes batches at once; from one index on, or at one only, it waits for a file."""

    def __init__(self, gate, *, alone, at=FREE):
        self.gate, self.alone, self.at = gate, alone, at

    def __getitem__(self, indices):
        if indices[0] == self.at or (indices[0] > self.at and not self.alone):
            until(lambda: os.path.exists(self.gate))
        return indices


class Computes:
    """Computes in Python, and returns the CPU time of that."""

    def __getitem__(self, indices):
        begun = time.thread_time()
        sum(k * k for k in range(20_000))
        return time.thread_time() - begun


class Pinned(Computes):
    """Computes on the first core, which another one may use."""

    def __init__(self):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


class SlowToMake(Indices1):
    def __init__(self, gate):
        until(lambda: os.path.exists(gate))


def make(kind, worker, num_workers, batches, buffer=10):
    """Make a manager of batches of one index."""
    return cseq.MSequence(
        worker, batches, num_workers=num_workers, batch_size=1, thread_type=kind, out_type="null",
        shuffle=False, buffer=buffer,
    )  # fmt: skip


# No machine is as quick as a test might want, so these tests create a state and hold it until the
# counts show it. A test waits in vain if something is counted wrongly, or not at all.


def await_bottleneck(manager, cause):
    """Wait until the counts name the bottleneck."""
    while (stats := manager.stats()).bottleneck != cause:
        time.sleep(PAUSE)
    return stats


@pytest.mark.parametrize(
    ("cause", "num_workers", "count", "buffer"),
    [("buffer", 8, 30, 2), ("workers", 2, 30, 10), ("stragglers", 8, 50, 10)],
)
@both
def test_what_workers_are_held_by(kind, cause, num_workers, count, buffer, tmp_path):
    """The cases: a buffer of two batches, all workers, which are too few, and one of eight."""
    gate, found = tmp_path / "gate", []
    worker = partial(Held, str(gate), alone=cause == "stragglers")
    with make(kind, worker, num_workers, count, buffer).start() as running:

        def open_gate():
            found.append(await_bottleneck(running, cause))
            gate.touch()

        batches, opening = iter(running), threading.Thread(target=open_gate)
        taken = [next(batches) for _ in range(FREE)]
        opening.start()
        assert len([*taken, *batches]) == count
        opening.join()
    assert (found[0].loop_waiting > found[0].workers_waiting) or cause != "workers"
    assert found[0].advice().change.get("buffer", 16) >= 16


@both
def test_workers_that_do_not_compute(kind):
    """If all are busy and hardly compute, they wait for something other than a core."""
    # The pause is long enough for a busy machine to wake them in time.
    with make(kind, partial(Slow, 10 * PAUSE), 2, 10**6).start() as batches:
        for _ in batches:
            advice = batches.advice()
            if advice.cause == "workers":
                break
    assert advice.change["num_workers"] > 2
    assert ("they wait for a disk" in advice.sentence) is (sys.platform != "win32")


@pytest.mark.skipif(not HAS_GIL or cores() < 2, reason="threads share no GIL, or but one core")
@with_cpu_times
def test_threads_that_wait_for_the_gil():
    """Threads that compute in Python wait for the GIL; each process has its own."""
    with make("thread", Computes, 3, 10**6).start() as batches:
        # A look is work of the loop, so not every batch has one.
        for number, _ in enumerate(batches):
            if not number % 16 and (stats := batches.stats()).bottleneck == "gil":
                break
    assert "MPSequence" in stats.advice().action


@pytest.mark.parametrize("num_workers", [1, 6])
@both
def test_a_slow_loop(kind, num_workers):
    """While the loop is busy, all workers wait, however many they are."""
    with make(kind, Indices1, num_workers, 100).start() as running:
        batches = iter(running)
        taken = [next(batches) for _ in range(FREE)]
        until(lambda: await_bottleneck(running, "loop").loop_waiting < 0.05)
        until(lambda: running.stats().workers_waiting > 0.5)
        assert len([*taken, *batches]) == 100


@with_cpu_times
def test_what_threads_compute():
    """It is the CPU time of the loop and its threads; for other pools, it is unknown."""
    begun = time.process_time()
    with make("thread", Computes, 4, 10**6).start() as batches:
        for _ in batches:
            stats = batches.stats()
            computed = stats.window().computed * stats.elapsed
            if not HAS_GIL or computed > 0.3:
                break
    assert (computed > 0) == HAS_GIL
    assert computed <= time.process_time() - begun
    with make("proc", Computes, 2, 20).start() as batches:
        assert len(list(batches)) == 20
        assert batches.stats().window().computed == 0


@pytest.mark.parametrize(
    "kind", [pytest.param("proc", marks=pytest.mark.needs("quick processes")), "thread"]
)
def test_times_of_batches(kind):
    """Each batch, step and wait is counted; workers and their slowest batches are named."""
    m = make(kind, Slow, 2, 40)
    with m.start() as batches:
        for _ in range(2):
            for _ in batches:
                pass
        stats = batches.stats()
    assert (stats.index_seconds.count, stats.step_seconds.count) == (80, 79 + 1)
    assert stats.index_seconds.mean >= PAUSE
    assert stats.index_seconds.quantile(0.01) >= 0.8 * PAUSE
    assert 0 < stats.wait_seconds.count <= 80
    assert sum(worker.batches for worker in stats.workers) == 80
    assert [worker.number for worker in stats.workers] == [0, 1]
    assert all(0 < worker.busy <= 1 and worker.p50 >= 0.8 * PAUSE for worker in stats.workers)
    assert len(stats.slowest) == 16
    slowest = stats.slowest[0]
    assert slowest.seconds == max(slow.seconds for slow in stats.slowest)
    assert {slow.epoch for slow in stats.slowest} <= {0, 1}
    assert m.remake(slowest.epoch, slowest.batch).seconds >= PAUSE
    pids = {worker.pid for worker in stats.workers}
    assert len(pids) == 2 or pids == {0}
    assert os.getpid() not in pids


@both
def test_the_way_of_a_window(kind):
    """It has what came after an earlier reading, in a logger's form."""
    m = make(kind, Indices1, 2, 40)
    with m.start() as batches:
        list(batches)
        before = batches.stats()
        assert before.since(before).batches == 0
        list(batches)
        after = batches.stats()
        added = after.since(before)
    assert (added.batches, added.samples, added.index_seconds.count) == (40, 40, 40)
    assert added.elapsed == pytest.approx(after.elapsed - before.elapsed)
    assert {slow.epoch for slow in added.slowest} <= {1}
    with pytest.raises(ValueError, match="from a different run"):
        before.since(after)
    with m.start() as batches:
        for _ in range(3):
            list(batches)
        with pytest.raises(ValueError, match="from a different run"):
            batches.stats().since(after)
    figures = added.as_dict()
    assert list(figures) == [f"cseq/{name}" for name in NAMES]
    assert all(type(figure) is float for figure in figures.values())
    assert list(Stats().as_dict("")) == NAMES
    assert figures["cseq/batches_per_s"] == pytest.approx(40 / added.elapsed)


# They never change, since dashboards use them.
NAMES = [
    "batches_per_s", "samples_per_s", "bytes_per_s", "wait_fraction", "step_ms", "wait_ms_p99",
    "index_ms_mean", "index_ms_p50", "index_ms_p99", "worker_busy", "worker_cpu", "ready_depth",
    "first_batch_s", "restarts", "retries", "copies", "skips",
]  # fmt: skip


@both
def test_the_log_says_why_a_loop_has_waited(kind, monkeypatch, caplog):
    """Each epoch's end logs each cause once, for any number of starts."""
    monkeypatch.setattr("cseq.engine.pool.LONG", 0.0)
    caplog.set_level(logging.INFO, logger="cseq")
    m = make(kind, Slow, 1, 20)
    for _ in range(2):
        with m.start() as batches:
            for _ in range(2):
                list(batches)
    said = [record for record in caplog.records if "the loop waits" in record.message]
    causes = [record.message.partition(":")[0] for record in said]
    # There is one cause, unless other programs use the cores.
    assert len(causes) == len(set(causes)) >= 1
    assert {record.levelno for record in said} == {logging.WARNING}
    monkeypatch.setenv("CSEQ_ADVICE", "0")
    caplog.clear()
    m = make(kind, Slow, 1, 20)
    with m.start() as batches:
        list(batches)
    monkeypatch.delenv("CSEQ_ADVICE")
    monkeypatch.setattr("cseq.engine.pool.LONG", 1000.0)
    with m.start() as batches:
        list(batches)
    assert "the loop waits" not in caplog.text


@both
def test_the_log_says_it_in_the_middle_of_a_long_epoch(kind, monkeypatch, caplog):
    """A training run may have one epoch, or an endless one."""
    monkeypatch.setattr("cseq.engine.pool.LONG", 0.0)
    monkeypatch.setattr("cseq.engine.pool.OFTEN", 0.2)
    caplog.set_level(logging.INFO, logger="cseq")
    with make(kind, Slow, 1, 10**6).start() as batches:
        for _ in batches:
            if "the loop waits" in caplog.text:
                break
    assert "(CSEQ_ADVICE=0 switches this off)" in caplog.text


def test_the_start_is_no_waiting(tmp_path):
    """The time before the first batch is counted apart; pauses between epochs are not counted."""
    gate = tmp_path / "gate"
    m = make("proc", partial(SlowToMake, str(gate)), 2, 30)
    opening = threading.Timer(0.3, gate.touch)
    opening.start()
    took = 0.0
    with m.start():
        for _ in range(2):
            begun = time.perf_counter()
            for _ in m:
                time.sleep(PAUSE)
            took += time.perf_counter() - begun
            time.sleep(0.3)
        stats = m.stats()
    opening.join()
    assert stats.start_waited > 0
    assert stats.elapsed >= 50 * PAUSE
    assert stats.elapsed + stats.start_waited <= took
    assert stats.loop_waited <= stats.elapsed - 50 * PAUSE


@both
def test_waits_for_the_first_batches_of_the_only_epoch_are_of_the_start(kind, tmp_path):
    """The advice counts them once another epoch exists; the counters always have them."""
    gate = tmp_path / "gate"
    seen = []
    with make(kind, partial(Held, str(gate), alone=True, at=1), 2, 20).start() as running:

        def open_gate():
            until(lambda: running.stats().meters.waits >= PAUSE and running.stats().batches)
            gate.touch()

        for _ in range(2):
            opening = threading.Thread(target=open_gate)
            opening.start()
            assert len(list(running)) == 20
            opening.join()
            gate.unlink()
            seen.append(running.stats())
    one, two = (stats.window() for stats in seen)
    assert one.first >= PAUSE
    assert (one.early, one.waited + one.first) == (0, pytest.approx(seen[0].loop_waited))
    assert one.elapsed + one.first == pytest.approx(seen[0].elapsed)
    assert (two.first, two.waited) == (0, seen[1].loop_waited)
    assert two.early * two.waited >= 2 * PAUSE
    later = seen[1].since(seen[0]).window()
    assert later.early > 0
    assert later.first == 0


@with_cpu_times
def test_what_a_pause_computes_is_none_of_the_loops():
    """The loop's CPU time covers only its epochs, as does all of its time."""
    with make("thread", Slow, 1, 5).start() as batches:
        for _ in range(4):
            assert len(list(batches)) == 5
            end = time.thread_time() + 0.04
            while time.thread_time() < end:
                pass
        loop = batches.stats().meters.loop
    assert loop["epochs"] == 3
    # The pauses take 0.12 s.
    assert 0 < loop["cpu"] < 0.06e9


@pytest.mark.needs("Linux")
@pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="the system does not count it"
)
def test_workers_that_wait_for_a_core():
    """Two workers take turns on one core: they wait for no disk, and a third would not help."""
    with make("proc", Pinned, 2, 10**6).start() as batches:
        for number, _ in enumerate(batches):
            if number % 16:
                continue
            stats = batches.stats()
            if stats.bottleneck == "cores" and stats.window().queued > 0.3:
                break
    assert "and waiting for a core" in stats.advice().sentence
    assert stats.advice().change == {}


@both
def test_whether_the_gpu_had_run_dry(kind, monkeypatch):
    """It is asked after each wait except the first; a loop that waits may have a busy GPU."""
    answers = iter([*[None] * 3, True, *[False] * 10**6])
    monkeypatch.setattr("cseq.engine.pool.gpu_is_idle", lambda: next(answers))
    with make(kind, Slow, 1, 60).start() as batches:
        for _ in batches:
            pass
        stats = batches.stats()
    assert stats.gpu_dry == 1
    assert 20 <= stats.gpu_waits < 60
    assert stats.advice().cause == "loop"
    assert "the GPU had run dry after" in stats.advice().sentence
    assert stats.since(stats).window().dry is None


def test_little_was_seen():
    """Test mode and the first few batches show no bottleneck."""
    m = cseq.MTSequence(np.arange(40), 40, batch_size=1, num_workers=1, out_type="null")
    with m.start_test() as batches:
        list(batches)
        assert m.stats().bottleneck == "inline"
    with m.start() as batches:
        assert m.stats().bottleneck == "unknown"
        assert m.stats().loop_waiting == m.stats().workers_waiting == 0
        next(iter(batches))
        assert m.stats().bottleneck == "unknown"
