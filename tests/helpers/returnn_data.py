"""RETURNN data sets, and `MultiProcDataset` over them."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
from kinds import QUICKEST

import cseq
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


# ── datasets ───────────────────────────────────────────────────────────────────────────────


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


class Gated(Numbers):
    """Loads sequence `at` only after its first attempt, or after a gate has opened."""

    def __init__(self, folder, at):
        super().__init__()
        self.folder = Path(folder)
        self.at = at

    def load(self, index):
        if index != self.at or (self.folder / "again").exists():
            return
        (self.folder / "again").touch()
        # The fifo opens when a test writes to it.
        with open(self.folder / "gate", "rb") as gate:
            gate.read()


class Broken(Numbers):
    def load(self, index):
        if index == 5:
            raise LookupError("five is missing")


class BrokenFromTheStart(Numbers):
    def __init__(self):
        raise LookupError("nothing is there")


class Random(Numbers):
    """Sequences of what the global generators and cseq's own draw."""

    def __getitem__(self, index):
        drawn = [random.random(), np.random.random(), cseq.rng().random()]
        return {"data": np.array([drawn]), "name": np.array(["random"])}


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


class Breaking(Shares):
    """Shard 1 raises instead of returning its third sequence."""

    def _collect_single_seq(self, seq_idx):
        if (self._shard_index, seq_idx) == (1, 2):
            raise LookupError("two is missing")
        return super()._collect_single_seq(seq_idx)


def add_noise(data, *, rng, **_):
    """Augment, as a user of `PostprocessingDataset` would."""
    array = data.data["data"].raw_tensor
    data.data["data"].raw_tensor = array + rng.normal(size=array.shape).astype(array.dtype)
    return data


def numbers(kind=Numbers, *args, **options):
    """Return the plan of a dataset around a user's map."""
    made = functools.partial(kind, *args) if args else kind
    return {"class": "MapDatasetWrapper", "map_dataset": made, **options}


# ── the tests' actions ────────────────────────────────────────────────────────────────────────


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


def sequences(dataset, epoch=1):
    """Read an epoch, or the current one for None."""
    if epoch is not None:
        dataset.init_seq_order(epoch=epoch)
    keys = dataset.get_data_keys()
    found = []
    number = 0
    while dataset.is_less_than_num_seqs(number):
        dataset.load_seqs(number, number + 1)
        data = {key: dataset.get_data(number, key) for key in keys}
        found.append((dataset.get_tag(number), data))
        number += 1
    return found


def tags(dataset, epoch=1):
    """Read the tags of an epoch."""
    return [tag for tag, _ in sequences(dataset, epoch)]


def assert_same(found, expected):
    """Compare tags, keys, types and values."""
    assert [tag for tag, _ in found] == [tag for tag, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert list(mine) == list(theirs)
        for key, array in theirs.items():
            assert mine[key].dtype == array.dtype
            np.testing.assert_array_equal(mine[key], array)
