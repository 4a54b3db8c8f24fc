"""Stopping in the middle of an epoch, and continuing anywhere."""

import itertools
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from indexers import Augmented, Raising

import cseq
from cseq.indexing.context import generator


def manager(**options):
    """Make a manager of threads."""
    options = {"batch_size": 4, "seed": 3, "thread_type": "thread", "out_type": "null"} | options
    return cseq.MSequence(Augmented, options.pop("n", 101), **options)


def stream(batches):
    """Return the indices of batches, and their generators' first draws."""
    return [(batch["index"].tolist(), batch["noise"][0, 0]) for batch in batches]


def head(m, count):
    """Take the first batches of an epoch in test mode, at most the given number."""
    return stream(itertools.islice(m.start_test(), count))


@settings(max_examples=40)
@given(
    n=st.integers(1, 60), batch=st.integers(1, 9), other=st.integers(1, 9), ranks=st.integers(1, 3),
    new_ranks=st.integers(1, 3), part=st.floats(0, 1), pad=st.booleans(),
)  # fmt: skip
@example(n=18, batch=2, other=2, ranks=4, new_ranks=3, part=1.0, pad=False)
def test_the_rest_is_dealt_anew(n, batch, other, ranks, new_ranks, part, pad):
    """With other batches and ranks, exactly the rest comes; ranks in step share one state."""
    first = [manager(n=n, batch_size=batch, shard=(r, ranks), pad=pad) for r in range(ranks)]
    count = int(part * len(first[0]))
    delivered = [head(m, count) for m in first]
    states = [m.state_dict() for m in first]
    for m in first:
        m.finish()
    assert all(state == states[0] for state in states)
    if states[0]["consumed"] == 0:
        # Nothing has come yet, or all samples have.
        return
    order = cseq.permutation(n, 3, 0).tolist()
    had = [i for d in delivered for indices, _ in d for i in indices]
    assert set(had) == set(order[: states[0]["consumed"]])
    rest = []
    for rank in range(new_ranks):
        m = manager(n=n, batch_size=other, shard=(rank, new_ranks), pad=pad)
        m.load_state_dict(states[0])
        with m.start_test():
            rest += [i for indices, _ in stream(m) for i in indices]
    left = order[states[0]["consumed"] :]
    assert set(left) <= set(rest)
    # The tail's padding makes the difference.
    assert len(rest) - len(left) < (new_ranks if pad else 1)


def test_a_rank_draws_by_the_position_of_its_batch():
    """It is the position in the epoch of all ranks, so a resume with other ranks draws alike."""
    with manager(shard=(1, 2)).start_test() as m:
        assert stream(m)[3][1] == generator(3, 0, 4 * 7).random()


def test_loading_interrupts_what_runs():
    """An iterator that was under way is no longer the position."""
    m = manager()
    with m.start():
        iterator = iter(m)
        next(iterator)
        m.load_state_dict(manager().state_dict())
        with pytest.raises(InterruptedError):
            next(iterator)
        other = manager()
        assert stream(m)[0] == head(other, 1)[0]
        other.finish()


def test_an_unordered_place_cannot_be_said():
    """With ordered=False, only states between epochs exist."""
    m = manager(ordered=False)
    with m.start():
        assert m.state_dict()["consumed"] == 0
        next(iter(m))
        with pytest.raises(ValueError, match="ordered"):
            m.state_dict()
        list(m)
        assert m.state_dict()["consumed"] == 0


def test_a_batch_that_raised_is_not_delivered():
    """After an error, the state is at the batch that raised, until the loop continues after it."""
    worker = partial(Raising, partial(OSError, "unreadable"), 8)
    m = cseq.MTSequence(worker, 20, batch_size=4, shuffle=False, out_type="null")
    for start in (m.start, m.start_test):
        start()
        m.set_epoch(0)
        iterator = iter(m)
        next(iterator), next(iterator)
        with pytest.raises(OSError, match="unreadable"):
            next(iterator)
        assert m.state_dict()["consumed"] == 8
        next(iterator)
        assert m.state_dict()["consumed"] == 16
    m.finish()
