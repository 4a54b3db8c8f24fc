"""RETURNN's `MultiProcDataset` on cseq: what it promises, row by row."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import HAS_PROC
from interrupting import first_hits, interrupted
from killing import WORDS, await_death, kill
from kinds import FIRST_PROCESS, QUICKEST, start_methods

import cseq
from cseq import testing

pytest.importorskip("returnn")

from returnn.config import Config, global_config_ctx
from returnn.datasets import multi_proc
from returnn.datasets.basic import DatasetSeq, init_dataset
from returnn.datasets.cached2 import CachedDataset2
from returnn.datasets.map import MapDatasetBase

from cseq.adapters.returnn import MultiProcDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunScript
    from kinds import Kind

TASK = {"class": "Task12AXDataset", "num_seqs": 23, "seq_ordering": "random"}


# ── datasets ───────────────────────────────────────────────────────────────────────────────


class Numbers(MapDatasetBase):
    """Sequence i is i % 4 + 1 frames of i."""

    def __init__(self, length: int = 12) -> None:
        super().__init__({"data": {"shape": (None, 2)}, "name": {"shape": (None,), "dtype": "str"}})
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.load(index)
        data = np.full((index % 4 + 1, 2), index, np.float32)
        return {"data": data, "name": np.array([f"number {index}"])}

    def load(self, index: int) -> None:
        """What else happens."""

    def get_seq_len(self, index: int) -> int:
        return index % 4 + 1


class Logged(Numbers):
    """Leaves a file for each sequence that it loads."""

    def __init__(self, folder: str, length: int = 12) -> None:
        super().__init__(length)
        self.folder = Path(folder)

    def load(self, index: int) -> None:
        (self.folder / str(index)).touch()


class Gated(Numbers):
    """Loads sequence `at` only when its first attempt is over, or a gate has been opened."""

    def __init__(self, folder: str, at: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.at = at

    def load(self, index: int) -> None:
        if index != self.at or (self.folder / "again").exists():
            return
        (self.folder / "again").touch()
        with open(self.folder / "gate", "rb") as gate:  # a fifo: opens when somebody writes
            gate.read()


class Broken(Numbers):
    """Raises at sequence 5."""

    def load(self, index: int) -> None:
        if index == 5:
            raise LookupError("five is missing")


class BrokenFromTheStart(Numbers):
    """Raises when it is made."""

    def __init__(self) -> None:
        raise LookupError("nothing is there")


class Random(Numbers):
    """Sequences of what the global generators draw, and cseq's own."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        drawn = [random.random(), np.random.random(), cseq.rng().random()]
        return {"data": np.array([drawn]), "name": np.array(["random"])}


