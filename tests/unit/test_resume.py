"""Leaving off in the middle of an epoch and going on, anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cseq
from cseq.indexing.context import generator

if TYPE_CHECKING:
    import numpy as np

SAMPLES = 101


class Drawn:
    """Indices and what the batch's own generator draws."""

    def __getitem__(self, indices: np.ndarray) -> tuple[np.ndarray, float]:
        return indices, float(cseq.rng().random())


def manager(**options: Any) -> cseq.MSequence:
    """Make a manager of threads."""
    options = {"batch_size": 4, "seed": 3, "thread_type": "thread", "out_type": "null"} | options
    return cseq.MSequence(Drawn, options.pop("n", SAMPLES), **options)


def stream(batches: Any) -> list[tuple[list[int], float]]:
    """Batches as values."""
    return [(indices.tolist(), draw) for indices, draw in batches]


def head(m: cseq.MSequence, count: int) -> list[tuple[list[int], float]]:
    """Take the first batches of an epoch, in test mode."""
    m.start_test()
    iterator = iter(m)
    return stream(next(iterator) for _ in range(count))


@settings(max_examples=40)
@given(
    n=st.integers(1, 60),
    batch=st.integers(1, 9),
    other=st.integers(1, 9),
    ranks=st.integers(1, 3),
    new_ranks=st.integers(1, 3),
    part=st.floats(0, 1),
)
def test_the_rest_is_dealt_anew(
    n: int, batch: int, other: int, ranks: int, new_ranks: int, part: float
) -> None:
    """With other batch sizes and ranks, exactly the samples not yet delivered come."""
    first = [manager(n=n, batch_size=batch, shard=(r, ranks)) for r in range(ranks)]
    count = int(part * len(first[0]))
    delivered = [head(m, count) for m in first]
    states = [m.state_dict() for m in first]
    for m in first:
        m.finish()
    assert all(state == states[0] for state in states)
    if states[0]["consumed"] == 0:
        return  # nothing yet, or all of it
    order = cseq.permutation(n, 3, 0).tolist()
    had = [i for d in delivered for indices, _ in d for i in indices]
    assert set(had) == set(order[: states[0]["consumed"]])
    rest = []
    for rank in range(new_ranks):
        m = manager(n=n, batch_size=other, shard=(rank, new_ranks))
        m.load_state_dict(states[0])
        with m.start_test():
            rest += [i for indices, _ in stream(m) for i in indices]
    left = order[states[0]["consumed"] :]
    assert set(left) <= set(rest)
    assert len(rest) - len(left) < new_ranks  # the padding of the tail


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_rest_without_padding(steps: int) -> None:
    """Ranks in step with one another have one state, also where some have no last batch."""
    first = [manager(n=18, shard=(r, 4), batch_size=2, pad=False) for r in range(4)]
    assert [len(m) for m in first] == [3, 3, 2, 2]
    had, states = [], []
    for m in first:
        with m.start_test():
            iterator = iter(m)
            batches = [next(iterator, None) for _ in range(steps)]
            states.append(m.state_dict())
        assert m.state_dict() == states[-1]
        had += [i for batch in batches if batch is not None for i in batch[0].tolist()]
    assert states == [states[0]] * 4
    assert (states[0]["epoch"], states[0]["consumed"]) == ((0, 8 * steps) if steps < 3 else (1, 0))
    if steps == 3:
        assert sorted(had) == list(range(18))
        return
    for world in (4, 3, 1):
        rest = []
        for rank in range(world):
            m = manager(n=18, shard=(rank, world), batch_size=2, pad=False)
            m.load_state_dict(states[0])
            with m.start_test():
                rest += [i for indices, _ in stream(m) for i in indices]
                assert m.state_dict()["epoch"] == 1
        assert sorted(had + rest) == list(range(18))


def test_ranks_draw_differently_and_alike_after_a_resume() -> None:
    """cseq.rng belongs to the batch's place in the epoch, whoever makes it."""
    parts = []
    for rank in range(2):
        with manager(shard=(rank, 2)).start_test() as m:
            parts.append(stream(m))
    draws = [draw for part in parts for _, draw in part]
    assert len(set(draws)) == len(draws)
    assert parts[1][3][1] == float(generator(3, 0, 4 * 7).random())


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    """A state taken after the last batch begins the next epoch."""
    m = manager()
    count = len(m)
    head(m, count)
    state = m.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 0)
    m.finish()
    before = manager()
    before.set_epoch(4)
    assert before.state_dict()["epoch"] == 4


def test_a_state_has_the_same_size_everywhere() -> None:
    """A handful of JSON values, wherever it is taken."""
    m = manager(n=10**9)
    sizes = {len(m.state_dict())}
    m.start_test()
    iterator = iter(m)
    for _ in range(5):
        next(iterator)
        sizes.add(len(m.state_dict()))
    m.finish()
    assert sizes == {8}
    assert m.state_dict()["consumed"] == 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 4), ("version", 99), ("order", {"name": "other-v1"})],
)
def test_a_state_of_something_else_is_refused(name: str, value: Any) -> None:
    """The error names both values."""
    m = manager()
    state = m.state_dict()
    with pytest.raises(ValueError, match=name) as caught:
        m.load_state_dict(state | {name: value})
    for one in (value, state[name]) if name != "version" else (value, 1, 2):
        assert repr(one["name"] if isinstance(one, dict) else one) in str(caught.value)
    del state["consumed"]
    with pytest.raises(ValueError, match="consumed"):
        m.load_state_dict(state)


def test_a_drawn_seed_gives_way() -> None:
    """A manager that drew its seed takes over the state's."""
    state = manager().state_dict()
    m = manager(seed=None)
    m.load_state_dict(state)
    assert m.seed == 3
    with m.start_test(), manager().start_test() as o:
        assert stream(m) == stream(o)


def test_loading_interrupts_what_runs() -> None:
    """An iterator that was under way is not the place any more."""
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


def test_an_unordered_place_cannot_be_said() -> None:
    """With ordered=False there is a state between epochs alone."""
    m = manager(ordered=False)
    with m.start():
        assert m.state_dict()["consumed"] == 0
        next(iter(m))
        with pytest.raises(ValueError, match="ordered"):
            m.state_dict()
        list(m)
        assert m.state_dict()["consumed"] == 0


def test_a_batch_that_raised_is_not_delivered() -> None:
    """The state after an error is at the batch that raised, until the loop goes on behind it."""

    class Broken(Drawn):
        def __getitem__(self, indices: np.ndarray) -> tuple[np.ndarray, float]:
            if 8 in indices:
                raise OSError("unreadable")
            return super().__getitem__(indices)

    m = cseq.MTSequence(Broken, 20, batch_size=4, shuffle=False, out_type="null")
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
