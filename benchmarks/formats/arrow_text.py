"""2. Hugging Face `datasets` (Arrow files): lists of tokens, padded to the longest of the batch."""

from __future__ import annotations

from functools import partial

import datasets
import numpy as np
import torch
from measuring import main, scaled
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TEXTS = scaled(20_000, 100)
BATCH = scaled(64, 16)


def make(folder):
    """Write texts of 20 to 200 tokens."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 30_000, size=rng.integers(20, 200)) for _ in range(TEXTS)]
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"tokens": tokens, "label": list(range(TEXTS))})
    dataset.save_to_disk(folder)


class Texts:
    def __init__(self, folder):
        self.rows = datasets.load_from_disk(folder).with_format("numpy")

    def __getitem__(self, indices):
        rows = self.rows[indices]
        lengths = [len(one) for one in rows["tokens"]]
        tokens = np.zeros((len(indices), max(lengths)), np.int64)
        for row, one, length in zip(tokens, rows["tokens"], lengths, strict=True):
            row[:length] = one
        return tokens, rows["label"]


def ours(kind, folder, options):
    """Use one look-up per batch, and pad into one array."""
    return kind(partial(Texts, folder), TEXTS, batch_size=BATCH, **options)


def collate(rows):
    """Pad to the longest."""
    tokens = pad_sequence([row["tokens"] for row in rows], batch_first=True)
    return tokens, torch.stack([row["label"] for row in rows])


def theirs(folder, options):
    """Use the data set in torch's format, and pad in `collate_fn`."""
    dataset = datasets.load_from_disk(folder).with_format("torch")
    return DataLoader(dataset, BATCH, collate_fn=collate, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: batch[1])
