"""skorch with `cseq.MPSequence`."""

import json

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback

from data import batches
from net import Net


def as_it_is(data, y=None, **options):
    """The manager is both skorch's data set and its loader."""
    return data


class Save(Callback):
    """Saves network and manager after every fifth batch, and after an epoch."""

    def on_epoch_begin(self, net, dataset_train, **kwargs):
        self.batches, self.step = dataset_train, 0

    def on_batch_end(self, net, training, **kwargs):
        self.step += 1
        if self.step % 5 == 0:
            self.save(net)

    def on_epoch_end(self, net, **kwargs):
        self.save(net)

    def save(self, net):
        net.save_params("net.safetensors", use_safetensors=True)
        with open("batches.json", "w") as file:
            json.dump(self.batches.state_dict(), file)


def train(resume=False):
    net = NeuralNet(
        Net,
        torch.nn.CrossEntropyLoss,
        lr=1e-4,
        dataset=as_it_is,
        iterator_train=as_it_is,
        train_split=None,
        callbacks=[Save],
    ).initialize()
    with batches().start() as manager:
        if resume:
            net.load_params("net.safetensors", use_safetensors=True)
            with open("batches.json") as file:
                manager.load_state_dict(json.load(file))
        net.partial_fit(manager, epochs=3 - manager.epoch)


if __name__ == "__main__":
    train()
