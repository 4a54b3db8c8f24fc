"""Clips of eight frames from video files, decoded by torchcodec."""

from pathlib import Path

import numpy as np
import torch
from torchcodec.decoders import VideoDecoder
from torchcodec.encoders import VideoEncoder

import cseq

FRAMES = 8


def write(folder):
    for number in range(4):
        frames = torch.full((40, 3, 64, 64), 60 * number, dtype=torch.uint8)
        VideoEncoder(frames, frame_rate=10).to_file(folder / f"{number}.mp4")


class Clips:
    """Each worker has its own object, because a decoder serves one thread at a time."""

    def __init__(self):
        self.decoders = [VideoDecoder(path) for path in paths]

    def __getitem__(self, indices):
        clips = torch.empty((len(indices), FRAMES, 3, 64, 64), dtype=torch.uint8)
        files, starts = table[indices].T
        for file in np.unique(files):
            rows = np.flatnonzero(files == file)
            frames = (starts[rows, None] + np.arange(FRAMES)).ravel()
            found = self.decoders[file].get_frames_at(frames.tolist())
            clips[rows] = found.data.unflatten(0, (len(rows), FRAMES))
        return clips, files


write(Path())
paths = sorted(Path().glob("*.mp4"))
counts = [VideoDecoder(path).metadata.num_frames for path in paths]
table = np.array(
    [
        (file, start)
        for file, count in enumerate(counts)
        for start in range(0, count - FRAMES + 1, FRAMES)
    ]
)
manager = cseq.MTSequence(
    Clips, len(table), batch_size=6, out_type="cpu", dtype=None, seed=1
)
with manager.start() as batches:
    for clips, files in batches:
        brightness = clips.float().mean((1, 2, 3, 4))
        print(clips.shape, torch.allclose(brightness, 60.0 * files, atol=9))
