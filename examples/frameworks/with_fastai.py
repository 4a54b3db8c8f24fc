"""fastai with `cseq.MPSequence`."""

import torch
from fastai.basics import Callback, CrossEntropyLossFlat, DataLoaders, Learner

from data import batches
from net import Net


class Save(Callback):
    """Saves network and manager after every fifth batch, and after an epoch."""

    def after_batch(self):
        if self.training and (self.iter + 1) % 5 == 0:
            self.save()

    def after_train(self):
        self.save()

    def save(self):
        state = {"net": self.model.state_dict(), "batches": self.dls.train.state_dict()}
        torch.save(state, "checkpoint.pt")


def train(resume=None):
    with batches().start() as training, batches(shuffle=False).start() as held_out:
        learner = Learner(
            DataLoaders(training, held_out),
            Net(),
            CrossEntropyLossFlat(),
            lr=1e-4,
            cbs=[Save()],
        )
        if resume:
            saved = torch.load(resume)
            learner.model.load_state_dict(saved["net"])
            training.load_state_dict(saved["batches"])
        learner.fit(3, start_epoch=training.epoch)


if __name__ == "__main__":
    train()
