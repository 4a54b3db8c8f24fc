"""Train a language model on three corpora whose shares change: easy text first, code later.

`cseq.Mixture` takes documents from the corpora in shares that change after a given number of
samples. A small corpus repeats sooner, but only after all of its documents were used. Training can
stop anywhere and continue there, even with different shares or an additional corpus, because a
checkpoint contains how much of each corpus was read.

The corpora are synthetic: Markov chains that are increasingly hard to predict.

    python examples/mixture_curriculum.py [--epochs 3] [--workers 2] [--out build/mixture]
    python examples/mixture_curriculum.py --stop 40     # ends after 40 batches, as a killed job
    python examples/mixture_curriculum.py               # continues to the same result
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cseq

WORDS, LENGTH = 20, 33
# The number of documents.
SIZES = {"simple": 600, "web": 3000, "code": 1200}
# How often the likely word follows.
SURE = {"simple": 0.95, "web": 0.6, "code": 0.8}


def corpora(seed: int, sizes: dict[str, int]) -> np.ndarray:
    """Make the documents of the corpora, one corpus after another."""
    rng = np.random.default_rng(seed)
    found = []
    for name, size in sizes.items():
        likely = np.random.default_rng(len(name)).permutation(WORDS)
        documents = np.empty((size, LENGTH), np.int64)
        documents[:, 0] = rng.integers(WORDS, size=size)
        for k in range(1, LENGTH):
            sure = rng.random(size) < SURE[name]
            other = rng.integers(WORDS, size=size)
            documents[:, k] = np.where(sure, likely[documents[:, k - 1]], other)
        found.append(documents)
    return np.concatenate(found)


class Model(nn.Module):
    """A GRU that recognises the corpus from the first words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(WORDS, 32), nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, WORDS)

    def forward(self, documents: torch.Tensor) -> torch.Tensor:
        """Return the loss of all words except the first."""
        told = self.out(self.gru(self.embed(documents[:, :-1]))[0])
        return nn.functional.cross_entropy(told.flatten(0, 1), documents[:, 1:].flatten())


@torch.no_grad()
def held_out_loss() -> float:
    """Return the loss on held-out documents of the target corpora."""
    return model(torch.from_numpy(corpora(1, {"web": 300, "code": 300}))).item()


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": manager.state_dict()}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="a language model on a mixture of corpora")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/mixture"))
args = parser.parse_args()

order = cseq.Mixture(
    {name: cseq.Shuffled(size) for name, size in SIZES.items()},
    [
        (0, {"simple": 0.8, "web": 0.2, "code": 0}),
        # These weights apply from unit 1920 on.
        (1920, {"simple": 0.2, "web": 0.5, "code": 0.3}),
    ],
    block=64,
    epoch_size=1600,
)
print(order.describe())
documents = corpora(0, SIZES)
manager = cseq.MPSequence(
    documents, num_workers=args.workers, order=order, out_type="cpu", dtype=None, seed=7
)

torch.manual_seed(7)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
args.out.mkdir(parents=True, exist_ok=True)
checkpoint = args.out / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint)
    manager.load_state_dict(saved["data"])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    print(f"continues in epoch {manager.epoch + 1}")

taken = 0
with manager.start() as batches:
    for epoch in range(manager.epoch, args.epochs):
        for batch in batches:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken += 1
            if taken == args.stop:
                break
        if taken == args.stop:
            save()
            print(f"stopped in epoch {epoch + 1}, after {taken} batches")
            break
        print(f"epoch {epoch + 1}: held-out loss {held_out_loss():.4f}")
        save()
