"""The choices of 'auto': a pure function of windows, recorded or from a model."""

import logging
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cseq import arguments, system
from cseq.arguments import sizes_of, workers_of_auto
from cseq.engine.tuning import Tuner, log_change
from cseq.measure.advice import Window, advise
from cseq.options import Size

BOTH = (True, True)
MOST = Size(64, 1024)

# Recorded on two cores: threads that sleep 20 ms for a batch, a loop of 3 ms.
READING = Window(
    batches=25, elapsed=0.51, waited=0.43, step=0.0032, step_p99=0.0038,
    index=0.0203, index_p99=0.0225, workers=1, busy=0.99, cpu=0.004,
    loop_cpu=0.05, cores=2, buffer=10, threads=True, computed=0.06, gil=1e-5,
)  # fmt: skip
# One batch in twenty takes 150 ms, the others take 5 ms; steps of 4 ms.
UNEVEN = replace(
    READING, batches=75, elapsed=0.52, waited=0.2, step=0.0042, step_p99=0.0049,
    index=0.0125, index_p99=0.154, workers=5, busy=0.35, behind=0.9,
)  # fmt: skip
# Workers that compute for 40 ms, on eight cores; the loop takes 11.5 ms.
COMPUTING = replace(
    READING, batches=50, elapsed=1.0, waited=0.45, step=0.0115, step_p99=0.012,
    index=0.04, index_p99=0.045, workers=2, busy=1.0, cpu=0.97, loop_cpu=0.9,
    cores=8, threads=False, computed=0.0, gil=0.0,
)  # fmt: skip


def decided(tuner, window, size):
    """Let a tuner change a size; return the new one, and the reason."""
    decision = tuner.look(window, size, MOST)
    return decision.size, decision.why


@pytest.mark.parametrize(("window", "workers"), [(READING, 7), (COMPUTING, 4)])
def test_it_takes_what_the_advice_names_at_once(window, workers):
    """It does so in one change, with a buffer for that many workers."""
    assert advise(window).change["num_workers"] == workers
    size, why = decided(Tuner(BOTH), window, Size(window.workers, 10))
    assert (size, why) == (Size(workers, max(10, 3 * workers)), advise(window).sentence)


@pytest.mark.parametrize("auto", [(True, False), (False, True), BOTH])
def test_it_changes_what_is_auto_alone(auto):
    """A given number stays."""
    for window in (READING, UNEVEN, COMPUTING):
        size = Size(window.workers, window.buffer)
        decision = Tuner(auto).look(window, size, MOST)
        after = size if decision is None else decision.size
        assert after.num_workers == size.num_workers or auto[0]
        assert after.buffer == size.buffer or auto[1]


def test_more_workers_that_did_harm_are_taken_back():
    """They are not tried again until the time of a batch changes."""
    tuner = Tuner(BOTH)
    assert decided(tuner, COMPUTING, Size(2, 10))[0].num_workers == 4
    slower = replace(COMPUTING, workers=4, batches=40, index=0.1)
    back, why = decided(tuner, slower, Size(4, 10))
    assert (back.num_workers, why) == (2, "50 batches/s with 2 workers, 40 with 4")
    for _ in range(20):
        assert tuner.look(COMPUTING, Size(2, 10), MOST) is None
    dearer = replace(COMPUTING, index=0.08, batches=25)
    assert decided(tuner, dearer, Size(2, 10))[0].num_workers == 7


def test_more_workers_that_were_of_no_use_are_the_last():
    """They stay, as the difference may be chance, and no more are added."""
    tuner = Tuner(BOTH)
    assert tuner.look(COMPUTING, Size(2, 10), MOST) is not None
    same = replace(COMPUTING, workers=4, batches=51)
    for _ in range(20):
        assert tuner.look(same, Size(4, 10), MOST) is None


def test_a_larger_buffer_that_was_of_no_use_is_the_last():
    """The advice names it for stragglers; it stays; if the rate improved, a larger one is tried."""
    for rate, again in ((1.0, False), (1.3, True)):
        tuner = Tuner(BOTH)
        size, _ = decided(tuner, UNEVEN, Size(5, 10))
        assert size == (5, advise(UNEVEN).change["buffer"])
        after = replace(UNEVEN, buffer=size.buffer, batches=int(rate * UNEVEN.batches))
        assert (tuner.look(after, size, MOST) is not None) == again
    assert all(Tuner(BOTH).look(after, size, size) is None for _ in range(3))


