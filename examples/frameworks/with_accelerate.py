"""accelerate with `cseq.MPSequence`."""

import torch
from accelerate import Accelerator

from data import batches
from net import Net


def train(resume=None):
    # This creates the process group.
    accelerator = Accelerator(cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1e-4)
    )
    with batches(shard="auto").start() as manager:
        accelerator.register_for_checkpointing(manager)
        if resume:
            accelerator.load_state(resume)
        for epoch in range(manager.epoch, 3):
            for step, (x, y) in enumerate(manager, 1):
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                if step % 5 == 0:
                    accelerator.save_state(f"checkpoints/{epoch}-{step}")
            accelerator.save_state(f"checkpoints/{epoch}-end")


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/1-5")
    train("checkpoints/0-end")
