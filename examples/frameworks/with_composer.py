"""Composer with `cseq.MPSequence`."""

import torch
from composer import Callback, ComposerModel, Trainer

import cseq

from data import batches
from net import Net


class SaveState(Callback):
    """Keeps the state of a manager in Composer's checkpoints."""

    def __init__(self, manager):
        self.manager = manager

    def state_dict(self):
        return self.manager.state_dict()

    def load_state_dict(self, state):
        self.manager.load_state_dict(state)

    def fit_start(self, state, logger):
        # In this case, the checkpoint was saved with an epoch's last batch.
        if self.manager.epoch > int(state.timestamp.epoch):
            state.timestamp = state.timestamp.to_next_epoch()


class Figures(Callback):
    """Passes cseq's figures to the loggers after every few batches."""

    def __init__(self, n=50):
        self.n = n

    def fit_start(self, state, logger):
        self.every = cseq.Stats.every(self.n, state.train_dataloader)

    def batch_end(self, state, logger):
        logger.log_metrics(self.every.at(int(state.timestamp.batch)))


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def train(load_path=None, interval="5ba"):
    model = Model()
    with batches(shard="auto").start() as manager:
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-4),
            train_dataloader=manager,
            max_duration="3ep",
            device="cpu",
            callbacks=[SaveState(manager), Figures()],
            save_folder="checkpoints",
            save_filename="{batch}.pt",
            save_interval=interval,
            save_overwrite=True,
            load_path=load_path,
            # The state has the position, so there is nothing to skip.
            spin_dataloaders=False,
        )
        trainer.fit()
        trainer.close()


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/20.pt")
