"""8. A memory-mapped file of tokens: random windows of 512."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import main, scaled
from torch.utils.data import DataLoader, Dataset

import cseq

TOKENS = scaled(10_000_000, 10_000)
WINDOW = scaled(512, 8)
# The number of windows per epoch.
WINDOWS = scaled(20_000, 100)
BATCH = scaled(64, 16)


def make(folder):
    """Write the tokens."""
    np.random.default_rng(0).integers(50_000, size=TOKENS, dtype="uint16").tofile(
        Path(folder, "tokens.bin")
    )


class Windows:
    def __init__(self, folder):
        self.tokens = np.memmap(Path(folder, "tokens.bin"), dtype="uint16", mode="r")
        self.steps = np.arange(WINDOW + 1)

    def __getitem__(self, indices):
        starts = cseq.rng().integers(len(self.tokens) - WINDOW, size=len(indices))
        windows = self.tokens[starts[:, None] + self.steps].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def ours(kind, folder, options):
    """Windows have no numbers; the seed and the batch determine which ones are drawn."""
    return kind(partial(Windows, folder), WINDOWS, batch_size=BATCH, shuffle=False, **options)


class WindowDataset(Dataset):
    def __init__(self, folder):
        self.tokens = np.memmap(Path(folder, "tokens.bin"), dtype="uint16", mode="r")

    def __len__(self):
        return WINDOWS

    def __getitem__(self, _number):
        start = torch.randint(len(self.tokens) - WINDOW, ()).item()
        window = torch.from_numpy(self.tokens[start : start + WINDOW + 1].astype(np.int64))
        return window[:-1], window[1:]


def theirs(folder, options):
    """The data set draws the windows."""
    return DataLoader(WindowDataset(folder), BATCH, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=None)
