"""The data set of the recipes in the form that the Hugging Face Trainer requires."""

from data import Samples


class Inputs(Samples):
    """The Trainer calls the network with a batch's items as keyword arguments."""

    def __getitem__(self, indices):
        x, y = super().__getitem__(indices)
        return {"x": x, "labels": y}
