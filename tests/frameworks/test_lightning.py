"""Lightning trains on cseq's batches: its epochs, its resumes, its validation, its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recipes import BATCH, EPOCHS, LENGTH, Interrupted, Record, record_torch, run, stream

pytest.importorskip("lightning")

HERE = Path(__file__).parent


def fit(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None, **options: Any) -> Any:
    """Run the recipe; return what it trained with and what it held out."""
    import with_lightning

    record, held_out = Record(stop_after), Record()
    with monkeypatch.context() as patch:
        record_torch(patch, record, held_out)
        options = {"logger": False, "enable_progress_bar": False, **options}
        if stop_after is None:
            with_lightning.train(**options)
        else:
            with pytest.raises(Interrupted):
                with_lightning.train(**options)
    return record, held_out


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2; a look (two batches) and three epochs are held out."""
    record, held_out = fit(monkeypatch)
    order = stream(0, shuffle=False)
    assert record == stream(0, 1, 2)
    assert held_out == order[:2] + order * 3


@pytest.mark.parametrize("taken", [5, 15, LENGTH, 2 * LENGTH])
def test_a_resume_gives_the_rest(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Interrupted after a checkpoint in mid-epoch or with an epoch's last batch, it goes on."""
    every = taken if taken % LENGTH == 0 else 5
    first, _ = fit(monkeypatch, stop_after=taken + 2, every=every)
    assert first == stream(0, 1, 2)[: taken + 2]
    rest, _ = fit(monkeypatch, ckpt_path=f"checkpoints/step={taken}.ckpt", every=every)
    assert rest == stream(0, 1, 2)[taken:]
