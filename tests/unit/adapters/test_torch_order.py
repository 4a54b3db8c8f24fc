"""The keys of torch's own samplers, and which samplers may draw before workers are forked."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

from cseq.adapters.torch.order import Layers, drawn_keys  # noqa: E402


class Own(data.Sampler[int]):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (data.SequentialSampler(range(9)), False),
        (data.RandomSampler(range(9)), True),
        (data.RandomSampler(range(9), generator=torch.Generator()), False),
        (data.DistributedSampler(Plain(9), num_replicas=2, rank=0), True),
        (Own(), False),
        (range(9), False),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("batched", [True, False])
def test_keys_that_may_be_drawn_before_a_fork(sampler, expected, batched):
    index_sampler = data.BatchSampler(sampler, 2, drop_last=False) if batched else sampler
    assert Layers(index_sampler).leaves_no_trace is expected


def drawn(keys, generator):
    """Return the keys, and torch's generator states after each key and at the end."""
    sources = [torch.default_generator, *([generator] if generator else [])]
    found = []
    while True:
        key = next(keys, None)
        found.append((key, [source.get_state().numpy().tobytes() for source in sources]))
        if key is None:
            return found


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("n", "size"), [(1, 1), (1, 30), (90, 30), (91, 30), (91, 1), (3000, 30), (5000, 3000)]
)
@pytest.mark.parametrize("kind", ["None", "n", "n // 2 or 1", "2 * n + 1", "subset"])
def test_slices_of_a_permutation_are_torchs_keys(kind, n, size, drop_last, own):
    def keys(*, slices, skip=0):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(5) if own else None
        if kind == "subset":
            sampler = data.SubsetRandomSampler([*map(str, range(n))], generator=generator)
        else:
            count = eval(kind, {"n": n})
            sampler = data.RandomSampler(range(n), num_samples=count, generator=generator)
        batches = data.BatchSampler(sampler, size, drop_last)
        return drawn(drawn_keys(Layers(batches), skip) if slices else iter(batches), generator)

    expected = keys(slices=False)
    assert keys(slices=True) == expected
    for skip in (len(expected) // 2, len(expected) - 1):
        assert keys(slices=True, skip=skip) == expected[skip:]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("n", [1, 6, 7, 3001])
def test_slices_are_a_ranks_keys(n, ranks, short, shuffle):
    """The keys are padded or cut like torch's, in the epoch that was set."""
    for rank in {0, ranks // 2, ranks - 1}:
        sampler = data.DistributedSampler(
            Plain(n), ranks, rank, seed=3, drop_last=short, shuffle=shuffle
        )
        batches = data.BatchSampler(sampler, 5, drop_last=False)
        for epoch in (0, 9):
            sampler.set_epoch(epoch)
            expected = [*batches]
            assert [*drawn_keys(Layers(batches))] == expected
            assert [*drawn_keys(Layers(batches), 3)] == expected[3:]


@pytest.mark.parametrize(("length", "short"), [(9, False), (7, True)])
def test_a_data_set_whose_length_has_changed_is_torchs_to_refuse(length, short):
    dataset = [*range(8)]
    sampler = data.DistributedSampler(dataset, 2, 0, drop_last=short)
    dataset[:] = range(length)
    with pytest.raises(AssertionError, match="does not match total_size"):
        next(drawn_keys(Layers(data.BatchSampler(sampler, 2, drop_last=False))))
