"""DistributedDataParallel with `cseq.MPSequence`."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import batches
from net import Net


def train(resume=None):
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with batches(shard="auto").start() as manager:
        if resume:
            saved = torch.load(resume)
            net.load_state_dict(saved["net"])
            manager.load_state_dict(saved["batches"])
        for epoch in range(manager.epoch, 3):
            for step, (x, y) in enumerate(manager, 1):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                if step % 3 == 0 or step == len(manager):
                    save(net, manager, f"checkpoints/{epoch}-{step}.pt")


def save(net, manager, path):
    if dist.get_rank() == 0:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save({"net": net.state_dict(), "batches": manager.state_dict()}, path)
    dist.barrier()


# Run it as: torchrun --nproc-per-node 2 with_ddp.py
if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/1-3.pt")
    dist.destroy_process_group()
