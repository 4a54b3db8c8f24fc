"""The sampler: each sample once over all ranks, from any point of an epoch on."""

from __future__ import annotations

import gc
import itertools
import weakref
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cseq
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential, Shuffled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cseq._core import OrderSource

sizes = st.integers(1, 300)
batch_sizes = st.integers(1, 40)
worlds = st.integers(1, 6)
seeds = st.integers(0, 2**64 - 1)


def sampler(dset_size: Any = 100, *, shuffle: bool = True, **options: Any) -> Sampler:
    """Make a sampler of which only some arguments matter."""
    order = Shuffled(algorithm="fisher-yates-v1") if shuffle else Sequential()
    usual: dict[str, Any] = {"batch_size": 7, "seed": 1, "drop_last": False}
    return Sampler(dset_size, order, **{**usual, **options})


def ranks(world_size: int, *args: Any, **options: Any) -> list[Sampler]:
    """Make the samplers of all ranks."""
    return [sampler(*args, rank=r, world_size=world_size, **options) for r in range(world_size)]


def batch(source: OrderSource, number: int) -> list[int]:
    """Return the samples of a batch."""
    return source.samples(number)[0].tolist()


def epoch(one: Sampler, number: int = 0, consumed: int = 0) -> list[list[int]]:
    """Take all batches of an epoch."""
    source = one.source(number, consumed)
    return [batch(source, k) for k in range(len(source))]


def position(one: Sampler, batches: int, consumed: int = 0) -> int:
    """Return what all ranks together have had before a batch."""
    return min(consumed + batches * one.batch_size * one.world_size, one.dset_size)


