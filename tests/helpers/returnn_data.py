"""RETURNN data sets, and `MultiProcDataset` over them."""

import functools

import numpy as np
import pytest
from kinds import QUICKEST

from cseq import testing

pytest.importorskip("returnn")

from returnn.datasets.basic import DatasetSeq, init_dataset
from returnn.datasets.cached2 import CachedDataset2
from returnn.datasets.map import MapDatasetBase

from cseq.adapters.returnn import MultiProcDataset

TASK = {"class": "Task12AXDataset", "num_seqs": 23, "seq_ordering": "random"}


def pids(dataset):
    """Return the process ids of the workers that have started."""
    try:
        return [pid for pid in testing.pids(dataset) if pid is not None]
    except RuntimeError:
        return []


class Numbers(MapDatasetBase):
    """Sequence i is i % 4 + 1 frames of i."""

    def __init__(self, length=12):
        super().__init__({"data": {"shape": (None, 2)}, "name": {"shape": (None,), "dtype": "str"}})
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.load(index)
        data = np.full((index % 4 + 1, 2), index, np.float32)
        return {"data": data, "name": np.array([f"number {index}"])}

    def load(self, index):
        """Do what a subclass adds to loading."""

    def get_seq_len(self, index):
        return index % 4 + 1


class Shares(CachedDataset2):
    """Shard k has `sizes[k]` sequences, whose number is known if `known`."""

    def __init__(self, sizes, *, known, **kwargs):
        super().__init__(**kwargs)
        self.sizes = sizes
        self.known = known
        self.num_inputs = 1
        self.num_outputs = {"data": (1, 2)}

    def supports_sharding(self):
        return True

    def get_data_keys(self):
        return ["data"]

    def init_seq_order(self, epoch=None, seq_list=None, seq_order=None):
        super().init_seq_order(epoch, seq_list, seq_order)
        self._num_seqs = self.sizes[self._shard_index] if self.known else None
        return True

    def _collect_single_seq(self, seq_idx):
        if seq_idx >= self.sizes[self._shard_index]:
            return None
        data = np.full((1, 1), seq_idx, np.float32)
        return DatasetSeq(seq_idx, data, seq_tag=f"{self._shard_index}:{seq_idx}")


def numbers(kind=Numbers, *args, **options):
    """Return the plan of a dataset around a user's map."""
    made = functools.partial(kind, *args) if args else kind
    return {"class": "MapDatasetWrapper", "map_dataset": made, **options}


@pytest.fixture
def make():
    """Return a function that makes and initialises datasets; their workers end after the test.

    Workers start in the quickest way unless a test says otherwise.
    """
    made = []

    def make(plan, num_workers=2, buffer_size=3, **options):
        options = {"start_method": QUICKEST.start_method} | options
        options |= {"num_workers": num_workers, "buffer_size": buffer_size}
        made.append(init_dataset({"class": MultiProcDataset, "dataset": plan, **options}))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def sequences(dataset, epoch=1, number=0):
    """Read an epoch, or the current one for None, from a sequence on."""
    if epoch is not None:
        dataset.init_seq_order(epoch=epoch)
    keys = dataset.get_data_keys()
    found = []
    while dataset.is_less_than_num_seqs(number):
        dataset.load_seqs(number, number + 1)
        data = {key: dataset.get_data(number, key) for key in keys}
        found.append((dataset.get_tag(number), data))
        number += 1
    return found


def tags(dataset, epoch=1):
    """Read the tags of an epoch."""
    return [tag for tag, _ in sequences(dataset, epoch)]
