"""RETURNN's `MultiProcDataset` on cseq: what it promises, row by row."""

import copy
import gc
import inspect
import io
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import HAS_PROC
from kinds import FIRST_PROCESS, QUICKEST, start_methods

pytest.importorskip("returnn")

from returnn.config import Config, global_config_ctx
from returnn.datasets import multi_proc
from returnn.datasets.basic import init_dataset
from returnn.datasets.cached2 import CachedDataset2

from cseq.adapters.returnn import MultiProcDataset

if TYPE_CHECKING:
    from conftest import RunScript
    from kinds import Kind
from returnn_data import (
    TASK,
    Gated,
    Numbers,
    Shares,
    assert_same,
    make,
    numbers,
    pids,
    sequences,
    tags,
)


class Logged(Numbers):
    """Leaves a file for each sequence that it loads."""

    def __init__(self, folder, length=12):
        super().__init__(length)
        self.folder = Path(folder)

    def load(self, index):
        (self.folder / str(index)).touch()


class Who(Numbers):
    """Tags tell the process, data whether the array that came with the dataset was copied."""

    def __init__(self, array):
        super().__init__()
        self.array = array

    def get_seq_tag(self, index):
        daemon = multiprocessing.current_process().daemon
        return f"{multiprocessing.current_process().name}, daemon={daemon}, {self._holder()}"

    def _holder(self):
        array = self.array
        while isinstance(array, (np.ndarray, memoryview)):
            array = array.base if isinstance(array, np.ndarray) else array.obj
        return type(array).__name__


# ── 1, 2: the class ────────────────────────────────────────────────────────────────────────


def test_it_is_a_dataset_with_the_original_s_arguments():
    """Arguments that may be given by position have the original's names, order and defaults."""
    assert issubclass(MultiProcDataset, CachedDataset2)
    assert not issubclass(MultiProcDataset, multi_proc.MultiProcDataset)
    theirs = inspect.signature(multi_proc.MultiProcDataset).parameters.values()
    mine = inspect.signature(MultiProcDataset).parameters.values()
    positional = [(p.name, p.default) for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [(p.name, p.default) for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_are_handed_down():
    """What every dataset takes is handed down to the wrapped one, whose own entries prevail."""
    plan = {**TASK, "partition_epoch": 2}
    dataset = MultiProcDataset(plan, 1, 1, partition_epoch=5, fixed_random_seed=7, _num_shards=3)
    assert dataset.dataset == {
        **plan,
        "fixed_random_seed": 7,
        "random_seed_offset": 0,
        "_num_shards": 3,
        "_shard_index": 0,
    }
    assert plan == {**TASK, "partition_epoch": 2}


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (AssertionError, {"num_workers": 0}),
        (AssertionError, {"buffer_size": 0}),
        (ValueError, {"sharding_method": "foo"}),
        (TypeError, {"no_such_argument": 1}),
    ],
)
def test_wrong_arguments_are_refused(error, arguments):
    """A constructor that fails raises, and nothing else: no warning when the rest is collected."""
    with pytest.raises(error):
        MultiProcDataset(**{"dataset": TASK, "num_workers": 1, "buffer_size": 1, **arguments})
    gc.collect()


def test_install(run_prepared):
    """After `install()`, the plain name is this class: here, in a wrapped plan, and by import."""
    script = """
from cseq.adapters.returnn import MultiProcDataset, install
install()
from returnn.datasets.basic import get_dataset_class, init_dataset
from returnn.datasets.multi_proc import MultiProcDataset as imported
assert imported is get_dataset_class("MultiProcDataset") is MultiProcDataset
inner = {"class": "Task12AXDataset", "num_seqs": 3}
for _ in range(2):
    inner = {"class": "MultiProcDataset", "dataset": inner, "num_workers": 1, "buffer_size": 1}
dataset = init_dataset(inner)
dataset.init_seq_order(epoch=1)
dataset.load_seqs(0, 3)
print(dataset.get_tag(2))
install()
"""
    done = run_prepared(script)
    assert done.stdout.endswith("seq-2\n"), done.stderr


