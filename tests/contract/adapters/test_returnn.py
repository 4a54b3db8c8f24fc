"""RETURNN's `MultiProcDataset` on cseq: its promises, row by row."""

import copy
import gc
import inspect
import io
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import HAS_PROC
from kinds import FIRST_PROCESS, QUICKEST, assert_same, start_methods

pytest.importorskip("returnn")

from returnn.config import Config, global_config_ctx
from returnn.datasets import multi_proc
from returnn.datasets.basic import init_dataset
from returnn.datasets.cached2 import CachedDataset2

from cseq.adapters.returnn import MultiProcDataset
from returnn_data import TASK, Numbers, Shares, make, numbers, pids, sequences, tags


class Logged(Numbers):
    def __init__(self, folder, length=12):
        super().__init__(length)
        self.folder = Path(folder)

    def load(self, index):
        (self.folder / str(index)).touch()


class Who(Numbers):
    """The tags tell the process, and whether the dataset's array was copied."""

    def __init__(self, array):
        super().__init__()
        self.array = array

    def get_seq_tag(self, index):
        process, holder = multiprocessing.current_process(), self.array
        while isinstance(holder, (np.ndarray, memoryview)):
            holder = holder.base if isinstance(holder, np.ndarray) else holder.obj
        return f"{process.name}, daemon={process.daemon}, {type(holder).__name__}"


