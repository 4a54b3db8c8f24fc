"""accelerate with `cseq.StatefulDataLoader`, and an exact resume."""

import torch
import torchdata.stateful_dataloader
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import cseq
from cseq.adapters.torch import defaults

from samples import Net, Samples

torchdata.stateful_dataloader.StatefulDataLoader = cseq.StatefulDataLoader
# accelerate passes on only torch's arguments, so `rng` is set here.
defaults.rng = "batch"


def train(resume=None, **config):
    set_seed(7)
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, **config
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(
        Samples(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(7),
    )
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    first, step = 0, 0
    if resume:
        accelerator.load_state(f"checkpoints/{resume}")
        first, step = map(int, resume.split("-"))
    for epoch in range(first, 3):
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader, step + 1):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                accelerator.save_state(f"checkpoints/{epoch}-{step}")
        step = 0


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("1-5")