class Who(Numbers):
    """Tags tell the process, data whether the array that came with the dataset was copied."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__()
        self.array = array

    def get_seq_tag(self, index: int) -> str:
        daemon = multiprocessing.current_process().daemon
        return f"{multiprocessing.current_process().name}, daemon={daemon}, {self._holder()}"

    def _holder(self) -> str:
        array: Any = self.array
        while isinstance(array, (np.ndarray, memoryview)):
            array = array.base if isinstance(array, np.ndarray) else array.obj
        return type(array).__name__


class Shares(CachedDataset2):
    """Shard k has `sizes[k]` sequences, and knows that or not."""

    def __init__(self, sizes: list[int], *, known: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes = sizes
        self.known = known
        self.num_inputs = 1
        self.num_outputs = {"data": (1, 2)}

    def supports_sharding(self) -> bool:
        return True

    def get_data_keys(self) -> list[str]:
        return ["data"]

    def init_seq_order(
        self, epoch: Any = None, seq_list: Any = None, seq_order: Any = None
    ) -> bool:
        super().init_seq_order(epoch, seq_list, seq_order)
        self._num_seqs = self.sizes[self._shard_index] if self.known else None
        return True

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        if seq_idx >= self.sizes[self._shard_index]:
            return None
        data = np.full((1, 1), seq_idx, np.float32)
        return DatasetSeq(seq_idx, data, seq_tag=f"{self._shard_index}:{seq_idx}")


class Breaking(Shares):
    """Shard 1 raises in the place of its third sequence."""

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        if (self._shard_index, seq_idx) == (1, 2):
            raise LookupError("two is missing")
        return super()._collect_single_seq(seq_idx)


class Own(CachedDataset2):
    """Sequences of what its own generators draw, as in RETURNN's datasets of audio and text."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_inputs = 2
        self.num_outputs = {"data": (2, 2)}
        self._audio_random = np.random.RandomState(1)
        self.targets = self
        self.rnd = np.random.RandomState(1)

    def set_random_seed(self, seed: int) -> None:
        self.rnd.seed(seed)

    def get_data_keys(self) -> list[str]:
        return ["data"]

    def get_current_seq_order(self) -> Any:
        return self.order

    def init_seq_order(self, epoch: Any = None, seq_order: Any = None, **given: Any) -> bool:
        super().init_seq_order(epoch, **given)
        self.order = range(5) if seq_order is None else seq_order
        self._num_seqs = len(self.order)
        return True

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        drawn = [self._audio_random.random_sample(), self.rnd.random_sample()]
        return DatasetSeq(seq_idx, np.array([drawn]), seq_tag=f"seq-{self.order[seq_idx]}")


def add_noise(data: Any, *, rng: np.random.RandomState, **_: Any) -> Any:
    """Augment, as a user of `PostprocessingDataset` does."""
    array = data.data["data"].raw_tensor
    data.data["data"].raw_tensor = array + rng.normal(size=array.shape).astype(array.dtype)
    return data


def numbers(kind: Any = Numbers, *args: Any, **options: Any) -> dict[str, Any]:
    """Return the plan of a dataset around a map of one's own."""
    made = functools.partial(kind, *args) if args else kind
    return {"class": "MapDatasetWrapper", "map_dataset": made, **options}


# ── what tests do with them ────────────────────────────────────────────────────────────────


@pytest.fixture
def make() -> Iterator[Any]:
    """Return what makes and initialises datasets, and ends their workers afterwards.

    Workers are started in the quickest way where nothing else is said.
    """
    made = []

    def make(
        plan: dict[str, Any], num_workers: int = 2, buffer_size: int = 3, **options: Any
    ) -> Any:
        options = {"start_method": QUICKEST.start_method} | options
        options |= {"num_workers": num_workers, "buffer_size": buffer_size}
        made.append(init_dataset({"class": MultiProcDataset, "dataset": plan, **options}))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def sequences(dataset: Any, epoch: int | None = 1) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Read an epoch, or the one that is under way (None)."""
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


def tags(dataset: Any, epoch: int | None = 1) -> list[str]:
    """Read an epoch's tags."""
    return [tag for tag, _ in sequences(dataset, epoch)]


