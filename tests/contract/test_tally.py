"""The tokens of each source in states and figures, and a count of those that ranks got."""

from __future__ import annotations

import json

import numpy as np
import pytest
from token_data import Listed, random_documents

import cseq
from cseq import tokens

ROW, STEP = 16, 12
# A token tells its source; padding is 0.
FIRSTS = {"a": 1, "b": 40_000}


def sources_of(number):
    """Return two sources with different tokens."""
    rng = np.random.default_rng(number)
    drawn = {name: random_documents(rng, 60, ROW) for name in ("a", "b")}
    return {
        name: Listed([[FIRSTS[name] + token for token in document] for document in documents])
        for name, documents in drawn.items()
    }


class InOrder(cseq.Order):
    """Rows of the tokens as stored: unshuffled, and cut where a row ends."""

    name = "in-order-v1"

    def __init__(self, lengths):
        self.ends = np.cumsum(lengths)
        self.samples = int(self.ends[-1])
        self.units, self.room = self.samples // ROW, ROW

    def read(self, seed, epoch, start, count):
        begins = np.append(0, self.ends[:-1])[np.diff(self.ends, prepend=0) > 0]
        rows = [
            [row * ROW, *begins[(begins > row * ROW) & (begins < (row + 1) * ROW)]]
            for row in range(start, start + count)
        ]
        return np.concatenate(rows), np.array([*map(len, rows)])


def rows_of(kind):
    """Return rows, and a manager's options."""
    sources = sources_of(1)
    if kind == "one source":
        return tokens.Rows({"a": sources["a"]}, ROW), {}
    if kind == "unshuffled":
        lengths = np.concatenate([source.lengths for source in sources.values()])
        return tokens.Rows(sources, ROW), {"order": InOrder(lengths)}
    if kind == "resized":
        rows = tokens.Rows(sources, ROW, {"a": 2, "b": 1}, epoch_size=60)
        return rows, {"order": cseq.Resized(rows.order, 25)}
    name, _, balance = kind.partition(", by ")
    packing = "concatenate" if "concatenated" in name else "best-fit"
    options = {"packing": packing}
    if balance:
        options |= {"step": STEP, "balance": balance}
    if "weighted" in name:
        options |= {"weights": {"a": 3, "b": 1}, "epoch_size": 64}
    return tokens.Rows(sources, ROW, **options), {}


KINDS = [
    "one source", "packed", "concatenated", "weighted", "weighted concatenated", "unshuffled",
    "resized", "packed, by step", "weighted, by window", "concatenated, by epoch",
    "weighted concatenated, by epoch",
]  # fmt: skip


def counted(batch):
    """Count the tokens of each source, one by one."""
    ids = batch["input_ids"]
    return np.array([((ids > 0) & (ids < FIRSTS["b"])).sum(), (ids >= FIRSTS["b"]).sum()])


