"""A loop with JAX, Flax and Orbax: cseq's epochs, and its state in Orbax' checkpoints."""

from __future__ import annotations

import pytest
from recipes import LENGTH, Interrupted, Record, stream

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")


def trained(
    monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None, **options: object
) -> Record:
    """Run the recipe, and take down what its `update` was called with."""
    import with_jax

    record, update = Record(stop_after), with_jax.update

    def recording(net: object, optimizer: object, x: object, y: object) -> None:
        record.add(x)
        update(net, optimizer, x, y)

    with monkeypatch.context() as patch:
        patch.setattr(with_jax, "update", recording)
        if stop_after is None:
            with_jax.train(**options)
        else:
            with pytest.raises(Interrupted):
                with_jax.train(**options)
    return record


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2."""
    assert trained(monkeypatch) == stream(0, 1, 2)


@pytest.mark.parametrize("taken", [5, 20, LENGTH])
def test_a_resume_gives_the_rest(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    expected = stream(0, 1, 2)
    first = trained(monkeypatch, stop_after=taken + 2, every=taken)
    assert first == expected[: taken + 2]
    assert trained(monkeypatch, resume=taken, every=taken) == expected[taken:]
