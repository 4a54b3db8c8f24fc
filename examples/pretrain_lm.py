"""Pre-train a language model with FSDP2, and continue after a kill on any number of ranks.

Documents from two sources are packed into rows. Each step has 12 rows, for any number of ranks. No
document attends to another. Every five steps, torch's distributed checkpoint saves everything that
a resume needs. The language is synthetic, as in packed_lm.py.

    torchrun --nproc-per-node 2 examples/pretrain_lm.py --stop 12    # as a killed job
    torchrun --nproc-per-node 3 examples/pretrain_lm.py              # continues after step 10
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cseq
from cseq import tokens

ROW, ROWS_A_STEP, WORDS, END = 256, 12, 24, 0


class Block(nn.Module):
    """Attention and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend = nn.Linear(width, 3 * width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Add the attention output and the network's output."""
        q, k, v = self.attend(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + seen.transpose(1, 2).flatten(2)
        return x + self.think(x)


class Model(nn.Module):
    """A transformer of two blocks."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, width), nn.Embedding(ROW, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.out = nn.Linear(width, WORDS)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of the losses of all tokens that have a next token."""
        documents = batch["document_ids"]
        # A token sees earlier tokens of its own document. The mask is made on the device.
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        x = self.token(batch["input_ids"]) + self.position(batch["position_ids"])
        for block in self.blocks:
            x = block(x, mask)
        logits, labels = self.out(x).flatten(0, 1), batch["labels"].flatten()
        # Labels of -100 are ignored.
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


def write_documents(path: Path, count: int, seed: int) -> None:
    """Write documents into a raw uint16 file, each with END as its last token."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 1.2, count), 2, 1500).astype(np.int64)
    # The likely word after each pair of words.
    likely = np.random.default_rng(0).integers(1, WORDS, (WORDS, WORDS))
    words = rng.integers(1, WORDS, lengths.sum(), dtype=np.uint16)
    for k in np.flatnonzero(rng.random(len(words)) < 0.8):
        words[k] = likely[words[k - 2], words[k - 1]]
    words[lengths.cumsum() - 1] = END
    words.tofile(path)


def state() -> dict[str, object]:
    """Return everything that a resume needs. FSDP2's shards load on any number of ranks."""
    parameters, moments = states.get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "rows": manager}


def load_newest() -> int:
    """Load the newest complete checkpoint. Return its step, or 0 if there is none."""
    # This file is written last.
    whole = [path.parent for path in args.out.glob("step-*/.metadata")]
    if not whole:
        return 0
    newest = max(whole, key=lambda path: int(path.name[5:]))
    saved = state()
    dcp.load(saved, checkpoint_id=newest)
    states.set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    return int(newest.name[5:])


parser = argparse.ArgumentParser(description="pre-train a language model on packed rows")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--stop", type=int, help="end after this step")
parser.add_argument("--out", type=Path, default=Path("build/pretrain"))
args = parser.parse_args()

dist.init_process_group()
device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))

if dist.get_rank() == 0 and not args.out.exists():
    args.out.mkdir(parents=True)
    write_documents(args.out / "web.bin", 2000, seed=1)
    write_documents(args.out / "code.bin", 600, seed=2)
dist.barrier()
sources = {
    name: tokens.Flat(args.out / f"{name}.bin", dtype="uint16", end=END) for name in ("web", "code")
}
rows = tokens.Rows(sources, ROW, weights={"web": 3, "code": 1}, step=ROWS_A_STEP)
manager = cseq.MPSequence(
    rows,
    batch_size=ROWS_A_STEP // ranks,
    num_workers=1,
    seed=7,
    shard=mesh["dp"],
    drop_last=True,
    repeat=True,
    out_type=device,
    dtype=None,
)

torch.manual_seed(7)
torch.set_num_threads(1)
model = Model().to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
done = load_newest()
if done and dist.get_rank() == 0:
    print(f"continues after step {done}")

with manager.start() as batches:
    for step, batch in enumerate(batches, done + 1):
        valid = torch.tensor(batch["valid_tokens"], device=device)
        dist.all_reduce(valid)
        loss = model(batch) / valid
        optimizer.zero_grad()
        # FSDP takes the mean over ranks.
        (loss * ranks).backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.5f}")
        if step % 5 == 0:
            dcp.save(state(), checkpoint_id=args.out / f"step-{step}")
        if step in (args.stop, args.steps):
            break
dist.destroy_process_group()
