"""torchtitan's dataloader, by its contracts alone: the release's, and that in newer sources."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import titan
from token_data import random_documents, write_flat, write_megatron

import cseq
from cseq import tokens

torch = pytest.importorskip("torch")


ROW = 16
both = pytest.mark.parametrize("contract", ["0.3.0", "newer"])


@pytest.fixture
def make_rows(tmp_path):
    """Return the user's function, which makes rows of a Megatron pair and a flat file."""
    rng = np.random.default_rng(1)
    write_megatron(tmp_path / "web", random_documents(rng, 60, ROW))
    write_flat(tmp_path / "code.bin", [[*each, 0] for each in random_documents(rng, 40, ROW)])

    def rows(length, **options):
        web = tokens.Megatron(tmp_path / "web")
        code = tokens.Flat(tmp_path / "code.bin", dtype="uint16", end=0)
        return tokens.Rows({"web": web, "code": code}, length, **options)

    return rows


@pytest.fixture
def config(monkeypatch, contract, make_rows):
    """Return a function that makes a config of the adapter."""
    module = titan.adapter(monkeypatch, contract)
    return partial(module.TokenDataLoader.Config, rows=make_rows, seed=7, num_workers=0)


def epochs(make_rows, number):
    """Return the rows of consecutive epochs."""
    manager = cseq.MPSequence(make_rows(ROW), batch_size=1, num_workers=0, seed=7, out_type="null")
    found = []
    with manager.start() as batches:
        for _ in range(number):
            for batch in batches:
                parts = (batch[key][0] for key in ("input_ids", "position_ids", "labels"))
                found.append(tuple(part.tolist() for part in parts))
    return found


@both
def test_a_batch_has_what_the_model_takes(config, contract):
    """Tokens, positions and labels are int64 tensors of one or two dimensions, without others."""
    loader = titan.build(config(num_workers=1), contract, ROW, 3)
    iterator = iter(loader)
    inputs, labels = next(iterator)
    iterator.close()
    assert {*loader.manager.remake(0, 0).batch} == {"input_ids", "position_ids", "labels"}
    shape = {"0.3.0": (3, ROW), "newer": (3 * ROW,)}[contract]
    assert set(inputs) == {"input", "positions"}
    assert [(p.shape, p.dtype) for p in (*inputs.values(), labels)] == [(shape, torch.int64)] * 3
    assert (inputs["positions"].reshape(3, ROW)[:, 0] == 0).all()


@both
def test_all_ranks_end_at_the_same_step(config, contract, make_rows):
    """One epoch is all whole steps of its rows; no more follow, even after a resume at the end."""
    loaders = [titan.build(config(repeat=False), contract, ROW, 2, r, 3) for r in range(3)]
    found = [*zip(*(titan.rows_of(loader, ROW) for loader in loaders), strict=True)]
    whole = epochs(make_rows, 1)
    assert [*chain(*chain(*found))] == whole[: len(whole) // 6 * 6]
    assert [list(loader) for loader in loaders] == [[], [], []]
    again = titan.build(config(repeat=False), contract, ROW, 4)
    again.load_state_dict(loaders[1].state_dict())
    assert list(again) == []


@both
@pytest.mark.parametrize(("ranks", "rows", "workers"), [(1, 4, 0), (3, 2, 1), (4, 1, 0)])
def test_a_state_is_that_of_any_ranks(config, contract, make_rows, ranks, rows, workers):
    """Two ranks' states are equal. Other ranks continue with the next rows, into the next epoch."""
    first = [titan.build(config(), contract, ROW, 3, r, 2) for r in range(2)]
    before = [[*titan.rows_of(loader, ROW, 2)] for loader in first]
    states = [loader.state_dict() for loader in first]
    assert states[0] == states[1]
    whole = epochs(make_rows, 1)
    left, step = len(whole) - 12, ranks * rows
    steps = left // step
    after = []
    for rank in range(ranks):
        loader = titan.build(config(num_workers=workers), contract, ROW, rows, rank, ranks)
        loader.load_state_dict({})
        loader.load_state_dict(states[0])
        after.append([*titan.rows_of(loader, ROW, steps + 1)])
    # Each step has the rows of all ranks.
    taken = (*zip(*before, strict=True), *zip(*after, strict=True))
    *found, last = ([*chain(*parts)] for parts in taken)
    assert [*chain(*found)] == whole[: 12 + steps * step]
    assert last == epochs(make_rows, 2)[len(whole) : len(whole) + step]


@both
def test_the_validator_sets_how_often(config, contract):
    """For its validator, 0.3.0 sets `infinite`, newer sources set `repeat`; False: one epoch."""
    given = {"0.3.0": {"infinite": False}, "newer": {"repeat": False}}[contract]
    loader = titan.build(titan.replace(config(), **given), contract, ROW, 2)
    assert len(list(loader)) == len(loader.manager)
    assert loader.manager.epoch == 0


@both
def test_an_iterator_goes_on_where_the_loader_is(config, contract, make_rows):
    """A new iterator continues after the rows of an abandoned one."""
    loader = titan.build(config(repeat=False), contract, ROW, 2)
    found = [batch for _ in range(3) for batch in titan.rows_of(loader, ROW, 2)]
    assert [row for batch in found for row in batch] == epochs(make_rows, 1)[:12]


@both
def test_no_worker_is_left(config, contract):
    """`close`, or the end of an unused iterator, ends the workers; both may happen."""
    loader = titan.build(config(num_workers=1), contract, ROW, 2)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(InterruptedError):
        next(iterator)
    iterator = iter(loader)
    next(iterator)
    del iterator
    loader.close()


@pytest.mark.parametrize("contract", ["0.3.0"])
def test_what_is_wrong_is_named(config, contract, make_rows):
    def wrong(match, **options):
        with pytest.raises((TypeError, ValueError), match=match):
            titan.build(config(**options), contract, ROW, 2)

    wrong(r"rows=None is not callable; pass a function that takes the row length", rows=None)
    wrong(r"dataloader.dataset='c4' is not supported: .* omit it", dataset="c4")
    wrong(r"dataloader.dataset_path='c4' is not supported: .* omit it", dataset_path="c4")
    wrong(r"seed=-1", seed=-1)
    said = (
        "returned .*; return a cseq.tokens.Rows with the requested row length, 16, and without flat"
    )
    others = (lambda _: None, lambda _: make_rows(ROW + 1), partial(make_rows, flat=True))
    for rows in others:
        wrong(said, rows=rows)


@pytest.mark.parametrize("contract", ["0.3.0"])
def test_keys_of_rows_do_not_matter(config, contract, make_rows):
    """A batch has the trainer's keys, no matter which keys the rows have."""
    rows = partial(make_rows, keys=["document_ids"])
    given = next(iter(titan.build(config(rows=rows), contract, ROW, 2)))
    plain = next(iter(titan.build(config(), contract, ROW, 2)))
    assert all(given[0][key].equal(plain[0][key]) for key in plain[0])
    assert given[1].equal(plain[1])


@pytest.mark.parametrize("contract", ["newer"])
def test_a_batch_is_whole_rows(config, contract):
    """A number of tokens that is not a multiple of a row's is refused."""
    with pytest.raises(ValueError, match=r"num_tokens_per_batch=40 is not a multiple of .*=16"):
        config().build(dp_rank=0, dp_world_size=1, max_context_length=16, num_tokens_per_batch=40)
    with pytest.raises(TypeError, match="max_context_length=None"):
        config().build(dp_rank=0, dp_world_size=1)