def assert_same(found: Any, expected: Any) -> None:
    """Compare tags, keys, types and values."""
    assert [tag for tag, _ in found] == [tag for tag, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert list(mine) == list(theirs)
        for key, array in theirs.items():
            assert mine[key].dtype == array.dtype
            np.testing.assert_array_equal(mine[key], array)


# ── 1, 2: the class ────────────────────────────────────────────────────────────────────────


def test_it_is_a_dataset_with_the_original_s_arguments() -> None:
    """Arguments that may be given by position have the original's names, order and defaults."""
    assert issubclass(MultiProcDataset, CachedDataset2)
    assert not issubclass(MultiProcDataset, multi_proc.MultiProcDataset)
    theirs = inspect.signature(multi_proc.MultiProcDataset).parameters.values()
    mine = inspect.signature(MultiProcDataset).parameters.values()
    positional = [(p.name, p.default) for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [(p.name, p.default) for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_are_handed_down() -> None:
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
def test_wrong_arguments_are_refused(error: type[Exception], arguments: dict[str, Any]) -> None:
    """A constructor that fails raises, and nothing else: no warning when the rest is collected."""
    with pytest.raises(error):
        MultiProcDataset(**{"dataset": TASK, "num_workers": 1, "buffer_size": 1, **arguments})
    gc.collect()


def test_install(run_script: RunScript) -> None:
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
    done = run_script(script)
    assert done.stdout.endswith("seq-2\n"), done.stderr


def test_without_returnn(run_script: RunScript) -> None:
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


def test_workers_start_when_they_are_needed_and_have_names(make: Any) -> None:
    """There are no processes before the first question; then there are N, not daemonic, named.

    A large array in the plan is in memory once, whatever the number of workers.
    """
    plan = numbers(Who, np.zeros(100_000))
    lazy = MultiProcDataset(plan, 2, 1, name="it")
    assert (lazy.pids(), lazy.stats()) == ([], None)
    dataset = make(plan, name="it", start_method=FIRST_PROCESS.start_method)
    assert len(dataset.pids()) == 2
    assert tags(dataset)[:2] == [f"it worker proc {n}/2, daemon=False, Mapping" for n in (1, 2)]
    if HAS_PROC:
        comm = [Path(f"/proc/{pid}/comm").read_text() for pid in dataset.pids()]
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
def test_the_configuration_is_there_first(make: Any, start_method: str) -> None:
    """A class of the global configuration is found in workers, which have that configuration."""
    config = Config()
    config.load_file(io.StringIO(CONFIG))
    with global_config_ctx(config):
        dataset = make(numbers(config.typed_dict["Mine"]), start_method=start_method)
        assert [data["data"].item() for _, data in sequences(dataset)] == [42, 42, 42]


# ── 4: what is known of the wrapped dataset ────────────────────────────────────────────────


@pytest.mark.parametrize("plan", [TASK, numbers()])
def test_answers_are_the_wrapped_dataset_s(make: Any, plan: dict[str, Any]) -> None:
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
def test_the_order_is_the_wrapped_dataset_s(make: Any, num_workers: int, kind: Kind) -> None:
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


def test_repeated_and_nested(make: Any) -> None:
    """A wrapped dataset may repeat itself, and may be one of this class in either method."""
    plan = {**TASK, "num_seqs": 3, "repeat_epoch": 3}
    expected = sequences(init_dataset(plan))
    assert len(expected) == 9
    for method in ("seq_order", "dedicated"):
        inner = {"class": MultiProcDataset, "dataset": plan, "num_workers": 2, "buffer_size": 1}
        dataset = make({**inner, "sharding_method": "seq_order"}, 1, sharding_method=method)
        assert_same(sequences(dataset), expected)


def test_without_an_epoch_nothing_begins(make: Any) -> None:
    """`init_seq_order()` leaves a dataset of no sequences."""
    dataset = make(TASK)
    assert dataset.num_seqs == 0
    assert not dataset.is_less_than_num_seqs(0)
    assert list(dataset.get_current_seq_order()) == []
    assert tags(dataset)
    dataset.init_seq_order()
    assert (dataset.num_seqs, list(dataset.get_current_seq_order())) == (0, [])


def test_given_orders(make: Any) -> None:
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
def test_dedicated_covers_the_same_set(make: Any, num_workers: int) -> None:
    """Each worker is a shard: the same sequences, and the order that was announced."""
    dataset = make(TASK, num_workers, sharding_method="dedicated")
    found = dict(sequences(dataset))
    plain = dict(sequences(init_dataset(TASK)))
    assert_same(sorted(found.items()), sorted(plain.items()))
    assert list(found) == [f"seq-{index}" for index in dataset.get_current_seq_order()]
    assert dataset.num_seqs == 23


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sizes", [[5, 7], [7, 5], [0, 3], [1, 0], [0, 0]])
def test_shards_may_be_of_any_size(make: Any, sizes: list[int], known: bool) -> None:
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


def test_unknown_lengths_have_no_complete_frac(make: Any) -> None:
    """Where a part of the epoch cannot be told, `complete_frac` is None where it must be exact."""
    plan = {"class": Shares, "sizes": [2, 2], "known": False}
    dataset = make(plan, sharding_method="dedicated")
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    assert dataset.get_complete_frac(0, allow_only_lr_suitable=True) is None
    assert 0 < dataset.get_complete_frac(0) < 1


def test_a_dataset_without_an_order_needs_dedicated(make: Any) -> None:
    """Where the order cannot be told, the error names the other method."""
    dataset = make({"class": Shares, "sizes": [3], "known": True})
    with pytest.raises(NotImplementedError, match="sharding_method='dedicated'"):
        dataset.init_seq_order(epoch=1)


# ── 7: shards of the whole ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
@pytest.mark.parametrize("when", ["given", "before", "after", "copied"])
def test_sharding(make: Any, method: str, when: str) -> None:
    """Shards are disjoint and cover everything, whenever they are set."""
    found: list[list[str]] = []
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


def test_a_dataset_that_cannot_be_sharded_is_not(make: Any) -> None:
    """Sharding what does not support it is an AssertionError."""
    dataset = make(numbers())
    assert not dataset.supports_sharding()
    with pytest.raises(AssertionError):
        dataset.set_sharding(num_shards=2, shard_index=0)


# ── 10: ahead ──────────────────────────────────────────────────────────────────────────────


def test_the_buffer_is_bounded(make: Any, tmp_path: Path) -> None:
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
def test_what_is_loaded_is_served_while_the_next_is_loading(make: Any, tmp_path: Path) -> None:
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


def test_complete_frac_never_falls(make: Any) -> None:
    """The completed part of the epoch grows, up to 1."""
    dataset = make(TASK, 3)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 23)
    parts = [dataset.get_complete_frac(n, allow_only_lr_suitable=True) for n in range(23)]
    assert parts == sorted(parts)
    assert parts[0] > 0
    assert parts[-1] == 1


def test_loading(make: Any) -> None:
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


def test_arrays_can_be_written_to_and_stay(make: Any) -> None:
    """What was handed out belongs to the user, after the workers' end too."""
    dataset = make(TASK)
    found = sequences(dataset)
    dataset.close()
    assert_same(found, sequences(init_dataset(TASK)))
    for _, data in found:
        data["data"] += 1


def test_batches(make: Any) -> None:
    """RETURNN's own batching gives the same batches as of the wrapped dataset."""

    def batches(dataset: Any) -> list[Any]:
        dataset.init_seq_order(epoch=1)
        made = dataset.generate_batches(recurrent_net=True, batch_size=500, max_seqs=4)
        found = []
        while made.has_more():
            [batch] = made.peek_next_n(1)
            found.append([(part.seq_idx, part.frame_length["data"]) for part in batch.seqs])
            made.advance(1)
        return found

    assert batches(make(TASK)) == batches(init_dataset(TASK))


# ── 7 of D, 12, 13: before, after, copies ──────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["new", "finished", "freed", "copied", "closed"])
@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
def test_answers_at_any_time(make: Any, state: str, method: str) -> None:
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
        assert (dataset.epoch, dataset.pids()) == (1, [])
    assert list(dataset.get_current_seq_order()) == ([] if state == "new" else [6, 2, 4])
    assert dataset.get_total_num_seqs() == 7
    assert dataset.get_all_tags() == [f"seq-{n}" for n in range(7)]
    assert len(tags(dataset, 2)) == 7
    dataset.close()


def test_finish_epoch(make: Any) -> None:
    """After an epoch's end there are no sequences until the next; the processes stay."""
    dataset = make(TASK)
    expected, pids = sequences(dataset), dataset.pids()
    for free in (False, True):
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 1)
        dataset.finish_epoch(free_resources=free)
        assert dataset.epoch is None
        assert not dataset.is_less_than_num_seqs(5)
        with pytest.raises(RuntimeError, match="init_seq_order"):
            dataset.load_seqs(1, 2)
        assert_same(sequences(dataset), expected)
    assert dataset.pids() == pids


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies(make: Any, copied: Any) -> None:
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
    assert another.pids() == []
    dataset.close()
    assert_same(sequences(another), expected)
    another.close()


def test_fast_answers_start_no_workers() -> None:
    """`get_total_num_seqs(fast=True)` does not start workers for the answer."""
    dataset = MultiProcDataset(TASK, 1, 1)
    with pytest.raises(NotImplementedError):
        dataset.get_total_num_seqs(fast=True)
    assert dataset.pids() == []


# ── 14: errors, deaths, time ───────────────────────────────────────────────────────────────


def test_an_exception_of_a_sequence(make: Any) -> None:
    """It arrives as itself, with the worker's traceback and number; the next epoch is fine."""
    dataset = make(numbers(Broken))
    dataset.init_seq_order(epoch=1)
    with pytest.raises(LookupError, match="five is missing") as caught:
        tags(dataset, None)
    assert caught.value.__cause__.worker == 1
    assert "LookupError" in str(caught.value)
    with pytest.raises(RuntimeError, match="five is missing"):
        dataset.load_seqs(5, 6)
    dataset.init_seq_order(epoch=2, seq_order=[4, 3, 2])
    assert tags(dataset, None) == ["seq-4", "seq-3", "seq-2"]


def test_an_exception_at_the_start() -> None:
    """A wrapped dataset that cannot be made raises what it raises, at every attempt."""
    dataset = MultiProcDataset(numbers(BrokenFromTheStart), 2, 1)
    for _ in range(2):
        with pytest.raises(LookupError, match="nothing is there") as caught:
            dataset.initialize()
        assert caught.value.__cause__.worker == 0
    dataset.close()


def test_an_empty_dataset(make: Any) -> None:
    """RETURNN refuses to order no sequences; its AssertionError arrives."""
    dataset = make(numbers(Numbers, 0))
    with pytest.raises(AssertionError):
        dataset.init_seq_order(epoch=1)


@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
def test_a_killed_worker_is_replaced(make: Any, method: str) -> None:
    """Its sequences are loaded again: the stream does not show it."""
    plan = TASK if method == "seq_order" else {"class": Shares, "sizes": [9, 14], "known": False}
    dataset = make(plan, sharding_method=method)
    expected = sequences(dataset)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 8)
    for pid in dataset.pids():
        kill(pid)
    dataset.load_seqs(8, 9)
    rest = [(seq.seq_tag, dict(seq.features)) for seq in dataset.added_data]
    while dataset.is_less_than_num_seqs(8 + len(rest)):
        dataset.load_seqs(8 + len(rest), 9 + len(rest))
        rest += [(seq.seq_tag, dict(seq.features)) for seq in dataset.added_data]
    assert_same(rest, [(tag, {k: data[k] for k in rest[0][1]}) for tag, data in expected[8:]])
    assert dataset.stats().restarts >= 1


