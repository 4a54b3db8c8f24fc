"""Lightning with `cseq.MPSequence`."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from cseq.adapters.lightning import DataModule, Monitor

from data import batches
from net import Net


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def train(ckpt_path=None, every=5, **options):
    saver = ModelCheckpoint(
        "checkpoints", "{step}", every_n_train_steps=every, save_top_k=-1
    )
    callbacks = [saver, Monitor(every=50)]
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=callbacks, **options
    )
    data = DataModule(
        lambda: batches(shard="auto"), val=lambda: batches(shard="auto", shuffle=False)
    )
    trainer.fit(Module(), data, ckpt_path=ckpt_path)


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/step=20.ckpt")
