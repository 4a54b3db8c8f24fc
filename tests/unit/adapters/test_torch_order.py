"""Which samplers may be asked before workers are forked."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

from cseq.adapters.torch.order import leaves_no_trace  # noqa: E402


class Own(data.Sampler[int]):
    """A sampler of the user's."""

    def __iter__(self) -> Any:
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
def test_keys_that_may_be_drawn_before_a_fork(sampler: Any, expected: bool, batched: bool) -> None:
    index_sampler = data.BatchSampler(sampler, 2, drop_last=False) if batched else sampler
    assert leaves_no_trace(index_sampler) is expected