def test_without_returnn(run_script):
    """Without RETURNN, the import says what to install."""
    script = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "returnn":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Without())
import cseq.adapters.returnn
"""
    assert "pip install 'cseq-loader[returnn]'" in run_script(script).stderr


# ── 3: processes ───────────────────────────────────────────────────────────────────────────


def test_workers_start_when_they_are_needed_and_have_names(make):
    """There are no processes before the first question; then there are N, not daemonic, named.

    A large array in the plan is in memory once, whatever the number of workers.
    """
    plan = numbers(Who, np.zeros(100_000))
    lazy = MultiProcDataset(plan, 2, 1, name="it")
    assert (pids(lazy), lazy.stats()) == ([], None)
    dataset = make(plan, name="it", start_method=FIRST_PROCESS.start_method)
    assert len(pids(dataset)) == 2
    assert tags(dataset)[:2] == [f"it worker proc {n}/2, daemon=False, Mapping" for n in (1, 2)]
    if HAS_PROC:
        comm = [Path(f"/proc/{pid}/comm").read_text() for pid in pids(dataset)]
        assert comm == ["MPD worker 0\n", "MPD worker 1\n"]


CONFIG = """#!returnn.py
import numpy
from returnn.datasets.map import MapDatasetBase

setting = 42

class Mine(MapDatasetBase):
    def __init__(self):
        super().__init__({"data": {"shape": (None, 1)}})
    def __len__(self):
        return 3
    def __getitem__(self, index):
        from returnn.config import get_global_config
        assert type(self) is get_global_config().typed_dict["Mine"]
        return {"data": numpy.full((1, 1), get_global_config().int("setting", 0))}