def dealt(all_ranks: list[Sampler], number: int = 0, consumed: int = 0) -> list[list[int]]:
    """Take the global batches of an epoch: those of the ranks, one after the other."""
    parts = [epoch(one, number, consumed) for one in all_ranks]
    return [flat(parts_of_one) for parts_of_one in zip(*parts, strict=True)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    """Put batches one after the other."""
    return list(itertools.chain.from_iterable(batches))


# ── one rank ──────────────────────────────────────────────────────────────────────────────────


@given(n=sizes, size=batch_sizes, seed=seeds, number=seeds)
def test_one_rank_has_the_permutation(n: int, size: int, seed: int, number: int) -> None:
    """One rank's batches are the permutation of (seed, epoch), cut every `batch_size` samples."""
    batches = epoch(sampler(n, batch_size=size, seed=seed), number)
    whole = cseq.permutation(n, seed, number).tolist()
    assert batches == [whole[k : k + size] for k in range(0, n, size)]


def test_without_shuffle() -> None:
    """Without shuffle, every epoch is in the natural order."""
    one = sampler(8, batch_size=3, shuffle=False)
    assert epoch(one, 0) == epoch(one, 1) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_epochs_can_be_taken_in_any_order() -> None:
    """An epoch is the same whatever epoch came before, and wherever that was left."""
    one, whole = sampler(50), [epoch(sampler(50), number) for number in range(4)]
    for number in (3, 1, 1, 0, 2):
        batch(one.source(number), 2)
        assert epoch(one, number) == whole[number]


def test_epochs_can_be_taken_at_the_same_time() -> None:
    """Two epochs whose batches are taken in turn are what they are alone."""
    one = sampler(50)
    first, second = one.source(0), one.source(1)
    taken = [(batch(first, k), batch(second, k)) for k in range(len(first))]
    assert taken == list(zip(epoch(sampler(50), 0), epoch(sampler(50), 1), strict=True))


def test_batches_can_be_taken_in_any_order() -> None:
    """A batch is the same whatever batches were asked for before, and each time."""
    one, whole = sampler(50), epoch(sampler(50))
    source = one.source(0)
    for number in (6, 0, 6, 3, 7, 1, 7):
        assert batch(source, number) == whole[number]


@given(n=sizes, size=batch_sizes, world=worlds, drop_last=st.booleans(), data=st.data())
def test_sizes_are_known_beforehand(
    n: int, size: int, world: int, drop_last: bool, data: st.DataObject
) -> None:
    """`length`, `units` and the cut say what will come."""
    rank = data.draw(st.integers(0, world - 1))
    one = sampler(n, batch_size=size, rank=rank, world_size=world, drop_last=drop_last)
    cut = one.cut_at(0)
    said = [cut.size] * cut.full + [cut.part] * (cut.part > 0)
    assert one.length == cut.batches == len(one.source(0)) == len(said)
    assert [len(each) for each in epoch(one)] == said
    assert one.units == sum(said)


def test_results_are_fresh() -> None:
    """A batch of indices is the caller's own: int64, and writing to it changes no other."""
    source = sampler(100).source(0)
    for number in (0, 14):
        first, sizes = source.samples(number)
        before = first.tolist()
        assert first.dtype == sizes.dtype == np.int64
        assert sizes.tolist() == [1] * len(first)
        first[:] = -1
        assert batch(source, number) == before


def test_a_reader_of_its_own() -> None:
    """Batches can be looked at beside the run that takes them."""
    one = sampler(100)
    assert one.source(0).reader is one.source(1).reader
    assert one.source(0, own=True).reader is not one.source(0).reader
    assert batch(one.source(0, own=True), 3) == batch(one.source(0), 3)


# ── many ranks ────────────────────────────────────────────────────────────────────────────────


@given(n=sizes, size=batch_sizes, world=worlds, seed=seeds, number=st.integers(0, 5))
def test_every_sample_once(n: int, size: int, world: int, seed: int, number: int) -> None:
    """Over all ranks each sample comes once, but for fewer than `world_size` that pad the tail.

    Those are the first ones of the epoch, and there are none if all ranks' parts are full.
    """
    samples = flat(dealt(ranks(world, n, batch_size=size, seed=seed), number))
    order = cseq.permutation(n, seed, number).tolist()
    padding = -n % (size * world) % world
    assert samples[:n] == order
    assert samples[n:] == [order[k % n] for k in range(padding)]
    assert padding < world


@given(n=sizes, size=batch_sizes, world=worlds, drop_last=st.booleans(), consumed=sizes)
def test_ranks_are_equal(n: int, size: int, world: int, drop_last: bool, consumed: int) -> None:
    """All ranks have batches of the same number and sizes, and the same end."""
    consumed = min(consumed, n)
    plans = set()
    for one in ranks(world, n, batch_size=size, drop_last=drop_last):
        sizes = tuple(len(each) for each in epoch(one, 0, consumed))
        plans.add((sizes, one.end(consumed)))
    assert len(plans) == 1


@given(n=sizes, size=batch_sizes, world=worlds, seed=seeds)
def test_drop_last(n: int, size: int, world: int, seed: int) -> None:
    """With `drop_last` every batch is full, and less than a global batch is left out."""
    batches = dealt(ranks(world, n, batch_size=size, seed=seed, drop_last=True))
    samples = flat(batches)
    assert all(len(batch) == size * world for batch in batches)
    assert samples == cseq.permutation(n, seed).tolist()[: len(samples)]
    assert 0 <= n - len(samples) < size * world


@given(n=sizes, share=st.integers(1, 5), seed=seeds, drop_last=st.booleans())
def test_world_size_does_not_change_global_batches(
    n: int, share: int, seed: int, drop_last: bool
) -> None:
    """For one size of the global batch, its samples are the same however many ranks there are."""
    options: dict[str, Any] = {"seed": seed, "drop_last": drop_last}
    alone = dealt(ranks(1, n, batch_size=12 * share, **options))
    for world in (2, 3, 4, 6, 12):
        together = dealt(ranks(world, n, batch_size=12 * share // world, **options))
        unpadded = [batch[: len(one)] for batch, one in zip(together, alone, strict=True)]
        assert unpadded == alone


def test_ranks_have_contiguous_parts() -> None:
    """The drawing in the module's documentation, batch by batch."""
    first, second = ranks(2, 20, batch_size=3, shuffle=False)
    assert epoch(first) == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18]]
    assert epoch(second) == [[3, 4, 5], [9, 10, 11], [15, 16, 17], [19]]


def test_padding_is_the_beginning() -> None:
    """What is missing in the tail is taken from the beginning of the order, again and again."""
    assert dealt(ranks(3, 8, batch_size=2, shuffle=False)) == [[0, 1, 2, 3, 4, 5], [6, 7, 0]]
    assert dealt(ranks(5, 2, batch_size=4, shuffle=False)) == [[0, 1, 0, 1, 0]]


@given(n=sizes, size=batch_sizes, world=worlds, consumed=st.integers(0, 300), seed=seeds)
def test_without_padding(n: int, size: int, world: int, consumed: int, seed: int) -> None:
    """Over all ranks each sample comes once, in the order's parts; tails differ by one sample."""
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


def test_fewer_samples_than_a_batch() -> None:
    """One short batch has all of them, and none is left with `drop_last`."""
    assert epoch(sampler(3, batch_size=10, shuffle=False)) == [[0, 1, 2]]
    assert epoch(sampler(3, batch_size=10, drop_last=True)) == []


# ── resume ────────────────────────────────────────────────────────────────────────────────────


@given(
    n=sizes,
    before=st.tuples(batch_sizes, worlds),
    after=st.tuples(batch_sizes, worlds),
    seed=seeds,
    data=st.data(),
)
def test_resume_has_exactly_the_rest(
    n: int, before: tuple[int, int], after: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    """An epoch goes on where it stood, with any other `batch_size` and `world_size`."""
    size, world = before
    old = ranks(world, n, batch_size=size, seed=seed)
    batches = dealt(old, 3)
    done = data.draw(st.integers(0, len(batches)))
    consumed = position(old[0], done)
    had = flat(batches[:done])[:consumed]
    size, world = after
    rest = flat(dealt(ranks(world, n, batch_size=size, seed=seed), 3, consumed))
    assert had + rest[: n - consumed] == cseq.permutation(n, seed, 3).tolist()
    assert len(rest) - (n - consumed) < world


@given(n=sizes, size=batch_sizes, world=worlds, done=st.integers(0, 300), seed=seeds)
def test_resume_unchanged_has_the_same_batches(
    n: int, size: int, world: int, done: int, seed: int
) -> None:
    """With the same sizes, the batches after a resume are the ones that would have come."""
    for one in ranks(world, n, batch_size=size, seed=seed):
        batches = epoch(one)
        assume(done <= len(batches))
        assert epoch(one, 0, position(one, done)) == batches[done:]


def test_resume_is_for_one_epoch() -> None:
    """The epoch after a resumed one is whole, and `length` was that of a whole one all along."""
    one = sampler(20, batch_size=6)
    assert (len(one.source(0, 13)), one.length) == (2, 4)
    assert (len(one.source(1)), one.length) == (4, 4)


@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_at_the_end(drop_last: bool) -> None:
    """An epoch of which everything was delivered has no batches left."""
    one = sampler(20, batch_size=6, drop_last=drop_last)
    assert epoch(one, 0, one.end()) == []
    assert epoch(one, 0, 20) == []


def test_end() -> None:
    """The end counts samples over all ranks, without padding and without what is left out."""
    assert sampler(20, batch_size=3, world_size=2).end(11) == 20
    one = sampler(20, batch_size=3, world_size=2, drop_last=True)
    assert (one.end(), one.end(11)) == (18, 17)


# ── samples that are given ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, ">i2"])
@pytest.mark.parametrize("world", [1, 2])
def test_indices(dtype: Any, world: int) -> None:
    """Given indices take the place of 0 … n-1, as int64, also in the padding."""
    given_ = np.arange(100, 75, -1).astype(dtype)
    batches = dealt(ranks(world, given_))
    plain = dealt(ranks(world, len(given_)))
    assert batches == [given_[batch].tolist() for batch in plain]
    assert sampler(given_).source(0).samples(0)[0].dtype == np.int64


@pytest.mark.parametrize("given_", [[5, 3, 9], (5, 3, 9), range(3, 10, 3), [np.int8(4)]])
def test_indices_in_a_list(given_: Any) -> None:
    """Sequences of integers are taken like arrays."""
    assert epoch(sampler(given_, shuffle=False)) == [[int(index) for index in given_]]
    assert sampler(given_).dset_size == len(given_)


def test_indices_may_repeat_and_be_negative() -> None:
    """Indices mean something to the indexer alone: any will do."""
    assert epoch(sampler([-1, 7, 7, 10**15], shuffle=False)) == [[-1, 7, 7, 10**15]]


def test_array_is_not_copied_and_not_written() -> None:
    """An array of a terabyte of indices is not copied, and one that is read-only will do."""
    array = np.broadcast_to(np.int64(3), (2**37,))
    one = sampler(array, shuffle=False)
    assert batch(one.source(0), 10**9) == [3] * 7
    own = np.arange(5)
    epoch(sampler(own))
    assert own.flags.writeable
    assert own.tolist() == [0, 1, 2, 3, 4]


def test_array_is_let_go() -> None:
    """The array goes with the sampler."""
    array = np.arange(5)
    one = sampler(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is not None
    del one
    gc.collect()
    assert gone() is None


# ── the shard ─────────────────────────────────────────────────────────────────────────────────


# ── what is refused ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "given_",
    [
        True,
        1.5,
        "abc",
        b"abc",
        None,
        ...,
        [1.5],
        np.array([True]),
        np.array([1.0]),
        np.array(["1"]),
        np.array([1j]),
        [2**64],
        [[1], [2, 3]],
        np.array([1], "m8[s]"),
    ],
    ids=repr,
)
def test_dset_size_of_another_type(given_: Any) -> None:
    """A dset_size that is neither an integer nor integers is a TypeError that names it."""
    with pytest.raises(TypeError, match="dset_size"):
        sampler(given_)


class Endless:
    """A data set whose __getitem__ never raises IndexError: numpy would read it for ever."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return np.ones(3) * index


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        (Endless(), r"dset_size is a Endless; give len\(\.\.\.\) of it"),
        ([Endless()], "dset_size is a list"),
        ({1, 2}, "dset_size is a set; give"),
        ({1: 2}, "dset_size is a dict; give"),
        ((k for k in range(3)), "dset_size is a generator.*fromiter"),
        (iter([1, 2]), "dset_size is a list_iterator"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_data_set_as_dset_size(given_: Any, text: str) -> None:
    """A data set, or what has no length: a TypeError at once that says what to give."""
    with pytest.raises(TypeError, match=text):
        sampler(given_)


def test_arrays_of_other_libraries_as_dset_size() -> None:
    """What numpy can read as an array is one: buffers, and objects with __array__."""
    for indices in (array("q", [3, 1]), memoryview(array("i", [3, 1])), [np.int32(3), np.array(1)]):
        assert sampler(indices).dset_size == 2
    torch = pytest.importorskip("torch")
    assert sampler(torch.tensor([3, 1])).dset_size == 2
    assert sampler(list(torch.tensor([3, 1]))).dset_size == 2


@pytest.mark.parametrize(
    "given_",
    [
        0,
        -3,
        np.int64(-1),
        2**48 + 1,
        [],
        (),
        np.array([], np.int64),
        [[1, 2]],
        np.array(5),
        np.array([2**63], np.uint64),
    ],
    ids=repr,
)
def test_dset_size_out_of_range(given_: Any) -> None:
    """None or too many samples, indices not in one dimension or too large: a ValueError."""
    with pytest.raises(ValueError, match="dset_size"):
        sampler(given_)


@pytest.mark.parametrize("argument", ["batch_size", "seed", "rank", "world_size"])
@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_arguments_of_another_type(argument: str, value: Any) -> None:
    """What is no integer is a TypeError that names the argument."""
    with pytest.raises(TypeError, match=argument):
        sampler(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("rank", -1),
        ("rank", 1),
        ("world_size", 0),
    ],
)
def test_arguments_out_of_range(argument: str, value: int) -> None:
    """A number out of range is a ValueError that names the argument and the number."""
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        sampler(**{argument: value})


@pytest.mark.parametrize("shuffle", [True, False])
def test_epoch_out_of_range(shuffle: bool) -> None:
    """So are an epoch and a number of consumed samples that cannot be."""
    one = sampler(10, shuffle=shuffle)
    for number, consumed, error in (
        (-1, 0, ValueError),
        (2**64, 0, ValueError),
        (True, 0, TypeError),
        (0, -1, ValueError),
        (0, 11, ValueError),
        (0, 1.0, TypeError),
    ):
        with pytest.raises(error, match=r"epoch|consumed"):
            one.source(number, consumed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "error"), [(-1, OverflowError), (15, IndexError)])
def test_no_such_batch(number: int, error: type[Exception]) -> None:
    """A batch that an epoch does not have is an error."""
    with pytest.raises(error):
        sampler(100).source(0).samples(number)
