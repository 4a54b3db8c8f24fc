"""Changes of workers and buffer while a manager runs: the stream stays the same."""

import random
import threading

import numpy as np
import pytest
from indexers import Augmented
from kinds import QUICKEST, THREAD, assert_same, by_name, expected
from resizing import resize
from waiting import until

import cseq
from cseq import testing

MOST, CELLS, SAMPLES, BATCH = 4, 12, 240, 5
KINDS = [THREAD, QUICKEST]


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
@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_sizes_at_random_change_no_batch(kind, ordered):
    """It holds for ordered and unordered batches, in threads and in processes that may die."""
    options = {"batch_size": BATCH, "buffer": CELLS, "ordered": ordered, "max_restarts": 1000}
    reference = expected(Augmented, SAMPLES, epochs=3, **options)
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
    assert len(got) == len(reference)
    for one, other in zip(got, reference, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_a_resume_in_the_middle_of_changes(kind):
    """Another manager continues where the state was taken."""
    reference = expected(Augmented, SAMPLES, batch_size=BATCH)
    got = []
    state = None
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
    for one, other in zip(got, reference, strict=True):
        assert_same(one, other)


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
    made = []
    closed = []

    class Counted:
        def __init__(self):
            made.append(threading.get_ident())

        def __getitem__(self, indices):
            return indices

        def close(self):
            closed.append(threading.get_ident())

    with cseq.MTSequence(
        Counted, 10**6, 3, batch_size=1, buffer=CELLS, out_type="null", seed=1
    ).start() as manager:
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


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
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