def test_it_is_a_dataset_with_the_original_s_arguments():
    """Arguments that may be positional have the original's names, order and defaults."""
    assert issubclass(MultiProcDataset, CachedDataset2)
    assert not issubclass(MultiProcDataset, multi_proc.MultiProcDataset)
    theirs = inspect.signature(multi_proc.MultiProcDataset).parameters.values()
    mine = inspect.signature(MultiProcDataset).parameters.values()
    positional = [(p.name, p.default) for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [(p.name, p.default) for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_are_handed_down():
    """The wrapped dataset gets the arguments of every dataset; its own entries take precedence."""
    plan = {**TASK, "partition_epoch": 2}
    dataset = MultiProcDataset(plan, 1, 1, partition_epoch=5, fixed_random_seed=7, _num_shards=3)
    seeds = {"fixed_random_seed": 7, "random_seed_offset": 0}
    assert dataset.dataset == {**plan, **seeds, "_num_shards": 3, "_shard_index": 0}
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
    """A constructor that fails raises; collecting the remains warns of nothing."""
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


def test_workers_start_when_they_are_needed_and_have_names(make):
    """No process runs before the first question; then N run, not daemonic, and with names.

    A large array in the plan is in memory once for any number of workers.
    """
    plan = numbers(Who, np.zeros(100_000))
    lazy = MultiProcDataset(plan, 2, 1, name="it")
    with pytest.raises(NotImplementedError):
        lazy.get_total_num_seqs(fast=True)
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
    """Workers find a class of the global configuration, as they have that configuration."""
    config = Config()
    config.load_file(io.StringIO(CONFIG))
    with global_config_ctx(config):
        dataset = make(numbers(config.typed_dict["Mine"]), start_method=start_method)
        assert [data["data"].item() for _, data in sequences(dataset)] == [42, 42, 42]


@pytest.mark.parametrize("plan", [TASK, numbers()])
def test_answers_are_the_wrapped_dataset_s(make, plan):
    """Keys, types, dimensions, labels, totals and tags equal the wrapped dataset's."""
    plain, dataset = init_dataset(plan), make(plan)
    for name in ("num_outputs", "num_inputs", "labels"):
        assert getattr(dataset, name) == getattr(plain, name)
    for name in ("data_keys", "total_num_seqs"):
        assert getattr(dataset, f"get_{name}")() == getattr(plain, f"get_{name}")()
    for name in ("supports_sharding", "have_corpus_seq_idx", "supports_seq_order_sorting"):
        assert getattr(dataset, name)() == getattr(plain, name)()
    assert dataset.get_target_list() == [key for key in plain.get_data_keys() if key != "data"]
    for key in plain.get_data_keys():
        assert dataset.get_data_dtype(key) == plain.get_data_dtype(key)
        assert dataset.is_data_sparse(key) == (plain.num_outputs[key][1] == 1)
        assert dataset.get_data_dim(key) == plain.num_outputs[key][0]
    assert dataset.get_total_num_seqs(fast=True) == plain.get_total_num_seqs()
    assert dataset.len_info().startswith("MultiProcDataset, sequences: ")
    try:
        expected = plain.get_all_tags()
    except NotImplementedError:
        # The second call checks that the answer is remembered.
        for _ in range(2):
            with pytest.raises(NotImplementedError):
                dataset.get_all_tags()
    else:
        assert dataset.get_all_tags() == expected


@pytest.mark.parametrize(
    ("num_workers", "kind"), [(1, QUICKEST), (2, FIRST_PROCESS), (5, QUICKEST)]
)
def test_the_order_is_the_wrapped_dataset_s(make, num_workers, kind):
    """For any number of workers, every epoch has the wrapped dataset's tags, types and values.

    The same holds for parts of epochs, more workers than sequences, and restarts in the middle.
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
    """A wrapped dataset may repeat itself, and may itself be of this class, in either method."""
    plan = {**TASK, "num_seqs": 3, "repeat_epoch": 3}
    expected = sequences(init_dataset(plan))
    assert len(expected) == 9
    for method in ("seq_order", "dedicated"):
        inner = {"class": MultiProcDataset, "dataset": plan, "num_workers": 2, "buffer_size": 1}
        dataset = make({**inner, "sharding_method": "seq_order"}, 1, sharding_method=method)
        assert_same(sequences(dataset), expected)


def test_given_orders(make):
    """`seq_order` and `seq_list` name the sequences of an epoch, in order.

    There are none before `init_seq_order`, nor if that has no arguments.
    """
    dataset = make(TASK)
    assert not dataset.is_less_than_num_seqs(0)
    for _ in range(2):
        assert (dataset.num_seqs, list(dataset.get_current_seq_order())) == (0, [])
        assert tags(dataset)
        dataset.init_seq_order()
    dataset.init_seq_order(epoch=1, seq_order=[5, 3, 1, 0])
    assert (dataset.num_seqs, list(dataset.get_current_seq_order())) == (4, [5, 3, 1, 0])
    assert tags(dataset, None) == ["seq-5", "seq-3", "seq-1", "seq-0"]
    dataset.init_seq_order(epoch=1, seq_list=["seq-7", "seq-2"])
    assert tags(dataset, None) == ["seq-7", "seq-2"]
    assert [dataset.get_corpus_seq_idx(n) for n in range(2)] == [7, 2]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_dedicated_covers_the_same_set(make, num_workers):
    """Each worker is a shard; the sequences are the same, in the announced order."""
    dataset = make(TASK, num_workers, sharding_method="dedicated")
    found = dict(sequences(dataset))
    plain = dict(sequences(init_dataset(TASK)))
    assert_same(sorted(found.items()), sorted(plain.items()))
    assert list(found) == [f"seq-{index}" for index in dataset.get_current_seq_order()]
    assert dataset.num_seqs == 23


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sizes", [[5, 7], [7, 5], [0, 3], [1, 0], [0, 0]])
def test_shards_may_be_of_any_size(make, sizes, known):
    """Rounds skip shards that have ended, even if the sizes are unknown.

    If an epoch's length is unknown, `complete_frac` is None where it must be exact.
    """
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
        dataset.load_seqs(0, 1)
        if expected:
            assert dataset.get_complete_frac(0, allow_only_lr_suitable=True) is None
            assert 0 < dataset.get_complete_frac(0) < 1
    assert tags(dataset, None) == expected
    assert dataset.num_seqs == sum(sizes)
    assert sum(dataset.get_num_timesteps().values()) == sum(sizes)
    with pytest.raises(NotImplementedError):
        dataset.get_current_seq_order()


def test_what_the_wrapped_dataset_cannot_do(make):
    """Shards without support, an unknown order and an empty order are errors."""
    dataset = make(numbers())
    assert not dataset.supports_sharding()
    with pytest.raises(AssertionError):
        dataset.set_sharding(num_shards=2, shard_index=0)
    with pytest.raises(NotImplementedError, match="sharding_method='dedicated'"):
        make({"class": Shares, "sizes": [3], "known": True}).init_seq_order(epoch=1)
    # RETURNN raises this one.
    with pytest.raises(AssertionError):
        make(numbers(Numbers, 0)).init_seq_order(epoch=1)


@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
@pytest.mark.parametrize("when", ["given", "before", "after", "copied"])
def test_sharding(make, method, when):
    """Shards are disjoint and cover everything, no matter when they are set."""
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


def test_the_buffer_is_bounded(make, tmp_path):
    """Until sequences are taken, each worker loads `buffer_size` of them, and no more."""
    dataset = make(numbers(Logged, str(tmp_path)), 2, 2)
    dataset.init_seq_order(epoch=1)
    # Both workers may be two sequences ahead of what was taken.
    for number in range(4):
        dataset.load_seqs(number, number + 1)
    assert {int(path.name) for path in tmp_path.iterdir()} <= set(range(8))
    assert tags(dataset) == [f"seq-{n}" for n in range(12)]


def test_complete_frac_never_falls(make):
    """The completed part of the epoch grows to 1."""
    dataset = make(TASK, 3)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 23)
    parts = [dataset.get_complete_frac(n, allow_only_lr_suitable=True) for n in range(23)]
    assert parts == sorted(parts)
    assert parts[0] > 0
    assert parts[-1] == 1


def test_loading(make):
    """`load_seqs` only moves forward; it may skip sequences, and go past the end."""
    expected = sequences(init_dataset(TASK))
    dataset = make(TASK, 2, 2)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(2, 4)
    assert [seq.seq_idx for seq in dataset.added_data] == [2, 3]
    dataset.load_seqs(3, 3)
    with pytest.raises(AssertionError):
        dataset.load_seqs(2, 3)
    dataset.load_seqs(20, 30)
    assert [seq.seq_tag for seq in dataset.added_data] == [tag for tag, _ in expected[20:]]
    assert not dataset.is_less_than_num_seqs(23)
    assert dataset.get_seq_length(22)["data"] == len(expected[22][1]["data"])


@pytest.mark.parametrize("state", ["new", "finished", "freed", "copied", "closed"])
@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
def test_answers_at_any_time(make, state, method):
    """Tags, totals and the order need no workers, and no datasets in workers.

    `close` ends the workers at once, may be called twice, and later use starts new ones.
    """
    dataset = make(numbers(Numbers, 7), 1, sharding_method=method)
    if state == "new":
        dataset.close()
        dataset = MultiProcDataset(numbers(Numbers, 7), 1, 1, method)
        dataset.finish_epoch(free_resources=True)
    else:
        dataset.init_seq_order(epoch=1, seq_order=[6, 2, 4])
    if state in ("freed", "finished"):
        dataset.finish_epoch(free_resources=state == "freed")
    if state in ("closed", "copied"):
        for _ in range(2):
            dataset.close()
            assert pids(dataset) == []
        with pytest.raises(RuntimeError, match="init_seq_order"):
            dataset.load_seqs(0, 1)
    if state == "copied":
        dataset = pickle.loads(pickle.dumps(dataset))
        assert (dataset.epoch, pids(dataset)) == (1, [])
    assert list(dataset.get_current_seq_order()) == ([] if state == "new" else [6, 2, 4])
    assert dataset.get_total_num_seqs() == 7
    assert dataset.get_all_tags() == [f"seq-{n}" for n in range(7)]
    assert len(tags(dataset, 2)) == 7
    dataset.close()


def test_finish_epoch(make):
    """After an epoch's end, the dataset is empty until the next one; the processes stay."""
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
    """A copy has the original's answers without workers of its own, and iterates independently.

    Repeated copies add nothing to the wrapped dataset's plan. Returned arrays belong to the user,
    even after the workers' end.
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
    for _, data in expected:
        data["data"] += 1
