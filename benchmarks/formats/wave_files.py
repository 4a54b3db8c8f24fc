"""9. A folder of wave files of 1 to 4 seconds, padded to the longest of the batch."""

from __future__ import annotations

import wave
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import main, scaled
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import cseq

FILES = scaled(1000, 20)
RATE = scaled(16_000, 100)
BATCH = scaled(32, 4)


def make(folder):
    """Write the files. The first value of each is its number."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        samples = rng.integers(1, 2000, size=rng.integers(RATE, 4 * RATE), dtype="int16")
        samples[0] = number
        with wave.open(str(Path(folder, f"{number:04}.wav")), "wb") as file:
            file.setparams((1, 2, RATE, len(samples), "NONE", "none"))
            file.writeframes(samples.tobytes())


def read(path):
    """Read one file, as floats between -1 and 1."""
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "int16") / np.float32(32768)


class Waves:
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.wav"))

    def __getitem__(self, indices):
        waves = [read(self.paths[index]) for index in indices]
        lengths = np.array([len(one) for one in waves])
        batch = cseq.empty((len(waves), lengths.max()), np.float32)
        for row, one in zip(batch, waves, strict=True):
            row[: len(one)] = one
            row[len(one) :] = 0
        return batch, lengths


def ours(kind, folder, options):
    """Pad into shared memory."""
    return kind(partial(Waves, folder), FILES, batch_size=BATCH, **options)


class WaveDataset(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.wav"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.from_numpy(read(self.paths[index]))


def collate(waves):
    """Pad to the longest."""
    return pad_sequence(waves, batch_first=True), torch.tensor([len(one) for one in waves])


def theirs(folder, options):
    """Pad in `collate_fn`."""
    return DataLoader(WaveDataset(folder), BATCH, collate_fn=collate, **options)


if __name__ == "__main__":
    main(make, ours, theirs, numbers=lambda batch: (batch[0][:, 0] * 32768).round())
