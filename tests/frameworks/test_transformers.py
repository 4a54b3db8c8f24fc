"""The Trainer trains on cseq's batches: its epochs, its resumes, its evaluation, its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recipes import LENGTH, Record, on_two_ranks, record_torch, recorded, stream

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2, with an evaluation after each."""
    import with_transformers

    record, held_out = Record(), Record()
    with monkeypatch.context() as patch:
        record_torch(patch, record, held_out)
        with_transformers.train(eval_strategy="epoch", save_strategy="no")
    assert record == stream(0, 1, 2)
    assert held_out == stream(0, shuffle=False) * 3


@pytest.mark.parametrize("options", [{}, {"restore_callback_states_from_checkpoint": True}])
@pytest.mark.parametrize("taken", [5, 20, LENGTH])
def test_a_resume_gives_the_rest(
    monkeypatch: pytest.MonkeyPatch, taken: int, options: dict[str, object]
) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    import with_transformers

    save = {"save_steps": taken} if taken % LENGTH else {"save_strategy": "epoch"}
    options = {**save, **options}
    first = recorded(monkeypatch, with_transformers.train, stop_after=taken + 2, **options)
    assert first == stream(0, 1, 2)[: taken + 2]
    path = f"checkpoints/checkpoint-{taken}"
    rest = recorded(monkeypatch, with_transformers.train, resume=path, **options)
    assert rest == stream(0, 1, 2)[taken:]


def test_accumulated_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches read ahead for a step with several are not lost by a resume between steps."""
    import with_transformers

    options = {"gradient_accumulation_steps": 4, "save_steps": 2}
    assert recorded(monkeypatch, with_transformers.train, **options) == stream(0, 1, 2)
    path = "checkpoints/checkpoint-2"
    rest = recorded(monkeypatch, with_transformers.train, resume=path, **options)
    assert rest == stream(0, 1, 2)[8:]


def test_two_ranks(recipes: Path, folder: Path) -> None:
    """Each rank trains on its own shard, at first and after a resume."""
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    arguments = {"save_steps": 1}
    assert on_two_ranks("with_transformers", arguments, folder, recipes) == ranks
    for taken in (9, 14):  # in mid-epoch, and after two epochs of seven batches each
        arguments["resume"] = f"checkpoints/checkpoint-{taken}"
        rest = on_two_ranks("with_transformers", arguments, folder, recipes)
        assert rest == [rank[taken:] for rank in ranks]
