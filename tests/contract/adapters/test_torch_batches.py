"""Orders of cseq in a DataLoader: batches, epochs, ranks and states."""

import copy
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from torch_data import Sharded  # noqa: E402

import cseq  # noqa: E402 - after the check for torch
from cseq.adapters.torch import BatchSampler, DataLoader  # noqa: E402


class Pairs(cseq.Order):
    name = "pairs-v1"
    room = 2
    is_batch = True

    def __init__(self, samples):
        self.samples = samples
        self.units = samples // 2

    def read(self, seed, epoch, start, count):
        order = cseq.permutation(self.samples, seed, epoch)[2 * start : 2 * (start + count)]
        return order, [2] * count


def batches(loader):
    return [batch.tolist() for batch in loader]


def expected(order, size, seed, epoch):
    """Return the expected batches of an epoch."""
    return order.batches(size, seed=seed, epoch=epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_epochs(workers):
    """Each `iter` begins the next epoch, with the order's batches."""
    data, order = list(range(11)), Pairs(11)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(data, batch_sampler=order, num_workers=workers, generator=generator)
    assert len(loader) == 5
    for epoch in range(3):
        assert batches(loader) == expected(order, 1, 7, epoch)
    next(iter(loader))
    assert batches(loader) == expected(order, 1, 7, 4)
    loader.batch_sampler.set_epoch(1)
    assert batches(loader) == expected(order, 1, 7, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_of_samples(workers):
    """batch_size, positional or by keyword, cuts the order into batches."""
    data = list(range(11))
    torch.manual_seed(5)
    loader = DataLoader(data, 4, None, cseq.Shuffled(), num_workers=workers)
    order = cseq.Shuffled(11)
    assert [batches(loader) for _ in range(2)] == [expected(order, 4, 5, e) for e in range(2)]
    short = DataLoader(data, 4, sampler=cseq.Sequential(), drop_last=True)
    assert batches(short) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("given", [3, None])
def test_a_resume_after_every_batch(workers, persistent, given):
    """The state may come from an epoch's middle or end; its seed may have been drawn."""
    order = Pairs(11) if given else cseq.Shuffled(11)

    def make(drawn):
        torch.manual_seed(drawn)
        options = {"num_workers": workers, "persistent_workers": persistent}
        sampler = BatchSampler(order, 1 if given else 3, seed=given)
        return DataLoader(list(range(11)), batch_sampler=sampler, **options)

    loader = make(3)
    whole = [expected(order, 1 if given else 3, 3, epoch) for epoch in range(3)]
    # A seed is drawn when the first epoch begins.
    states = [(0, 0, copy.deepcopy(loader.state_dict()))] if given else []
    for epoch in range(2):
        got = []
        for batch in loader:
            got.append(batch.tolist())
            states.append((epoch, len(got), copy.deepcopy(loader.state_dict())))
        assert got == whole[epoch]
    for epoch, done, state in states:
        other = make(4)
        other.load_state_dict(state)
        assert batches(other) == whole[epoch][done:]
        assert batches(other) == whole[epoch + 1]


def test_a_state_before_the_first_epoch_is_of_the_seed_that_is_drawn():
    """The sampler that wrote the state can therefore load it."""
    torch.manual_seed(6)
    one = BatchSampler(Pairs(12))
    state = one.state_dict()
    assert state["seed"] == 6
    one.load_state_dict(state)
    assert list(one) == expected(Pairs(12), 1, 6, 0)


def test_an_epoch_that_is_set_while_another_one_goes_on():
    """The state describes the current epoch; the next epoch is the one that was set."""
    sampler = BatchSampler(Pairs(8), seed=3)
    epochs = [expected(Pairs(8), 1, 3, e) for e in range(7)]
    iterator = iter(sampler)
    got = [next(iterator)]
    sampler.set_epoch(5)
    again = BatchSampler(Pairs(8), seed=3)
    again.load_state_dict(sampler.state_dict())
    # A loop that sets each epoch sets the state's.
    again.set_epoch(0)
    assert got + list(again) == got + list(iterator) == epochs[0]
    assert list(sampler) == epochs[5]
    begun = iter(sampler)
    sampler.set_epoch(2)
    assert [list(begun), list(sampler), list(sampler)] == [epochs[6], epochs[2], epochs[3]]
    with pytest.raises(ValueError, match="epoch=-1 is below 0"):
        sampler.set_epoch(-1)


def test_ranks_that_shuffle_need_a_seed():
    """Without a given seed, each rank would draw its own."""
    with pytest.raises(ValueError, match=r"rank 1 of 2 .* needs a seed"):
        iter(BatchSampler(cseq.Shuffled(8), 2, shard=(1, 2)))
    assert list(BatchSampler(cseq.Sequential(4), 1, shard=(1, 2))) == [[1], [3]]


def test_ranks_have_parts_of_global_batches():
    order = Pairs(12)
    parts = [list(BatchSampler(order, seed=2, shard=(rank, 2))) for rank in range(2)]
    assert [b for pair in zip(*parts, strict=True) for b in pair] == expected(order, 1, 2, 0)
    lengths = [len(BatchSampler(order, seed=2, shard=(r, 4), pad=False)) for r in range(4)]
    assert lengths == [2, 2, 1, 1]


def test_what_frameworks_ask_of_a_batch_sampler():
    """If the size of batches varies, it is None, as in accelerate."""
    order = BatchSampler(cseq.Shuffled(9), 4, seed=1, drop_last=True)
    assert (order.batch_size, order.drop_last) == (4, True)
    assert (BatchSampler(Pairs(9)).batch_size, BatchSampler(Pairs(9)).drop_last) == (None, False)


class BatchSamplerShard:
    """Every second batch, as accelerate divides batches between two ranks."""

    num_processes, split_batches = 2, False

    def __init__(self, batches, rank):
        self.batch_sampler, self.process_index = batches, rank

    def __iter__(self):
        every = iter(self.batch_sampler)
        for pair in zip(every, every, strict=True):
            yield pair[self.process_index]

    def __len__(self):
        return len(self.batch_sampler) // 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_of_batches_that_accelerate_divides(monkeypatch, rank):
    """The state has the order's seed and epoch, so the rest and the next epoch are the same."""
    shards = types.SimpleNamespace(BatchSamplerShard=BatchSamplerShard)
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", shards)

    def make(seed):
        torch.manual_seed(seed)
        shard = BatchSamplerShard(BatchSampler(cseq.Shuffled(12), 2), rank)
        return DataLoader(list(range(12)), batch_sampler=shard)

    loader, states, got = make(3), [], []
    for _ in range(2):
        for batch in loader:
            got.append(batch.tolist())
            states.append(loader.state_dict())
    assert got == [b for e in range(2) for b in expected(cseq.Shuffled(12), 2, 3, e)[rank::2]]
    for number, state in enumerate(states[:5], 1):
        other = make(4)
        other.load_state_dict(copy.deepcopy(state))
        left = batches(other) + batches(other)
        assert got[number:] == left[: 6 - number]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", [cseq.Shuffled(11), None])
def test_a_state_from_which_accelerate_takes_batches_back(order, workers):
    """It lowers the counts by the batches that it holds back; these come again, even at the end."""

    def make():
        generator = torch.Generator().manual_seed(3)
        options = {"sampler": order, "generator": generator, "num_workers": workers}
        return DataLoader(list(range(11)), 2, **options)

    whole, done, loader = expected(order or cseq.Sequential(11), 2, 3, 0), 0, make()
    for taken in (2, 1, 3, 3):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(taken)] == whole[done : done + taken]
        done += taken - 1
        state = loader.state_dict()
        state["_num_yielded"] -= 1
        state["_sampler_iter_yielded"] -= 1
        loader = make()
        loader.load_state_dict(state)
    assert batches(loader) == whole[done:] == [whole[-1]]


def test_a_state_of_another_order():
    """The error names both orders; the state's seed replaces one that was not given."""
    state = BatchSampler(Pairs(12), seed=2).state_dict()
    with pytest.raises(ValueError, match=r"samples=12.*samples=10"):
        BatchSampler(Pairs(10), seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=2, but the current seed is 3"):
        BatchSampler(Pairs(12), seed=3).load_state_dict(state)
    one = BatchSampler(Pairs(12))
    one.load_state_dict(state)
    assert list(one) == expected(Pairs(12), 1, 2, 0)
    # A loader has the same text, which does not mention managers.
    samplers = [BatchSampler(Pairs(12), seed=seed) for seed in (2, 3)]
    saved, other = (DataLoader(list(range(12)), batch_sampler=each) for each in samplers)
    next(iter(saved))
    with pytest.raises(ValueError, match=r"^the state was saved with seed=2, but .* is 3; pass"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_sampler": cseq.Shuffled(9)}, "yields single samples; pass it as sampler="),
        ({"sampler": Pairs(9)}, "makes whole batches; pass it as batch_sampler="),
        ({"sampler": cseq.Shuffled(), "shuffle": True}, "shuffle=True cannot be .* sampler="),
        ({"sampler": cseq.Shuffled(), "batch_sampler": [[0]]}, r"batch_sampler=\[\[0\]\] cannot"),
        ({"batch_sampler": Pairs(9), "sampler": [0]}, r"sampler=\[0\] .* with batch_sampler="),
        ({"sampler": cseq.Shuffled(), "batch_size": None}, "batch_size=None cannot"),
        ({"sampler": cseq.Shuffled(8)}, "covers 8 samples, but the data has 9"),
        ({"batch_sampler": Pairs(9), "batch_size": 4}, "mutually exclusive"),
    ],
)
def test_what_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DataLoader(list(range(9)), **options)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_an_order_of_no_data_set(name):
    """The error names what is missing, even for a data set without indices."""
    options = {name: cseq.Sequential(4)}
    with pytest.raises(TypeError, match=f"{name}=.* is an order, .* dataset= is missing"):
        DataLoader(**options)
    with pytest.raises(TypeError, match=f"{name}=.* but dataset= is .*, an IterableDataset"):
        DataLoader(Sharded(4), **options)


def test_what_a_batch_sampler_refuses():
    with pytest.raises(TypeError, match=r"order=\[1\] is not a cseq.Order"):
        BatchSampler([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="created without a number of samples"):
        BatchSampler(cseq.Shuffled())
    with pytest.raises(ValueError, match=r"batch_size=4 .* order=.*, whose units are batches"):
        BatchSampler(cseq.Buckets([2, 3, 4], 8), 4)