def test_cseq_testing_knows_its_workers(make: Any) -> None:
    """They can be killed by their numbers, as long as they run."""
    dataset = make(TASK)
    expected = sequences(dataset)
    testing.await_workers(dataset)
    assert testing.kill(dataset, 1) == dataset.pids()[1]
    while not dataset.stats().restarts:
        time.sleep(0.001)
    assert_same(sequences(dataset), expected)
    dataset.close()
    with pytest.raises(RuntimeError, match="not running"):
        testing.pids(dataset)


def test_deaths_can_be_errors(make: Any) -> None:
    """With `max_restarts=0`, a killed worker is a WorkerDied that names it; then all is well."""
    dataset = make(TASK, 2, 1, max_restarts=0)
    dataset.init_seq_order(epoch=1)
    kill(dataset.pids()[1])
    with pytest.raises(cseq.WorkerDied, match=f"worker 1 {WORDS}") as caught:
        dataset.load_seqs(0, 23)
    assert caught.value.worker == 1
    assert len(tags(dataset)) == 23


@pytest.mark.needs("POSIX")
def test_a_worker_that_hangs(make: Any, tmp_path: Path) -> None:
    """`timeout` bounds a sequence: an error that shows where the worker is, or another attempt."""
    os.mkfifo(tmp_path / "gate")
    dataset = make(numbers(Gated, str(tmp_path), 2), timeout=0.3)
    with pytest.raises(cseq.WorkerTimeout, match="is here"):
        tags(dataset)
    assert dataset.pids() == []
    (tmp_path / "again").unlink(missing_ok=True)
    dataset = make(numbers(Gated, str(tmp_path), 2), timeout=3.0, on_timeout="restart")
    assert len(tags(dataset)) == 12
    assert dataset.stats().restarts == 1