class Ranks:
    """The ranks of a job that take batches in step."""

    def __init__(self, kind, ranks, size, *, drop_last, repeat, state=None, given=None):
        rows, options = given or rows_of(kind)
        self.managers = [
            cseq.MPSequence(
                rows, batch_size=size, num_workers=0, seed=5, out_type="null", repeat=repeat,
                drop_last=drop_last, shard=(rank, ranks), **options,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for manager in self.managers:
            if state is not None:
                manager.load_state_dict(json.loads(json.dumps(state)))
            manager.start()
        self.begin()

    def begin(self):
        self.iterators = [iter(manager) for manager in self.managers]

    def step(self):
        """Return the tokens of a global batch, or None at the end."""
        batches = [next(iterator, None) for iterator in self.iterators]
        return None if batches[0] is None else sum(map(counted, batches))

    def state(self):
        """Return the state that all ranks share, and its tokens of each source."""
        first, *others = [manager.state_dict() for manager in self.managers]
        world = {"world_size": None}
        assert all(other | world == first | world for other in others)
        counts = json.loads(first["tokens"])
        figures = [manager.stats().source_tokens for manager in self.managers]
        assert figures == [counts] * len(figures)
        return first, [counts.get(name, 0) for name in ("a", "b")]

    def finish(self):
        for manager in self.managers:
            manager.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_come_and_go(kind):
    """Each leg has other ranks and another batch size, and ends anywhere, by a kill or an epoch."""
    rng = np.random.default_rng(2)
    due, state = np.zeros(2, int), None
    for ranks, size in ((1, 3), (2, 6), (3, 1), (4, 3), (1, 12), (2, 2)):
        repeat = True if rng.random() < 0.5 else 1
        job = Ranks(kind, ranks, size, drop_last=True, repeat=repeat, state=state)
        for _ in range(int(rng.integers(1, 40))):
            got = job.step()
            if got is None:
                job.begin()
                continue
            due += got
            if rng.random() < 0.3:
                state, counts = job.state()
                assert counts == due.tolist(), (ranks, size)
        state, counts = job.state()
        assert counts == due.tolist(), (ranks, size)
        # The steps after the last state are lost.
        for _ in range(3):
            job.step()
        job.finish()
    assert due.sum() > 5000


def test_rows_that_fill_the_last_batch_count_once():
    """Without drop_last, ranks repeat rows at an epoch's end; an epoch counts each token once."""
    rows, _ = rows_of("packed")
    job = Ranks("packed", 3, 4, drop_last=False, repeat=1, given=(rows, {}))
    while job.step() is not None:
        pass
    assert rows.order.units % 12
    assert job.state()[1] == [int(source.lengths.sum()) for source in sources_of(1).values()]
    job.finish()


def test_other_weights_and_other_sources():
    """Rows from before a change keep their counts, even if their source is gone."""
    given = rows_of("weighted")
    job = Ranks("weighted", 1, 4, drop_last=True, repeat=1, given=given)
    due = sum(job.step() for _ in range(5))
    job.managers[0].reweigh({"a": 0, "b": 1})
    alone = sum(job.step() for _ in range(5))
    assert alone[0] == 0
    due = due + alone
    state, counts = job.state()
    assert counts == due.tolist()
    job.finish()
    left = tokens.Rows({"b": sources_of(1)["b"]}, ROW, {"b": 1}, epoch_size=64)
    job = Ranks("b", 1, 4, drop_last=True, repeat=1, state=state, given=(left, {}))
    due = due + sum(job.step() for _ in range(5))
    assert job.state()[1] == due.tolist()
    job.finish()


def test_another_epoch_adds_what_came():
    """`set_epoch` skips rows, which are not counted."""
    job = Ranks("packed", 1, 4, drop_last=True, repeat=1)
    due = sum(job.step() for _ in range(3))
    for epoch in (7, 2):
        job.managers[0].set_epoch(epoch)
        job.begin()
        due = due + job.step()
        assert job.state()[1] == due.tolist()
    job.finish()


def test_what_it_is_counted_with_is_gone_after_a_finish():
    """Without a run, figures stay, and can be subtracted like others."""
    job = Ranks("weighted", 1, 4, drop_last=True, repeat=1)
    first = job.step()
    before = job.managers[0].stats()
    second = job.step()
    job.finish()
    after = job.managers[0].stats()
    assert [*after.source_tokens.values()] == (first + second).tolist()
    assert [*after.since(before).source_tokens.values()] == second.tolist()
    assert after.as_dict()["cseq/tokens/a"] == (first + second)[0]


def test_states_without_counts():
    """An indexer without sources counts nothing; a state without counts begins at 0."""
    plain = cseq.MPSequence(np.arange(8), num_workers=0, seed=5, out_type="null")
    assert plain.state_dict()["tokens"] == "{}"
    job = Ranks("packed", 1, 4, drop_last=True, repeat=1)
    job.step()
    state, _ = job.state()
    job.finish()
    del state["tokens"]
    job = Ranks("packed", 1, 4, drop_last=True, repeat=1, state=state)
    assert job.state()[1] == [0, 0]
    assert job.step().tolist() == job.state()[1]
    job.finish()
    with pytest.raises(ValueError, match=r"tokens='\[1\]'; pass the dict that state_dict\(\) ret"):
        job.managers[0].load_state_dict(state | {"tokens": "[1]"})
