"""What a manager says it has done."""

from __future__ import annotations

import numpy as np
import pytest

import cseq
from cseq.stats import Stats


class Large:
    """Batches that are leased, not copied."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return np.repeat(indices, 4096)


@pytest.mark.parametrize("kind", ["proc", "thread"])
def test_batches_and_samples_are_counted(kind: str) -> None:
    """Over all epochs since the start, also after the end."""
    m = cseq.MSequence(Large, 50, batch_size=8, thread_type=kind, out_type="null")
    with m.start():
        for _ in range(2):
            for _ in m:
                pass
        now = m.stats()
    assert (now.batches, now.samples) == (14, 100)
    assert m.stats().batches == 14
    assert (now.nbytes >= 100 * 4096 * 8) == (kind == "proc")
    assert now.depths == (0, 0, 0)
    assert now.loop_waited >= 0
    assert "14 batches, 100 samples" in str(now)
    with m.start():
        assert m.stats().batches == 0


def test_copies_are_counted() -> None:
    """Batches that are copied because too many are held."""
    m = cseq.MPSequence(Large, 50, batch_size=8, out_type="null", memory_limit=10**6)
    with m.start():
        kept = list(m)
        assert m.stats().copies > 0
    assert sum(map(len, kept)) == 50 * 4096


def test_the_bottleneck() -> None:
    """Whoever is waited for."""
    assert Stats(loop_waited=2, workers_waited=1).bottleneck == "workers"
    assert Stats(loop_waited=1, workers_waited=2).bottleneck == "loop"