STEPS = ("adapters/returnn/__init__.py", "stream.py", "transport.py", "codec.py")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("buffer_size", "start"), [(1, 2), (8, 2), (1, 4)])
def test_ctrl_c_anywhere_in_loading(make: Any, buffer_size: int, start: int, known: bool) -> None:
    """Wherever in `load_seqs` a signal handler raises: the next call goes on as if nothing was."""
    plan = {"class": Shares, "sizes": [3, 4], "known": known}
    dataset = make(plan, 2, buffer_size, sharding_method="dedicated")
    expected = tags(dataset)

    def step(countdown: int) -> bool:
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 2)
        with interrupted(countdown, *STEPS) as struck:
            dataset.load_seqs(start, 9)
        dataset.load_seqs(start, 9)
        assert [seq.seq_idx for seq in dataset.added_data] == list(range(start, 7))
        assert [seq.seq_tag for seq in dataset.added_data] == expected[start:]
        assert dataset.num_seqs == 7
        assert dataset.get_num_timesteps()["data"] == 7
        return struck.is_set()

    assert first_hits(step) > 50


@pytest.mark.parametrize("buffer_size", [1, 8])
def test_ctrl_c_does_not_hide_an_exception(make: Any, buffer_size: int) -> None:
    """Wherever it comes: after an exception no epoch ends as if it had been whole."""
    plan = {"class": Breaking, "sizes": [9, 9], "known": False}
    dataset = make(plan, 2, buffer_size, sharding_method="dedicated")

    def step(countdown: int) -> bool:
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 4)
        with interrupted(countdown, *STEPS) as struck, pytest.raises(LookupError):
            dataset.load_seqs(4, 18)
        for _ in range(2):
            with pytest.raises((LookupError, RuntimeError), match="two is missing"):
                dataset.load_seqs(4, 18)
        assert [seq.seq_idx for seq in dataset.added_data] == [4]
        return struck.is_set()

    assert first_hits(step) > 10


