"""Ignite trains on cseq's batches, and its checkpoints hold cseq's state."""

from __future__ import annotations

import pytest
from recipes import LENGTH, figures_of, recorded, stream

pytest.importorskip("ignite")


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2."""
    import with_ignite

    assert recorded(monkeypatch, with_ignite.train) == stream(0, 1, 2)


@pytest.mark.parametrize("taken", [5, 20, LENGTH, 2 * LENGTH])
def test_a_resume_gives_the_rest(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    import with_ignite

    first = recorded(monkeypatch, with_ignite.train, stop_after=taken + 2, every=taken)
    assert first == stream(0, 1, 2)[: taken + 2]
    path = f"checkpoints/checkpoint_{taken}.pt"
    rest = recorded(monkeypatch, with_ignite.train, resume=path, every=taken)
    assert rest == stream(0, 1, 2)[taken:]


def test_figures_are_among_the_metrics() -> None:
    """A logger that is attached later finds them."""
    import with_ignite

    assert len(figures_of(with_ignite.train().state.metrics)) == 17
