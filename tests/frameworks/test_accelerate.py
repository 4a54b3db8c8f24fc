"""accelerate saves and loads cseq's state with its own, in mid-epoch, between epochs, on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recipes import LENGTH, on_two_ranks, recorded, stream

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("accelerate")


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2."""
    import with_accelerate

    assert recorded(monkeypatch, with_accelerate.train) == stream(0, 1, 2)


@pytest.mark.parametrize(
    ("taken", "path"),
    [(10, "checkpoints/0-10"), (LENGTH + 5, "checkpoints/1-5"), (LENGTH, "checkpoints/0-end")],
)
def test_a_resume_gives_the_rest(monkeypatch: pytest.MonkeyPatch, taken: int, path: str) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    import with_accelerate

    first = recorded(monkeypatch, with_accelerate.train, stop_after=taken + 2)
    assert first == stream(0, 1, 2)[: taken + 2]
    rest = recorded(monkeypatch, with_accelerate.train, resume=path)
    assert rest == stream(0, 1, 2)[taken:]


def test_two_ranks(recipes: Path, folder: Path) -> None:
    """Each rank trains on its own shard, at first and after a resume."""
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    assert on_two_ranks("with_accelerate", {}, folder, recipes) == ranks
    for taken, path in [(7 + 5, "checkpoints/1-5"), (14, "checkpoints/1-end")]:
        rest = on_two_ranks("with_accelerate", {"resume": path}, folder, recipes)
        assert rest == [rank[taken:] for rank in ranks]
