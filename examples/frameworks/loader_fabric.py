"""Fabric with `cseq.DataLoader`."""

import lightning
import torch

from cseq import DataLoader

from samples import Net, Samples


def train(resume=None, **options):
    lightning.seed_everything(7)
    fabric = lightning.Fabric(accelerator="cpu", **options)
    fabric.launch()
    net = Net()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    loader = DataLoader(
        Samples(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        rng="batch",
        generator=torch.Generator().manual_seed(7),
    )
    loader = fabric.setup_dataloaders(loader)
    parts = {
        "net": net,
        "optimizer": optimizer,
        "loader": loader,
        "epoch": 0,
        "step": 0,
    }
    if resume:
        fabric.load(resume, parts)
    for epoch in range(parts["epoch"], 3):
        # Fabric passes this number to a DistributedSampler as the epoch.
        parts["epoch"] = loader._num_iter_calls = epoch
        for batch in loader:
            fabric.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            parts["step"] += 1
            if parts["step"] % 5 == 0:
                fabric.save(f"checkpoints/{parts['step']}.ckpt", parts)


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/20.ckpt")