def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch(make: Any) -> None:
    """Wherever in `init_seq_order` it comes: no epoch is under way, or the new one."""
    dataset = make(TASK, 2, 2)
    expected = [None, tags(dataset, 1), tags(dataset, 2)]

    def step(countdown: int) -> bool:
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 3)
        with interrupted(countdown, "adapters/returnn/__init__.py") as struck:
            dataset.init_seq_order(epoch=2)
        try:
            got = tags(dataset, None)
        except (RuntimeError, AssertionError):
            assert struck.is_set()
        else:
            assert got in ([], expected[2])
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(22, 23)
        assert dataset.get_tag(22) == expected[1][-1]
        return struck.is_set()

    assert first_hits(step) > 20


# ── 9 of D: randomness ─────────────────────────────────────────────────────────────────────

POSTPROCESSED = {
    "class": "PostprocessingDataset",
    "dataset": {**TASK, "num_seqs": 7},
    "map_seq": add_noise,
}


@pytest.mark.parametrize(
    "plan",
    [
        numbers(Random),
        {"class": Own},
        POSTPROCESSED,
        {"class": "MetaDataset", "inner": POSTPROCESSED},
    ],
)
def test_augmentation_does_not_depend_on_the_number_of_workers(
    make: Any, plan: dict[str, Any]
) -> None:
    """It differs between sequences and epochs; any workers draw the same, also after a death."""
    if plan["class"] == "MetaDataset":
        data = {key: ("inner", key) for key in ("data", "classes")}
        plan = {"class": "MetaDataset", "datasets": {"inner": plan["inner"]}, "data_map": data}
    dataset = make(plan, 1)
    expected = sequences(dataset)
    assert len({data["data"].tobytes() for _, data in expected}) == len(expected)
    assert not np.array_equal(sequences(dataset, 2)[0][1]["data"], expected[0][1]["data"])
    dataset = make(plan, 2, 1)
    assert_same(sequences(dataset), expected)
    dataset.init_seq_order(epoch=1)
    kill(dataset.pids()[0])
    assert_same(sequences(dataset, None), expected)