"""


@pytest.mark.parametrize("start_method", start_methods())
def test_the_configuration_is_there_first(make, start_method):
    """A class of the global configuration is found in workers, which have that configuration."""
    config = Config()
    config.load_file(io.StringIO(CONFIG))
    with global_config_ctx(config):
        dataset = make(numbers(config.typed_dict["Mine"]), start_method=start_method)
        assert [data["data"].item() for _, data in sequences(dataset)] == [42, 42, 42]


# ── 4: what is known of the wrapped dataset ────────────────────────────────────────────────


@pytest.mark.parametrize("plan", [TASK, numbers()])
def test_answers_are_the_wrapped_dataset_s(make, plan):
    """Keys, types, dimensions, labels, totals and tags are those of the wrapped dataset."""
    plain, dataset = init_dataset(plan), make(plan)
    assert dataset.num_outputs == plain.num_outputs
    assert dataset.num_inputs == plain.num_inputs
    assert dataset.labels == plain.labels
    assert dataset.get_data_keys() == plain.get_data_keys()
    assert dataset.get_target_list() == [key for key in plain.get_data_keys() if key != "data"]
    for key in plain.get_data_keys():
        assert dataset.get_data_dtype(key) == plain.get_data_dtype(key)
        assert dataset.is_data_sparse(key) == (plain.num_outputs[key][1] == 1)
        assert dataset.get_data_dim(key) == plain.num_outputs[key][0]
    assert dataset.get_total_num_seqs() == plain.get_total_num_seqs()
    assert dataset.get_total_num_seqs(fast=True) == plain.get_total_num_seqs()
    assert dataset.supports_sharding() == plain.supports_sharding()
    assert dataset.have_corpus_seq_idx() == plain.have_corpus_seq_idx()
    assert dataset.supports_seq_order_sorting() == plain.supports_seq_order_sorting()
    assert dataset.len_info().startswith("MultiProcDataset, sequences: ")
    try:
        expected = plain.get_all_tags()
    except NotImplementedError:
        for _ in range(2):  # the answer is remembered
            with pytest.raises(NotImplementedError):
                dataset.get_all_tags()
    else:
        assert dataset.get_all_tags() == expected


# ── 5, 8, 9: the order ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_workers", "kind"), [(1, QUICKEST), (2, FIRST_PROCESS), (5, QUICKEST)]
)
def test_the_order_is_the_wrapped_dataset_s(make, num_workers, kind):
    """Tags, types and values of every epoch are the wrapped dataset's, for any number of workers.

    Also with parts of epochs, with more workers than sequences, and begun anew in the middle.
    """
    plan = {**TASK, "partition_epoch": 6, "window": 3}
    plain, dataset = init_dataset(plan), make(plan, num_workers, start_method=kind.start_method)
    for epoch in (1, 2, 6, 7):
        assert_same(sequences(dataset, epoch), sequences(plain, epoch))
        assert dataset.num_seqs == plain.num_seqs
        assert dataset.get_total_num_seqs() == 23
    dataset.init_seq_order(epoch=3)
    dataset.load_seqs(0, 2)
    assert_same(sequences(dataset, 3), sequences(plain, 3))


def test_repeated_and_nested(make):
    """A wrapped dataset may repeat itself, and may be one of this class in either method."""
    plan = {**TASK, "num_seqs": 3, "repeat_epoch": 3}
    expected = sequences(init_dataset(plan))
    assert len(expected) == 9
    for method in ("seq_order", "dedicated"):
        inner = {"class": MultiProcDataset, "dataset": plan, "num_workers": 2, "buffer_size": 1}
        dataset = make({**inner, "sharding_method": "seq_order"}, 1, sharding_method=method)
        assert_same(sequences(dataset), expected)


def test_without_an_epoch_nothing_begins(make):
    """`init_seq_order()` leaves a dataset of no sequences."""
    dataset = make(TASK)
    assert dataset.num_seqs == 0
    assert not dataset.is_less_than_num_seqs(0)
    assert list(dataset.get_current_seq_order()) == []
    assert tags(dataset)
    dataset.init_seq_order()
    assert (dataset.num_seqs, list(dataset.get_current_seq_order())) == (0, [])


def test_given_orders(make):
    """`seq_order` and `seq_list` name the sequences of an epoch, in order."""
    dataset = make(TASK)
    dataset.init_seq_order(epoch=1, seq_order=[5, 3, 1, 0])
    assert (dataset.num_seqs, list(dataset.get_current_seq_order())) == (4, [5, 3, 1, 0])
    assert tags(dataset, None) == ["seq-5", "seq-3", "seq-1", "seq-0"]
    dataset.init_seq_order(epoch=1, seq_list=["seq-7", "seq-2"])
    assert tags(dataset, None) == ["seq-7", "seq-2"]
    assert [dataset.get_corpus_seq_idx(n) for n in range(2)] == [7, 2]


# ── 6: dedicated shards ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_dedicated_covers_the_same_set(make, num_workers):
    """Each worker is a shard: the same sequences, and the order that was announced."""
    dataset = make(TASK, num_workers, sharding_method="dedicated")
    found = dict(sequences(dataset))
    plain = dict(sequences(init_dataset(TASK)))
    assert_same(sorted(found.items()), sorted(plain.items()))
    assert list(found) == [f"seq-{index}" for index in dataset.get_current_seq_order()]
    assert dataset.num_seqs == 23


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sizes", [[5, 7], [7, 5], [0, 3], [1, 0], [0, 0]])
def test_shards_may_be_of_any_size(make, sizes, known):
    """Shards that end first are left out of the round, also if their sizes are not known."""
    plan = {"class": Shares, "sizes": sizes, "known": known}
    dataset = make(plan, sharding_method="dedicated")
    rounds = range(max(sizes))
    expected = [f"{shard}:{n}" for n in rounds for shard in range(2) if n < sizes[shard]]
    dataset.init_seq_order(epoch=1)
    if known:
        assert dataset.num_seqs == sum(sizes)
    else:
        with pytest.raises(NotImplementedError):
            _ = dataset.num_seqs
    assert tags(dataset, None) == expected
    assert dataset.num_seqs == sum(sizes)
    assert sum(dataset.get_num_timesteps().values()) == sum(sizes)
    with pytest.raises(NotImplementedError):
        dataset.get_current_seq_order()


def test_unknown_lengths_have_no_complete_frac(make):
    """Where a part of the epoch cannot be told, `complete_frac` is None where it must be exact."""
    plan = {"class": Shares, "sizes": [2, 2], "known": False}
    dataset = make(plan, sharding_method="dedicated")
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    assert dataset.get_complete_frac(0, allow_only_lr_suitable=True) is None
    assert 0 < dataset.get_complete_frac(0) < 1


def test_a_dataset_without_an_order_needs_dedicated(make):
    """Where the order cannot be told, the error names the other method."""
    dataset = make({"class": Shares, "sizes": [3], "known": True})
    with pytest.raises(NotImplementedError, match="sharding_method='dedicated'"):
        dataset.init_seq_order(epoch=1)


# ── 7: shards of the whole ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
@pytest.mark.parametrize("when", ["given", "before", "after", "copied"])
def test_sharding(make, method, when):
    """Shards are disjoint and cover everything, whenever they are set."""
    found = []
    for shard in range(2):
        options = {"_num_shards": 2, "_shard_index": shard} if when == "given" else {}
        dataset = make(TASK, sharding_method=method, **options)
        if when == "copied":
            dataset.close()
            dataset = pickle.loads(pickle.dumps(dataset))
        if when == "after":
            assert len(tags(dataset)) == 23
        if when != "given":
            dataset.set_sharding(num_shards=2, shard_index=shard)
        found.append(tags(dataset))
        dataset.close()
    assert [len(part) for part in found] == [12, 11]
    assert sorted(found[0] + found[1]) == sorted(f"seq-{n}" for n in range(23))


def test_a_dataset_that_cannot_be_sharded_is_not(make):
    """Sharding what does not support it is an AssertionError."""
    dataset = make(numbers())
    assert not dataset.supports_sharding()
    with pytest.raises(AssertionError):
        dataset.set_sharding(num_shards=2, shard_index=0)


# ── 10: ahead ──────────────────────────────────────────────────────────────────────────────


def test_the_buffer_is_bounded(make, tmp_path):
    """While nothing is taken, workers load `buffer_size` sequences each, and no more."""
    dataset = make(numbers(Logged, str(tmp_path)), 2, 2)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    dataset.load_seqs(1, 2)
    dataset.load_seqs(2, 3)  # both have been asked for two beyond what was taken of them
    dataset.load_seqs(3, 4)
    assert {int(path.name) for path in tmp_path.iterdir()} <= set(range(8))
    assert tags(dataset) == [f"seq-{n}" for n in range(12)]


@pytest.mark.needs("POSIX")
def test_what_is_loaded_is_served_while_the_next_is_loading(make, tmp_path):
    """A sequence that is ready does not wait for one that is being loaded."""
    os.mkfifo(tmp_path / "gate")
    dataset = make(numbers(Gated, str(tmp_path), 2), 1, 3)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 2)
    assert dataset.get_tag(1) == "seq-1"
    (tmp_path / "gate").write_bytes(b"")
    dataset.load_seqs(2, 3)
    assert dataset.get_tag(2) == "seq-2"


# ── 11, 17: what RETURNN asks of a dataset ─────────────────────────────────────────────────


def test_complete_frac_never_falls(make):
    """The completed part of the epoch grows, up to 1."""
    dataset = make(TASK, 3)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 23)
    parts = [dataset.get_complete_frac(n, allow_only_lr_suitable=True) for n in range(23)]
    assert parts == sorted(parts)
    assert parts[0] > 0
    assert parts[-1] == 1


def test_loading(make):
    """`load_seqs` goes forward only, may leave out any number of sequences, and past the end."""
    expected = sequences(init_dataset(TASK))
    dataset = make(TASK, 2, 2)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(2, 4)
    assert [seq.seq_idx for seq in dataset.added_data] == [2, 3]
    dataset.load_seqs(3, 3)
    with pytest.raises(AssertionError):
        dataset.load_seqs(2, 3)
    dataset.load_seqs(20, 30)  # by far more than the workers have ahead
    assert [seq.seq_tag for seq in dataset.added_data] == [tag for tag, _ in expected[20:]]
    assert not dataset.is_less_than_num_seqs(23)
    assert dataset.get_seq_length(22)["data"] == len(expected[22][1]["data"])


def test_arrays_can_be_written_to_and_stay(make):
    """What was handed out belongs to the user, after the workers' end too."""
    dataset = make(TASK)
    found = sequences(dataset)
    dataset.close()
    assert_same(found, sequences(init_dataset(TASK)))
    for _, data in found:
        data["data"] += 1


