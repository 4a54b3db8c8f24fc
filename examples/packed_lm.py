"""Train a language model on packed rows, in which no document attends to another.

`cseq.Packed` packs documents into full rows of 256 tokens and cuts none. Inside the indexer,
`cseq.parts()` returns how many documents each row has. For each token, a batch contains the number
of its document, for the attention mask, and its position in the document. The script shows that the
model's output for a document is the same in a row and alone. Training can stop anywhere and
continue there.

The language is synthetic: the next token depends on the two before, and documents differ in length.

    python examples/packed_lm.py [--epochs 3] [--workers 2] [--out build/packed]
    python examples/packed_lm.py --stop 40          # ends after 40 batches, as a killed job
    python examples/packed_lm.py                    # continues with batch 41, to the same result
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cseq

ROW, TOKENS, PADDING = 256, 24, 0


class Documents:
    """The indexer: rows of documents, one after another."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.ends = np.cumsum(np.load(folder / "lengths.npy"))

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.split(indices, np.cumsum(cseq.parts())[:-1])
        shape = len(rows), ROW
        tokens, places = np.full(shape, PADDING), np.zeros(shape, np.int64)
        # -1 is padding.
        documents = np.full(shape, -1)
        for r, row in enumerate(rows):
            at = 0
            for number, document in enumerate(row):
                start = self.ends[document - 1] if document else 0
                size = self.ends[document] - start
                tokens[r, at : at + size] = self.tokens[start : start + size]
                places[r, at : at + size] = np.arange(size)
                documents[r, at : at + size] = number
                at += size
        return {"tokens": tokens, "places": places, "documents": documents}


class Model(nn.Module):
    """A transformer of two layers."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(ROW, width)
        self.attend = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.think = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)
            )
            for _ in range(2)
        )
        self.out = nn.Linear(width, TOKENS)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the predictions after each token."""
        documents = batch["documents"]
        # A token sees earlier tokens of its own document. The mask is made here from 2 kB per row;
        # in the batch, it would take 64 kB.
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        x = self.token(batch["tokens"]) + self.place(batch["places"])
        for attend, think in zip(self.attend, self.think, strict=True):
            q, k, v = attend(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + seen.transpose(1, 2).flatten(2)
            x = x + think(x)
        return self.out(x)


def loss_of(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the loss of all tokens except the first of each document, and their number."""
    told, wanted = model(batch)[:, :-1], batch["tokens"][:, 1:].clone()
    inside = batch["documents"][:, 1:] == batch["documents"][:, :-1]
    inside &= batch["documents"][:, 1:] >= 0
    wanted[~inside] = -100
    loss = nn.functional.cross_entropy(told.flatten(0, 1), wanted.flatten(), reduction="sum")
    return loss, int(inside.sum())


@torch.no_grad()
def largest_difference(batch: dict[str, torch.Tensor]) -> float:
    """Compare the output for each document in a row with its output alone."""
    together, documents, most = model(batch), batch["documents"], 0.0
    for number in range(int(documents[0].max()) + 1):
        (where,) = torch.nonzero(documents[0] == number, as_tuple=True)
        alone = model({name: part[:1, where] for name, part in batch.items()})
        most = max(most, (alone[0] - together[0, where]).abs().max().item())
    return most


def write_documents(folder: Path, count: int) -> None:
    """Write documents: all tokens, one after another, and the number of tokens of each."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 0.9, count), 4, ROW).astype(np.int64)
    # The likely token after each pair of tokens.
    likely = rng.integers(1, TOKENS, (TOKENS, TOKENS))
    tokens = rng.integers(1, TOKENS, lengths.sum())
    for k in np.flatnonzero(rng.random(len(tokens)) < 0.8):
        tokens[k] = likely[tokens[k - 2], tokens[k - 1]]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "lengths.npy", lengths)


def save() -> None:
    """Write everything that a resume needs, first under another name."""
    state = {"data": manager.state_dict(), "sums": sums}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


parser = argparse.ArgumentParser(description="a language model on packed rows")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--documents", type=int, default=4000)
parser.add_argument("--stop", type=int, help="end after this many batches")
parser.add_argument("--out", type=Path, default=Path("build/packed"))
args = parser.parse_args()

if not (args.out / "lengths.npy").exists():
    write_documents(args.out, args.documents)
lengths = np.load(args.out / "lengths.npy", mmap_mode="r")
checkpoint = args.out / "checkpoint.pt"

order = cseq.Packed(lengths, ROW)
print(order.describe())
manager = cseq.MPSequence(
    functools.partial(Documents, args.out),
    len(lengths),
    args.workers,
    order=order,
    # The number of rows.
    batch_size=16,
    out_type="cpu",
    dtype=None,
    seed=7,
)

torch.manual_seed(7)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
# The loss and the number of tokens of this epoch.
sums = [0.0, 0]
if checkpoint.exists():
    saved = torch.load(checkpoint)
    manager.load_state_dict(saved["data"])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sums = saved["sums"]
    print(f"continues in epoch {manager.epoch + 1}")

taken = 0
with manager.start() as batches:
    for epoch in range(manager.epoch, args.epochs):
        for batch in batches:
            loss, tokens = loss_of(batch)
            optimizer.zero_grad()
            # Dividing by the maximum number of tokens per batch gives each token the same weight.
            (loss / (16 * ROW)).backward()
            optimizer.step()
            sums = [sums[0] + loss.item(), sums[1] + tokens]
            taken += 1
            if taken == args.stop:
                break
        if taken == args.stop:
            save()
            print(f"stopped in epoch {epoch + 1}, after {taken} batches")
            break
        print(f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.4f}")
        sums = [0.0, 0]
        save()
    else:
        print(f"in a row as alone: {largest_difference(batch) < 1e-4}")
