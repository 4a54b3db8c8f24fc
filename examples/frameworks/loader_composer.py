"""Composer with `cseq.DataLoader`."""

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist

from cseq import DataLoader

from samples import Net, Samples


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        return self.net(**batch)

    def loss(self, outputs, batch):
        return outputs["loss"]


def train(load_path=None):
    samples = Samples()
    sampler = dist.get_sampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=8, sampler=sampler, num_workers=2)
    model = Model()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-4),
        train_dataloader=loader,
        max_duration="3ep",
        device="cpu",
        seed=7,
        save_folder="checkpoints",
        save_filename="{batch}.pt",
        save_interval="5ba",
        save_overwrite=True,
        load_path=load_path,
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/20.pt")