# ── 7 of D, 12, 13: before, after, copies ──────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["new", "finished", "freed", "copied", "closed"])
@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
def test_answers_at_any_time(make, state, method):
    """Tags, totals and the order can be asked for without workers, and without datasets in them."""
    dataset = make(numbers(Numbers, 7), 1, sharding_method=method)
    if state == "new":
        dataset.close()
        dataset = MultiProcDataset(numbers(Numbers, 7), 1, 1, method)
        dataset.finish_epoch(free_resources=True)
    else:
        dataset.init_seq_order(epoch=1, seq_order=[6, 2, 4])
    if state == "freed":
        dataset.finish_epoch(free_resources=True)
    if state == "finished":
        dataset.finish_epoch()
    if state == "closed":
        dataset.close()
    if state == "copied":
        dataset.close()
        dataset = pickle.loads(pickle.dumps(dataset))
        assert (dataset.epoch, pids(dataset)) == (1, [])
    assert list(dataset.get_current_seq_order()) == ([] if state == "new" else [6, 2, 4])
    assert dataset.get_total_num_seqs() == 7
    assert dataset.get_all_tags() == [f"seq-{n}" for n in range(7)]
    assert len(tags(dataset, 2)) == 7
    dataset.close()


def test_finish_epoch(make):
    """After an epoch's end there are no sequences until the next; the processes stay."""
    dataset = make(TASK)
    expected, workers = sequences(dataset), pids(dataset)
    for free in (False, True):
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 1)
        dataset.finish_epoch(free_resources=free)
        assert dataset.epoch is None
        assert not dataset.is_less_than_num_seqs(5)
        with pytest.raises(RuntimeError, match="init_seq_order"):
            dataset.load_seqs(1, 2)
        assert_same(sequences(dataset), expected)
    assert pids(dataset) == workers


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies(make, copied):
    """A copy knows what the original has learnt, starts no workers for it, and goes its own way.

    Nothing is added to the wrapped dataset's plan, however often it is copied.
    """
    dataset = make(TASK, timeout=60.0)
    expected, total = sequences(dataset), dataset.get_total_num_seqs()
    another = copied(copied(dataset))
    assert another.get_data_keys() == dataset.get_data_keys()
    assert (another.num_outputs, another.get_total_num_seqs()) == (dataset.num_outputs, total)
    assert another.dataset == dataset.dataset
    assert another.__reduce__()[1][1]["timeout"] == 60.0
    assert pids(another) == []
    dataset.close()
    assert_same(sequences(another), expected)
    another.close()


def test_fast_answers_start_no_workers():
    """`get_total_num_seqs(fast=True)` does not start workers for the answer."""
    dataset = MultiProcDataset(TASK, 1, 1)
    with pytest.raises(NotImplementedError):
        dataset.get_total_num_seqs(fast=True)
    assert pids(dataset) == []
