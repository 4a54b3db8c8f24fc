"""Lightning with `cseq.DataLoader`."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from cseq import DataLoader
from cseq.adapters.lightning import SaveState

from samples import Net, Samples


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)

    def val_dataloader(self):
        return DataLoader(Samples(), batch_size=8, num_workers=2, rng="batch")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def train(ckpt_path=None, every=5, **options):
    lightning.seed_everything(7)
    loader = DataLoader(
        Samples(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        rng="batch",
        generator=torch.Generator().manual_seed(7),
    )
    saver = ModelCheckpoint(
        "checkpoints", "{step}", every_n_train_steps=every, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[saver, SaveState()],
        **options,
    )
    trainer.fit(Module(), loader, ckpt_path=ckpt_path)


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/step=20.ckpt")
