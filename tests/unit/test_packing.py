"""`packed`: a list of objects in one buffer that all processes share."""

import copy
import datetime as dt
import os
import pickle
import sys
from collections import deque

import numpy as np
import pytest
from kinds import KINDS
from travelling import Pair, Record, travel

import cseq

SAMPLES = [{"text": "a" * n, "label": n, "ids": [*range(n)]} for n in range(20)]
OBJECTS = [
    None, 7, b"", Record([Pair(1, "x")]), dt.date(2026, 1, 2), deque([1, 2]), np.float32, len,
    "ü" * 100_000,
]  # fmt: skip

# The items include the script's own class, a nested class, and a function.
SCRIPT = """
import re
import sys
import multiprocessing
from dataclasses import dataclass
import numpy as np
import cseq
@dataclass
class Sample:
    number: int
    @dataclass
    class Label:
        name: str
    def label(self):
        return Sample.Label(str(self.number))
def double(number):
    return 2 * number
def place():
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "cseq-packed" in line}
class Indexer:
    def __init__(self, samples):
        self.samples, self.part = samples, samples[10:]
    def __getitem__(self, indices):
        sample, label, function = self.samples[indices[0]]
        assert (sample.number, label.name) == (indices[0], str(indices[0]))
        assert function(1) == 2 and self.part[0][0].number == 10
        (inode,) = place()
        return np.array([int(inode), *indices])
def child(samples, queue):
    queue.put((samples[3][0].number, len(samples), place()))
if __name__ == "__main__":
    samples = cseq.packed((s, s.label(), double) for s in map(Sample, range(40)))
    (here,) = place()
    if sys.argv[1] == "multiprocessing":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(samples, queue))
        process.start()
        print(queue.get() == (3, 40, {here}))
        process.join()
    else:
        m = cseq.MPSequence(
            Indexer(samples), 40, 2, batch_size=4, out_type="null", start_method=sys.argv[1]
        )
        with m.start() as batches:
            seen = np.stack(list(batches))
        print({*seen[:, 0].tolist()} == {int(here)} and {*seen[:, 1:].flat} == {*range(40)})
"""


def test_it_is_a_sequence_of_the_items():
    """Length, indices, slices, iteration and membership are the list's; each item is new."""
    packed = cseq.packed(SAMPLES)
    packed[4]["ids"].append(9)
    assert packed[4] is not packed[4]
    assert len(packed) == 20
    assert [*packed] == SAMPLES
    assert [*reversed(packed)] == SAMPLES[::-1]
    assert packed[-1] == packed[np.int64(19)] == packed[np.uint8(19)] == SAMPLES[19]
    assert SAMPLES[3] in packed
    assert packed.index(SAMPLES[3]) == 3
    for items, index in ((packed, 20), (packed, -21), (packed, np.int64(20)), (packed[2:4], 2)):
        with pytest.raises(IndexError):
            items[index]


@pytest.mark.parametrize("part", [slice(3, 9), slice(None, None, -3), slice(-4, None), slice(5, 5)])
def test_a_slice_is_such_a_sequence(part):
    """Slices have the items of the list's slices, as do slices and copies of them."""
    packed = cseq.packed(SAMPLES)[part]
    assert type(packed) is type(cseq.packed([]))
    assert ([*packed], len(packed)) == (SAMPLES[part], len(SAMPLES[part]))
    assert [*packed[1::2]] == SAMPLES[part][1::2]
    assert [*pickle.loads(pickle.dumps(packed))] == SAMPLES[part]


@pytest.mark.parametrize("how", [copy.deepcopy, travel, lambda it: pickle.loads(pickle.dumps(it))])
def test_objects_of_any_kind_arrive(how):
    """Numbers, dataclasses, named tuples, classes, functions, long texts and empty lists arrive."""
    packed = cseq.packed(OBJECTS)
    assert [*how(packed)] == [*packed] == OBJECTS
    assert [*how(cseq.packed([]))] == []


def test_arrays_are_their_own_part():
    """A row is packed without the array that it is a view of, and is writable."""
    table = np.arange(200_000.0).reshape(200, 1000)
    packed = cseq.packed({"row": row, "sum": row.sum()} for row in table)
    assert len(pickle.dumps(packed)) < 1.1 * table.nbytes
    item = packed[7]
    item["row"] += 1
    assert item["row"].tolist() == (table[7] + 1).tolist()
    assert item["sum"] == table[7].sum()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_tensors_are_their_own_part(monkeypatch):
    """Rows of a tensor are packed alone, too, and still require gradients if they did."""
    torch = pytest.importorskip("torch")
    table = torch.arange(200_000.0).reshape(200, 1000)
    packed = cseq.packed(zip(table, table.T[:200], strict=True))
    assert len(pickle.dumps(packed)) < 1.5 * table.nbytes
    assert torch.equal(packed[7][0], table[7])
    assert torch.equal(packed[7][1], table[:, 7])
    scaled = torch.quantize_per_tensor(table, 0.5, 3, torch.qint8)
    # pickle searches all modules, and RETURNN's lazy ones would import TensorFlow.
    for name, module in list(sys.modules.items()):
        if type(module).__name__ == "_LazyLoader":
            monkeypatch.delitem(sys.modules, name)
    packed = cseq.packed(scaled)
    assert len(pickle.dumps(packed)) < 1.5 * scaled.nbytes
    assert torch.equal(packed[7].int_repr(), scaled[7].int_repr())
    weight = torch.ones(3, requires_grad=True)
    (again,) = cseq.packed([weight])
    assert torch.equal(again, weight)
    assert again.requires_grad


def test_an_item_that_cannot_be_pickled_is_named():
    """The message has the item's number, the part, and the remedy."""
    bad = iter([{"f": 1}, {"f": 2}, {"f": lambda: 0}])
    with pytest.raises(TypeError, match=r"^items\[2\]: .*lambda.*Items are stored as pickles"):
        cseq.packed(bad)


@pytest.mark.parametrize("items", [{"a": 1}, 5, None])
def test_what_has_no_order_is_refused(items):
    """A mapping would lose its values."""
    with pytest.raises(TypeError, match=f"items is a {type(items).__name__}; pass a list"):
        cseq.packed(items)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_workers_read_it(kind):
    """It serves as a data set for all kinds of workers."""
    dataset = cseq.from_dataset(
        cseq.packed((sample["text"], sample["label"]) for sample in SAMPLES)
    )
    with kind.start(dataset, None, batch_size=5, shuffle=False, dtype=None) as batches:
        labels = np.concatenate([labels for _, labels in batches])
    assert labels.tolist() == [*range(20)]


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn", "multiprocessing"])
def test_all_processes_map_one_file(run_script, how):
    """A worker has the trainer's pages, and its script's classes."""
    done = run_script(SCRIPT, how)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.needs("Linux")
def test_the_file_is_gone_with_the_last_slice():
    """The last slice frees its memory, and closes its descriptor."""

    def files():
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum("cseq-packed" in os.readlink(link) for link in links if os.path.lexists(link))

    part = cseq.packed(SAMPLES)[3:5]
    assert (files(), part[1]) == (1, SAMPLES[4])
    del part
    assert files() == 0
