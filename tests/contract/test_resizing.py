"""Changes of workers and buffer while a manager runs: the stream stays the same."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from indexers import Augmented, Indices1
from kinds import QUICKEST, THREAD, assert_same, by_name, expected, make_small
from resizing import resize
from waiting import until

import cseq
from cseq import testing

MOST, CELLS, SAMPLES, BATCH = 4, 12, 240, 5
every_kind = pytest.mark.parametrize("kind", [THREAD, QUICKEST], ids=by_name)


def at_random(manager, seed, *, kills):
    """Yield the batches of an epoch, and change the sizes in between; workers die, too."""
    draw = random.Random(seed)
    for batch in manager:
        yield batch
        if draw.random() < 0.4:
            resize(manager, draw.randint(1, MOST), draw.randint(1, CELLS))
        if kills and draw.random() < 0.1:
            testing.kill(manager, draw.randrange(MOST))


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@every_kind
def test_sizes_at_random_change_no_batch(kind, ordered):
    """It holds for ordered and unordered batches, in threads and in processes that may die."""
    options = {"batch_size": BATCH, "buffer": CELLS, "ordered": ordered, "max_restarts": 1000}
    reference = expected(Augmented, SAMPLES, epochs=3, batch_size=BATCH)
    with kind.start(Augmented, SAMPLES, MOST, **options) as manager:
        got = [
            batch for seed in range(3) for batch in at_random(manager, seed, kills=kind.processes)
        ]
    if not ordered:
        count = len(reference) // 3
        for epoch in range(3):
            of_epoch = slice(epoch * count, (epoch + 1) * count)
            for batches in (got, reference):
                batches[of_epoch] = sorted(batches[of_epoch], key=lambda b: b["more"])
    assert_same(got, reference)


@every_kind
def test_a_resume_in_the_middle_of_changes(kind):
    """Another manager continues where the state was taken."""
    reference = expected(Augmented, SAMPLES, batch_size=BATCH)
    got, state = [], None
    while state is None or len(got) < len(reference):
        manager = kind.make(Augmented, SAMPLES, MOST, batch_size=BATCH, buffer=CELLS)
        if state is not None:
            manager.load_state_dict(state)
        with manager.start():
            for batch in at_random(manager, len(got), kills=False):
                got.append(batch)
                state = manager.state_dict()
                if len(got) % 17 == 0:
                    break
    assert_same(got, reference)


class Gated:
    """Reports a batch by a file, and waits for another file before it continues."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, indices):
        info = cseq.worker_info()
        assert info is not None
        (self.folder / f"in-{info.number}").touch()
        until((self.folder / "open").exists)
        return indices


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "dies"])
def test_a_worker_that_is_to_leave_finishes_its_ticket_or_another_makes_it(tmp_path, dies):
    """If killed with a ticket while it is being retired, it is not replaced."""
    with QUICKEST.start(
        Gated(tmp_path), SAMPLES, 2, batch_size=BATCH, buffer=4, shuffle=False
    ) as manager:
        batches = iter(manager)
        until(lambda: all((tmp_path / f"in-{k}").exists() for k in range(2)))
        leaving = testing.pids(manager)[1]
        resize(manager, num_workers=1)
        assert testing.pids(manager) == [testing.pids(manager)[0]]
        if dies:
            assert testing.kill(manager, 1) == leaving
        (tmp_path / "open").touch()
        assert np.concatenate(list(batches)).tolist() == list(range(SAMPLES))
        until(lambda: manager.stats().retries == dies)
        assert manager.stats().num_workers == 1


def test_a_thread_that_leaves_closes_its_indexer_and_another_is_made():
    """Each thread that comes or goes makes or closes one indexer."""
    made, closed = [], []

    class Counted(Indices1):
        def __init__(self):
            made.append(threading.get_ident())

        def close(self):
            closed.append(threading.get_ident())

    with THREAD.start(Counted, 10**6, 3, batch_size=1, buffer=CELLS) as manager:
        batches = iter(manager)
        until(lambda: len(made) == 3)
        for count in range(1, 4):
            resize(manager, num_workers=2)
            until(lambda n=count: next(batches) is not None and len(closed) == n)
            resize(manager, num_workers=3)
            until(lambda n=count: next(batches) is not None and len(made) == 3 + n)
    assert len(closed) == len(made) == 6


def test_a_process_that_leaves_ends_and_another_is_started():
    """Neither counts as a death."""
    with QUICKEST.start(Augmented, 10**6, 3, batch_size=1, buffer=CELLS) as manager:
        batches = iter(manager)
        testing.await_workers(manager)
        for _ in range(2):
            before = testing.pids(manager)
            assert len(set(before)) == 3
            resize(manager, num_workers=1)
            assert testing.pids(manager) == before[:1]
            resize(manager, num_workers=3)
            until(lambda: next(batches) is not None and None not in testing.pids(manager))
            testing.await_workers(manager)
        assert manager.stats().restarts == 0


@every_kind
def test_no_more_batches_are_made_ahead_than_the_buffer(kind):
    """It holds when the buffer shrinks, and when it grows again without a step of the loop."""
    with kind.start(Augmented, 10**6, 2, batch_size=1, buffer=CELLS) as manager:
        batches = iter(manager)
        for ahead in (CELLS, 3, 7, 1):
            resize(manager, buffer=ahead)
            # This takes the batches posted earlier.
            for _ in range(0 if ahead == 7 else 2 * CELLS):
                next(batches)
            until(lambda n=ahead: manager.stats().depths[2] == n)
            assert manager.stats().buffer == ahead


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


@every_kind
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


@every_kind
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


@every_kind
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
