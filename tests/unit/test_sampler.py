"""The sampler: each sample once over all ranks, from any position in an epoch."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ranked import batches

import cseq
from cseq.order.sampler import Sampler, warn
from cseq.order.shuffled import Sequential, Shuffled


def sampler(dset_size=100, *, shuffle=True, **options):
    """Make a sampler; only some arguments matter."""
    order = Shuffled(algorithm="fisher-yates-v1") if shuffle else Sequential()
    usual = {"batch_size": 7, "seed": 1, "drop_last": False}
    return Sampler(dset_size, order, **{**usual, **options})


def ranks(world_size, *args, **options):
    """Make the samplers of all ranks."""
    return [sampler(*args, rank=r, world_size=world_size, **options) for r in range(world_size)]


def epoch(one, number=0, consumed=0):
    """Take all batches of an epoch."""
    return [samples for samples, _ in batches(one, number, consumed)]


def dealt(all_ranks, number=0, consumed=0):
    """Take the global batches of an epoch, each with its ranks' batches in order."""
    parts = [epoch(one, number, consumed) for one in all_ranks]
    return [flat(parts_of_one) for parts_of_one in zip(*parts, strict=True)]


def flat(parts):
    """Concatenate batches."""
    return list(itertools.chain.from_iterable(parts))


def test_padding_is_the_beginning():
    """The order's beginning fills the tail, repeatedly."""
    assert dealt(ranks(3, 8, batch_size=2, shuffle=False)) == [[0, 1, 2, 3, 4, 5], [6, 7, 0]]
    assert dealt(ranks(5, 2, batch_size=4, shuffle=False)) == [[0, 1, 0, 1, 0]]


@given(
    n=st.integers(1, 300), size=st.integers(1, 40), world=st.integers(1, 6),
    consumed=st.integers(0, 300), seed=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_without_padding(n, size, world, consumed, seed):
    """Over all ranks, each sample comes once, in the order's parts; tails differ by one sample."""
    assume(consumed <= n)
    every = ranks(world, n, batch_size=size, seed=seed, pad=False)
    parts = [epoch(one, 1, consumed) for one in every]
    longest = max(map(len, parts))
    assert min(map(len, parts)) >= longest - 1
    globally = [flat(p[k] for p in parts if k < len(p)) for k in range(longest)]
    assert flat(globally) == cseq.permutation(n, seed, 1).tolist()[consumed:]
    tail = [len(p[-1]) if p and len(p) == longest else 0 for p in parts]
    assert max(tail) - min(tail) <= 1
    for one, part in zip(every, parts, strict=True):
        assert one.end(consumed) == n
        cut = one.cut_at(consumed)
        starts = [cut.start + k * cut.stride for k in range(cut.full)] + [cut.part_start] * (
            cut.part > 0
        )
        assert [cseq.permutation(n, seed, 1)[s] for s in starts] == [b[0] for b in part]
    left_out = [epoch(one) for one in ranks(world, n, batch_size=size, drop_last=True, pad=False)]
    assert left_out == [epoch(one) for one in ranks(world, n, batch_size=size, drop_last=True)]


def test_an_epoch_without_batches_is_said(caplog):
    """If drop_last omits everything, the log says so once, with the remedy."""
    warn.cache_clear()
    sampler(8, batch_size=4, drop_last=True, world_size=2)
    sampler(7, batch_size=4, world_size=2)
    assert not caplog.messages
    for _ in range(2):
        sampler(7, batch_size=4, drop_last=True, world_size=2)
    (message,) = caplog.messages
    assert message == (
        "an epoch has no batches: drop_last=True leaves out all 7 samples, because a global batch "
        "has 8; pass a smaller batch_size, or drop_last=False"
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, ">i2"])
@pytest.mark.parametrize("world", [1, 2])
def test_indices(dtype, world):
    """Given indices replace 0 … n-1, as int64, even in the padding."""
    given_ = np.arange(100, 75, -1).astype(dtype)
    plain = dealt(ranks(world, len(given_)))
    assert dealt(ranks(world, given_)) == [given_[batch].tolist() for batch in plain]
    assert sampler(given_).source(0).samples(0)[0].dtype == np.int64


def test_array_is_not_copied_and_not_written():
    """A terabyte of indices is not copied, and the array may be read-only."""
    array = np.broadcast_to(np.int64(3), (2**37,))
    one = sampler(array, shuffle=False)
    assert one.source(0).samples(10**9)[0].tolist() == [3] * 7
    own = np.arange(5)
    epoch(sampler(own))
    assert own.flags.writeable
    assert own.tolist() == [0, 1, 2, 3, 4]


class Endless:
    """A data set whose __getitem__ never raises IndexError: numpy would read it forever."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.ones(3) * index


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        (Endless(), r"dset_size is a Endless; pass its length"),
        ([Endless()], "dset_size is a list"), ({1, 2}, "dset_size is a set; pass"),
        ({1: 2}, "dset_size is a dict; pass"),
        ((k for k in range(3)), "dset_size is a generator.*fromiter"),
        (iter([1, 2]), "dset_size is a list_iterator"),
    ],
)  # fmt: skip
def test_a_data_set_as_dset_size(given_, text):
    """A data set, or an object without a length, raises a TypeError at once with the remedy."""
    with pytest.raises(TypeError, match=text):
        sampler(given_)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("number", "consumed", "error"),
    [(-1, 0, ValueError), (2**64, 0, ValueError), (True, 0, TypeError), (0, -1, ValueError),
     (0, 11, ValueError), (0, 1.0, TypeError)],
)  # fmt: skip
def test_epoch_out_of_range(number, consumed, error, shuffle):
    """An invalid epoch, or number of consumed samples, is an error."""
    with pytest.raises(error, match=r"epoch|consumed"):
        sampler(10, shuffle=shuffle).source(number, consumed)


@pytest.mark.parametrize(("number", "error"), [(-1, OverflowError), (15, IndexError)])
def test_no_such_batch(number, error):
    """A batch that an epoch lacks is an error."""
    with pytest.raises(error):
        sampler(100).source(0).samples(number)
