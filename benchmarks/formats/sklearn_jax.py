"""12. Without torch: the same stream for scikit-learn's `partial_fit` and for a step in JAX."""

from __future__ import annotations

import sys

import jax
import numpy as np
from measuring import main, scaled
from sklearn.linear_model import SGDClassifier

ROWS = scaled(20_000, 100)
BATCH = scaled(128, 16)


def make(_folder):
    """Do nothing: the rows are computed from their numbers."""


class Rows:
    def __init__(self):
        self.directions = np.random.default_rng(0).normal(size=(2, 64)).astype("float32")

    def __getitem__(self, indices):
        rows = np.sin(indices[:, None] * self.directions[0]) + self.directions[1]
        return rows.astype("float32"), indices


def ours(kind, _folder, options):
    """NumPy arrays, as the indexer returns them."""
    return kind(Rows, ROWS, batch_size=BATCH, **(options | {"out_type": "null"}))


class RowDataset(Rows):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        rows, _ = super().__getitem__(np.array([index]))
        return rows[0], index


def collate(samples):
    """Stack arrays, so that the batch contains no tensors."""
    rows, numbers = zip(*samples, strict=True)
    return np.stack(rows), np.array(numbers)


def theirs(_folder, options):
    """Use torch only for its loader. JAX has threads, which do not survive a fork."""
    from torch.utils.data import DataLoader

    return DataLoader(RowDataset(), BATCH, collate_fn=collate, **options)


def train():
    """Both libraries take batches as they come. torch is never imported."""
    import cseq

    model = SGDClassifier(random_state=0)
    weights = jax.numpy.zeros(64)
    step = jax.jit(lambda w, x, y: w - 0.1 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w))
    with cseq.MTSequence(Rows, ROWS, batch_size=BATCH, out_type="null", seed=1).start() as batches:
        for rows, numbers in batches:
            model.partial_fit(rows, numbers % 2, classes=[0, 1])
            weights = step(weights, rows, (numbers % 2).astype("float32"))
    assert model.coef_.any()
    assert jax.numpy.isfinite(weights).all()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    if sys.argv[1] == "check":
        train()
    main(make, ours, theirs, numbers=lambda batch: batch[1], forks=False)