# ── 15: in other processes ─────────────────────────────────────────────────────────────────


@pytest.mark.needs("fork")
def test_in_a_worker_of_a_data_loader(make: Any) -> None:
    """A dataset works in torch's workers, which are daemonic: as a copy, or forked with them."""
    data = pytest.importorskip("torch.utils.data")
    expected = tags(init_dataset(TASK))

    class Tags(data.IterableDataset):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[str]:
            yield from tags(self.dataset)
            self.dataset.close()

    dataset = make(TASK)
    assert tags(dataset) == expected  # its workers run, and stay this process's own
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
    assert list(data.DataLoader(Tags(dataset), **options)) == expected
    assert tags(dataset) == expected


def test_in_another_thread(make: Any) -> None:
    """Sequences may be loaded by another thread than the one that began the epoch."""
    dataset = make(TASK)
    dataset.init_seq_order(epoch=1)
    thread = threading.Thread(target=dataset.load_seqs, args=(0, 5))
    thread.start()
    thread.join()
    assert dataset.get_tag(4) == tags(init_dataset(TASK))[4]


# ── 16: the end ────────────────────────────────────────────────────────────────────────────


def test_closing(make: Any) -> None:
    """`close` ends the workers at once, twice is fine, and a later use starts new ones."""
    dataset = make(TASK)
    expected = tags(dataset)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    for _ in range(2):
        dataset.close()
        assert dataset.pids() == []
    with pytest.raises(RuntimeError, match="init_seq_order"):
        dataset.load_seqs(1, 2)
    assert tags(dataset) == expected


def test_a_dataset_that_is_dropped_ends_its_workers() -> None:
    """The workers go with the last reference, without a garbage collection."""
    dataset = init_dataset(
        {"class": MultiProcDataset, "dataset": TASK, "num_workers": 2, "buffer_size": 1}
    )
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 3)
    pids = dataset.pids()
    del dataset
    for pid in pids:  # another thread sees to it
        await_death(pid)


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), KILL)", "os._exit(0)"])
def test_no_process_outlives_the_trainer(run_script: RunScript, end: str) -> None:
    """At a normal end, at `os._exit` and at SIGKILL alike: who holds its output has gone."""
    script = f"""
import os
from cseq.launcher.base import KILL
from cseq.adapters.returnn import MultiProcDataset
plan = {{"class": "Task12AXDataset", "num_seqs": 9}}
inner = {{"class": MultiProcDataset, "dataset": plan, "num_workers": 1, "buffer_size": 1}}
dataset = MultiProcDataset(inner, 2, 2)
dataset.initialize()
dataset.init_seq_order(epoch=1)
dataset.load_seqs(0, 4)
print(dataset.get_tag(3), flush=True)
{end}
"""
    done = run_script(script)
    assert done.stdout.endswith("seq-3\n"), done.stderr
    assert "Traceback" not in done.stderr
