"""``num_workers='auto'``, ``buffer='auto'``: a running manager changes both, but no batch."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from indexers import Augmented
from kinds import QUICKEST, THREAD, assert_same, by_name, every_class, make_small
from resizing import resize
from waiting import until

import cseq

SAMPLES, BATCH = 240, 5
KINDS = [THREAD, QUICKEST]
AUTO: dict[str, Any] = {"num_workers": "auto", "buffer": "auto"}


class Slow(Augmented):
    """Takes its time without computation, so more workers give more batches."""

    def __getitem__(self, indices):
        time.sleep(0.02)
        return super().__getitem__(indices)


def changes(caplog):
    """Return the lines that log changes."""
    return [text for text in caplog.messages if text.startswith(("num_workers", "buffer"))]


def take_until_changed(batches, caplog):
    """Take batches until the number of workers has grown."""
    got = []
    until(lambda: got.append(next(batches)) is None and bool(changes(caplog)))
    return got


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_it_grows_as_one_line_says_and_the_stream_stays(kind, caplog):
    """It grows from few workers, in the middle of an epoch."""
    caplog.set_level(logging.INFO, "cseq")
    with kind.start(Slow, 10**6, batch_size=1, **AUTO) as manager:
        first = manager.stats()
        got = take_until_changed(iter(manager), caplog)
        after = manager.stats()
        assert first.num_workers <= len(after.workers) <= after.num_workers
        assert f"workers=auto: {after.num_workers} " in repr(manager)
        assert f"buffer=auto: {after.buffer}," in repr(manager)
    line = changes(caplog)[0]
    assert line.startswith(f"num_workers {first.num_workers} → {after.num_workers}")
    assert "the loop waits" in line
    assert after.num_workers > first.num_workers
    assert first.buffer <= after.buffer >= 2 * after.num_workers
    with kind.make(Augmented, 10**6, batch_size=1).start_test() as manager:
        for one, other in zip(manager, got, strict=False):
            assert_same(one, other)


class Large(Slow):
    def __getitem__(self, indices):
        return np.zeros((1 << 17,), np.uint8) if super().__getitem__(indices) else None


def test_the_buffer_stays_within_the_memory_limit(caplog):
    """If two batches for each worker exceed the limit, it keeps its first size."""
    caplog.set_level(logging.INFO, "cseq")
    manager = QUICKEST.start(Large, 10**6, batch_size=1, memory_limit="1MB", **AUTO)
    with manager:
        batches = iter(manager)
        until(lambda: next(batches) is not None and manager.stats().num_workers > 5)
        assert manager.stats().buffer == 10
    assert not any("buffer" in text for text in changes(caplog))


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
@pytest.mark.parametrize("how", ["finish", "interrupt", "start"])
def test_an_end_in_the_middle_of_growing_leaves_nothing(kind, how, caplog):
    """New workers that have not started yet end with the others."""
    caplog.set_level(logging.INFO, "cseq")
    before = threading.active_count()
    manager = kind.start(Slow, 10**6, batch_size=1, **AUTO)
    batches = iter(manager)
    take_until_changed(batches, caplog)
    if how == "interrupt":
        again = iter(manager)
        with pytest.raises(InterruptedError):
            next(batches)
        assert next(again) is not None
    elif how == "start":
        manager.start()
        assert next(iter(manager)) is not None
    manager.finish()
    until(lambda: threading.active_count() <= before)


class Fails(Slow):
    """Only the first worker can make it."""

    def __init__(self):
        info = cseq.worker_info()
        assert info is not None
        if info.number:
            raise OSError("no more connections")


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_an_error_of_a_new_worker_is_raised_in_the_loop(kind):
    """It is raised like an error of one of the first workers."""
    with kind.start(Fails, 10**6, batch_size=1, **AUTO) as manager:
        resize(manager, num_workers=1)
        with pytest.raises(OSError, match="no more connections"):
            for _ in manager:
                resize(manager, num_workers=2)


def test_test_mode_has_no_sizes():
    """Test mode makes the batches of all other modes."""
    with make_small(**AUTO).start_test() as manager:
        assert len(list(manager)) == 1


@every_class
@pytest.mark.parametrize("name", ["num_workers", "buffer"])
def test_other_words_are_errors(make, name):
    """They name the argument, the value and the remedy."""
    with pytest.raises(TypeError, match=f"{name}='fast' is not an integer; pass .* 'auto'"):
        make(Augmented, 10, out_type="null", **{name: "fast"})


def test_a_fleet_takes_a_number_of_workers():
    """The trainer does not know the other machines; it does know the buffer's size."""
    with pytest.raises(ValueError, match=r"num_workers='auto' cannot be .* thread_type='ray'"):
        cseq.RaySequence(Augmented, 10, out_type="null", num_workers="auto")
    cseq.RaySequence(Augmented, 10, out_type="null", buffer="auto")


@pytest.mark.parametrize("name", ["start_method", "preload", "max_restarts", "on_timeout"])
def test_a_fleet_has_no_processes_that_cseq_starts(name):
    """Arguments for such processes are refused, with their values."""
    given = {"start_method": "spawn", "preload": False, "max_restarts": 3, "on_timeout": "restart"}
    with pytest.raises(TypeError, match=f"{name}=.*has no effect on a fleet's workers: Ray starts"):
        cseq.RaySequence(Augmented, 10, out_type="null", **{name: given[name]})