def test_a_window_has_to_be_long_enough():
    """It needs time and batches; without changes, up to some seconds more."""
    tuner = Tuner(BOTH)
    assert tuner.is_enough(READING)
    assert not tuner.is_enough(replace(READING, elapsed=0.4))
    assert not tuner.is_enough(replace(READING, workers=8))
    fed = replace(READING, waited=0.0, workers=7)
    for _ in range(10):
        tuner.look(fed, Size(7, 14), MOST)
    assert 4 <= tuner.span <= 10
    tuner.look(READING, Size(1, 10), MOST)
    assert tuner.span < 1


def model(workers, index, step, cpu, cores, buffer):
    """Return a second of a machine without chance: workers share its cores, the loop has one."""
    slowed = max(1.0, workers * cpu / max(cores - 0.5, 0.5))
    rate = min(workers / (index * slowed), 1 / step)
    return Window(
        batches=10**6, elapsed=10**6 / rate, waited=10**6 / rate * (1 - rate * step), step=step,
        step_p99=step, index=index * slowed,
        index_p99=index * slowed, workers=workers, busy=min(1.0, rate * index * slowed / workers),
        cpu=cpu / slowed, loop_cpu=0.5, cores=cores, buffer=buffer,
    )  # fmt: skip


@given(
    st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(0.01, 1.0), st.sampled_from([1, 2, 8, 64])
)
# 16 workers use most of the core that the loop leaves.
@example(1.0, 0.03125, 0.02734375, 1)
def test_it_ends_near_the_best_and_then_stays(index, step, cpu, cores):
    """Within a few changes, it reaches nine tenths of the best number's rate."""
    tuner, size, changes, last = Tuner(BOTH), Size(1, 10), 0, 0
    for k in range(60):
        window = model(size.num_workers, index, step, cpu, cores, size.buffer)
        decision = tuner.look(window, size, MOST)
        if decision is not None:
            size, changes = decision.size, changes + 1
            last = k
    assert changes <= 8
    assert last < 20
    # It does not try one worker more than the cores: its core may be the loop's.
    most = min(MOST.num_workers, max(1, math.floor((cores - 0.5) / cpu)))
    best = max(
        1 / w.elapsed for w in (model(k, index, step, cpu, cores, 9) for k in range(1, most + 1))
    )
    now = model(size.num_workers, index, step, cpu, cores, 9)
    assert 1 / now.elapsed >= 0.9 * best


def test_a_change_is_one_line(caplog):
    """The line has the changes only, and the reason."""
    with caplog.at_level(logging.INFO, "cseq"):
        log_change(Size(7, 14), Size(7, 30), "the loop waits 31%")
    assert caplog.messages == ["buffer 14 → 30: the loop waits 31%"]


def test_the_sizes_to_begin_with(monkeypatch):
    """They are few workers, with a core for the loop, and at most what may wait for a disk."""
    monkeypatch.setattr(system, "cores", lambda: 8)
    monkeypatch.setattr(arguments, "share", lambda: 8)
    assert workers_of_auto() == (4, 32)
    assert sizes_of("auto", "auto", "proc", 32) == (Size(4, 10), Size(32, 1024), BOTH)
    assert sizes_of("auto", 6, "proc", 32) == (Size(4, 6), Size(6, 6), (True, False))
    assert sizes_of(9, "auto", "thread", 32) == (Size(9, 18), Size(9, 1024), (False, True))
    assert sizes_of(9, "auto", "thread", 2**32 - 1)[1] == (9, 18)
    assert sizes_of(9, None, "thread", 32) == (Size(9, 10), Size(9, 10), (False, False))
    assert sizes_of(9, None, "ray", 32) == sizes_of(9, "auto", "ray", 32)
    for share, expected in ((1, (1, 16)), (2, (1, 16)), (64, (4, 64)), (200, (4, 200))):
        monkeypatch.setattr(arguments, "share", lambda n=share: n)
        assert workers_of_auto() == expected


def test_the_cores_of_this_process(monkeypatch):
    """They are within a quota, in equal parts for the machine's ranks."""
    monkeypatch.setattr(system, "cores", lambda: 16)
    for name in system.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "quota", lambda: None)
    assert system.share() == 16
    monkeypatch.setattr(system, "quota", lambda: 5.5)
    assert system.share() == 6
    for value, expected in (("2", 3), ("64", 1), ("0", 6), ("many", 6)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert system.share() == expected
