"""`cseq.tokens` in a training run: FSDP on ranks that are killed and resume as others."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkout import import_path
from token_data import random_documents, write_flat, write_megatron

pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="torch has no FSDP")


pytestmark = pytest.mark.needs("fork")

STEPS, KILLED, SAVED = 12, 7, 4
SCRIPT = """
import json, os, signal, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_ranks import fork
import cseq
from cseq import tokens

ROW, GLOBAL = 32, 6
warnings.filterwarnings("ignore")  # of torch's own

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, mask):
        q, k, v = self.attend(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(seen.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(30_000, 16), nn.Embedding(ROW, 16)
        self.layers, self.out = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(16, 30_000)

    def forward(self, batch):
        documents = batch["document_ids"]
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        x = self.token(batch["input_ids"]) + self.place(batch["position_ids"])
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)

def loader_of(mesh):
    web = tokens.Megatron("web")
    code = tokens.Flat("code.bin", dtype="uint16", end=0)
    rows = tokens.Rows(
        {"web": web, "code": code}, ROW, {"web": 3, "code": 1}, step=GLOBAL, epoch_size=48
    )
    return cseq.MPSequence(
        rows, batch_size=GLOBAL // mesh.size(), num_workers=1, seed=7, shard=mesh["dp"],
        out_type="cpu", start_method="fork", repeat=True,
    )

def train(rank, ranks, first, last, saved, log):
    torch.manual_seed(3)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model, loader = Model(), loader_of(mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "data": loader}, checkpoint_id="saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    with loader.start() as batches, open(f"{log}.{rank}", "w") as lines:
        for step, batch in enumerate(batches, first + 1):
            valid = torch.tensor(batch["valid_tokens"])
            dist.all_reduce(valid)
            logits = model(batch)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
            ) / valid
            optimizer.zero_grad()
            (loss * ranks).backward()  # FSDP takes the mean over ranks
            optimizer.step()
            dist.all_reduce(loss.detach_())
            rows = [batch[key].tolist() for key in ("input_ids", "labels", "document_ids")]
            print(json.dumps([step, loss.item().hex(), rows]), file=lines, flush=True)
            if step == saved:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments, "data": loader}
                dcp.save(state, checkpoint_id="saved")
            if step == last:
                if saved:
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                break

if __name__ == "__main__":
    ranks, first, last, saved = map(int, sys.argv[1:5])
    log, store = sys.argv[5], os.path.abspath(f"store-{sys.argv[5]}")
    job = lambda rank: train(rank, ranks, first, last, saved, log)
    started = [fork(ranks, rank, job, store, 60.0) for rank in range(ranks)]
    for _, pipe in started:
        os.close(pipe)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in started]))
"""


def log_of(folder, name, ranks):
    """Return the loss and the global batch of each step, which has the rows of all ranks."""
    parts = [
        [json.loads(line) for line in (folder / f"{name}.{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]
    steps = {}
    for step in zip(*parts, strict=True):
        assert len({(number, loss) for number, loss, _ in step}) == 1
        keys = zip(*(rows for _, _, rows in step), strict=True)
        rows = zip(*([row for rows in key for row in rows] for key in keys), strict=True)
        steps[step[0][0]] = step[0][1], sorted(rows)
    return steps


def test_a_killed_run_goes_on_with_other_ranks(tmp_path, run_prepared):
    """Three ranks get the global batches of two; two ranks get the same losses to the last bit."""
    rng = np.random.default_rng(1)
    write_megatron(tmp_path / "web", random_documents(rng, 300, 32))
    write_flat(tmp_path / "code.bin", [[*each, 0] for each in random_documents(rng, 200, 32)])
    path = os.pathsep.join([import_path(), str(Path(__file__).parents[1] / "helpers")])

    def leg(ranks, first, last, saved, name):
        given = [*map(str, (ranks, first, last, saved)), name]
        done = run_prepared(SCRIPT, *given, PYTHONPATH=path)
        assert json.loads(done.stdout) == [-9 if saved else 0] * ranks, done.stderr
        return log_of(tmp_path, name, ranks)

    whole = leg(2, 0, STEPS, 0, "whole")
    killed = leg(2, 0, KILLED, SAVED, "killed")
    same = leg(2, SAVED, STEPS, 0, "same")
    other = leg(3, SAVED, STEPS, 0, "other")
    assert [*whole] == [*range(1, STEPS + 1)]
    assert killed == {step: whole[step] for step in range(1, KILLED + 1)}
    assert same == {step: whole[step] for step in range(SAVED + 1, STEPS + 1)}
    assert {step: rows for step, (_, rows) in other.items()} == {
        step: rows for step, (_, rows) in whole.items() if step > SAVED
    }
    assert float.fromhex(whole[STEPS][0]) < float.fromhex(whole[1][0])
