"""Train on utterances of very different lengths, in batches with a budget of frames.

The speech is synthetic: a sound lasts some frames, a frame has eight features, and a small network
learns which sound each frame belongs to. As in real speech, utterances have 20 to 800 frames, so
batches of a fixed number of utterances would be mostly padding, or too large for the device.
Training can stop anywhere and continue there.

    python examples/buckets_speech.py [--epochs 4] [--workers 2] [--budget 6000] [--out DIR]
    python examples/buckets_speech.py --stop 60     # ends after 60 batches, as a killed job
    python examples/buckets_speech.py               # continues with batch 61, to the same result
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cseq

SOUNDS, FEATURES = 12, 8


class Speech:
    """The indexer: each worker maps the files and pads a batch to its longest utterance."""

    def __init__(self, folder: Path) -> None:
        self.features = np.load(folder / "features.npy", mmap_mode="r")
        self.sounds = np.load(folder / "sounds.npy", mmap_mode="r")
        self.ends = np.cumsum(np.load(folder / "lengths.npy"))

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        ends = self.ends[indices]
        starts = np.where(indices > 0, self.ends[indices - 1], 0)
        longest = (ends - starts).max()
        features = np.zeros((len(indices), longest, FEATURES), np.float32)
        # -1 is padding.
        sounds = np.full((len(indices), longest), -1)
        for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
            features[k, : end - start] = self.features[start:end]
            sounds[k, : end - start] = self.sounds[start:end]
        return {"features": features, "sounds": sounds}


def write_speech(folder: Path, utterances: int) -> None:
    """Write utterances: all frames, one after another, and the number of frames of each."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.6, 0.8, utterances), 20, 800).astype(np.int64)
    frames = lengths.sum()
    # A sound lasts five frames on average.
    changes = rng.random(frames) < 0.2
    sounds = rng.integers(0, SOUNDS, frames)[np.maximum.accumulate(changes * np.arange(frames))]
    voices = rng.standard_normal((SOUNDS, FEATURES))
    features = voices[sounds] + 1.2 * rng.standard_normal((frames, FEATURES))
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "features.npy", features.astype(np.float32))
    np.save(folder / "sounds.npy", sounds)
    np.save(folder / "lengths.npy", lengths)


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": manager.state_dict(), "sums": sums}
    state |= {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="batches by a budget of frames")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--budget", type=int, default=6000, help="frames of a batch, with padding")
parser.add_argument("--utterances", type=int, default=3000)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/speech"))
args = parser.parse_args()

if not (args.out / "lengths.npy").exists():
    write_speech(args.out, args.utterances)
lengths = np.load(args.out / "lengths.npy", mmap_mode="r")
checkpoint = args.out / "checkpoint.pt"

# The order is made from the lengths alone, in milliseconds, and has no state of its own. The
# longest utterances come first: if a batch is too large for the device, the first step fails.
order = cseq.Buckets(lengths, args.budget, ratio=1.15, longest_first=True)
print(order.describe())
manager = cseq.MPSequence(
    functools.partial(Speech, args.out),
    len(lengths),
    args.workers,
    order=order,
    out_type="cpu",
    dtype=None,
    seed=7,
)

torch.manual_seed(7)
torch.set_num_threads(1)
network = nn.Sequential(
    *(nn.Conv1d(FEATURES, 32, 5, padding=2), nn.ReLU()),
    *(nn.Conv1d(32, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, SOUNDS, 1)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
# The loss, the frames, and the frames that were classified correctly in this epoch.
sums = [0.0, 0, 0]
if checkpoint.exists():
    saved = torch.load(checkpoint)
    manager.load_state_dict(saved["data"])
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    sums = saved["sums"]
    print(f"continues in epoch {manager.epoch + 1}")

taken = 0
with manager.start() as batches:
    for epoch in range(manager.epoch, args.epochs):
        for batch in batches:
            told = network(batch["features"].transpose(1, 2))
            loss = nn.functional.cross_entropy(
                told, batch["sounds"], ignore_index=-1, reduction="sum"
            )
            optimizer.zero_grad()
            # Dividing by the maximum number of frames per batch gives each frame the same weight,
            # even in the short last batch of a bucket.
            (loss / args.budget).backward()
            optimizer.step()
            right = (told.argmax(1) == batch["sounds"]).sum().item()
            frames = (batch["sounds"] >= 0).sum().item()
            sums = [a + b for a, b in zip(sums, (loss.item(), frames, right), strict=True)]
            taken += 1
            if taken == args.stop:
                break
        if taken == args.stop:
            save()
            print(f"stopped in epoch {epoch + 1}, after {taken} batches")
            break
        print(f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.4f}, {sums[2] / sums[1]:.1%} right")
        sums = [0.0, 0, 0]
        save()
