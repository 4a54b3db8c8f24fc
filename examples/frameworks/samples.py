"""The data set and the network of the recipes for `cseq.DataLoader`."""

import random

import numpy as np
import torch


class Samples(torch.utils.data.Dataset):
    """103 made-up samples: a number and three random ones, drawn on each read."""

    def __len__(self):
        return 103

    def __getitem__(self, index):
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        return {"x": torch.tensor([index, *drawn]), "labels": index % 3}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {
            "loss": torch.nn.functional.cross_entropy(logits, labels),
            "logits": logits,
        }
