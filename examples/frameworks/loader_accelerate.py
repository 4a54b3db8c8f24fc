"""accelerate with `cseq.DataLoader`."""

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from samples import Net, Samples


def train(resume=None, **config):
    set_seed(7)
    config = DataLoaderConfiguration(use_seedable_sampler=True, **config)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    loader = DataLoader(Samples(), batch_size=8, shuffle=True, num_workers=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    first, taken = 0, 0
    if resume:
        accelerator.load_state(f"checkpoints/{resume}")
        first, taken = map(int, resume.split("-"))
    for epoch in range(first, 3):
        loader.set_epoch(epoch)
        batches = skip_first_batches(loader, taken) if taken else loader
        for step, batch in enumerate(batches, taken + 1):
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                accelerator.save_state(f"checkpoints/{epoch}-{step}")
        taken = 0
        accelerator.print(epoch, loss.item())


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("1-5")
