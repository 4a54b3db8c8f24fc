"""Audio files of unequal lengths, padded."""

import wave
from pathlib import Path

import numpy as np

import cseq

for number in range(20):
    with wave.open(f"{number:02}.wav", "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", "none"))
        file.writeframes(np.full(1000 + 50 * number, number, "int16").tobytes())


class Waves:
    def __init__(self):
        self.paths = sorted(Path().glob("*.wav"))

    def __getitem__(self, indices):
        waves = [self.read(self.paths[index]) for index in indices]
        lengths = np.array([len(one) for one in waves])
        batch = cseq.empty((len(waves), lengths.max()), np.float32)
        for row, one in zip(batch, waves):
            row[: len(one)] = one
            row[len(one) :] = 0
        return batch, lengths

    def read(self, path):
        with wave.open(str(path)) as file:
            data = file.readframes(file.getnframes())
        return np.frombuffer(data, "int16") / np.float32(32768)


with cseq.MPSequence(
    Waves, 20, batch_size=8, out_type="cpu", dtype=None, seed=1
).start() as batches:
    for waves, lengths in batches:
        longest = int(lengths.max())
        print(len(waves), waves.shape[1] == longest, waves.dtype, lengths.dtype)
