"""What a `collate_fn` may return: what torch's loader sends to the loop, ours sends, too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain, as_is  # noqa: E402

import cseq  # noqa: E402

pytestmark = [
    pytest.mark.needs("fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on few processors
]

FORK: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
KINDS = [data.DataLoader, cseq.DataLoader]


def only(kind: Any, batch: Any, **options: Any) -> Any:
    """Return the batch that a collate function has made, as the loop gets it."""
    return next(iter(kind(Plain(2), collate_fn=lambda _: batch, **(FORK | options))))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors(kind: Any) -> None:
    parts = [torch.ones(2), torch.arange(3.0)]
    got = only(kind, {"x": torch.nested.nested_tensor(parts), "y": torch.ones(2)})
    assert got["x"].is_nested
    assert all(map(torch.equal, got["x"].unbind(), parts))


@pytest.mark.parametrize("kind", KINDS)
def test_storages(kind: Any) -> None:
    got = only(kind, [torch.arange(3).untyped_storage(), 7])
    assert type(got[0]) is torch.UntypedStorage
    assert got[0].tolist() == torch.arange(3).untyped_storage().tolist()
    assert got[1] == 7


def test_views_that_are_conjugated_or_negated() -> None:
    """Their values arrive; torch's loader drops what they are views by, and so other values."""
    numbers = torch.complex(torch.arange(3.0), torch.ones(3))
    got = only(cseq.DataLoader, [numbers.conj(), numbers.conj().imag])
    assert torch.equal(got[0], torch.complex(torch.arange(3.0), -torch.ones(3)))
    assert torch.equal(got[1], -torch.ones(3))
    theirs = only(data.DataLoader, [numbers.conj(), numbers.conj().imag])
    assert torch.equal(theirs[0], numbers)
    assert torch.equal(theirs[1], torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_contains_itself(kind: Any) -> None:
    batch: dict[str, Any] = {"x": torch.arange(3)}
    batch["parts"] = [batch, batch["x"]]
    got = only(kind, batch)
    assert got["parts"][0] is got
    assert torch.equal(got["x"], batch["x"])
    assert torch.equal(got["parts"][1], batch["x"])


class Trees(data.Dataset[Any]):
    """Trees of 150 levels."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        tree: Any = torch.tensor(index)
        for level in range(150):
            tree = [level, tree]
        return tree


def flat(tree: Any) -> list[Any]:
    """Return the levels of a tree, and what is at its end."""
    levels = []
    while isinstance(tree, list):
        levels.append(tree[0])
        tree = tree[1]
    return [*levels, tree.item()]


@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind: Any) -> None:
    loader = kind(Trees(), batch_size=2, collate_fn=as_is, **FORK)
    got = [[flat(tree) for tree in batch] for batch in loader]
    levels = list(reversed(range(150)))
    assert got == [[[*levels, 0], [*levels, 1]], [[*levels, 2], [*levels, 3]]]
