"""A loop of one's own on two ranks: each has its shard, also after a resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recipes import on_two_ranks, stream

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")


def test_two_ranks(recipes: Path, folder: Path) -> None:
    """Each rank trains on its own shard, at first and after a resume."""
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    assert on_two_ranks("with_ddp", {}, folder, recipes) == ranks
    for taken, path in [(7 + 3, "checkpoints/1-3.pt"), (14, "checkpoints/1-7.pt")]:
        rest = on_two_ranks("with_ddp", {"resume": path}, folder, recipes)
        assert rest == [rank[taken:] for rank in ranks]
