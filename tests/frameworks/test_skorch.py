"""skorch trains on cseq's batches, and goes on with the rest of them."""

from __future__ import annotations

import pytest
from recipes import LENGTH, recorded, stream

pytest.importorskip("skorch")


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2."""
    import with_skorch

    assert recorded(monkeypatch, with_skorch.train) == stream(0, 1, 2)


@pytest.mark.parametrize(
    ("stop_after", "taken"), [(12, 10), (LENGTH + 7, LENGTH + 5), (LENGTH + 2, LENGTH)]
)
def test_a_resume_gives_the_rest(
    monkeypatch: pytest.MonkeyPatch, stop_after: int, taken: int
) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    import with_skorch

    expected = stream(0, 1, 2)
    assert recorded(monkeypatch, with_skorch.train, stop_after=stop_after) == expected[:stop_after]
    assert recorded(monkeypatch, with_skorch.train, resume=True) == expected[taken:]
