"""Exceptions, deaths, Ctrl-C and ends in `cseq.adapters.returnn`."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from interrupting import first_hits, in_shares, interrupted
from killing import WORDS, await_death, kill
from kinds import assert_same
from streaming import STEPS

import cseq
from cseq import testing

pytest.importorskip("returnn")

from returnn.datasets.basic import init_dataset

from cseq.adapters.returnn import MultiProcDataset
from returnn_data import TASK, Numbers, Shares, make, numbers, pids, sequences, tags


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


def test_an_exception_of_a_sequence(make):
    """The exception keeps its type, with the worker's traceback and number; a new epoch works."""
    dataset = make(numbers(Broken))
    dataset.init_seq_order(epoch=1)
    with pytest.raises(LookupError, match="five is missing") as caught:
        tags(dataset, None)
    assert caught.value.__cause__.worker == 1
    assert "LookupError" in caught.value.__cause__.args[0]
    with pytest.raises(RuntimeError, match="init_seq_order"):
        dataset.load_seqs(5, 6)
    dataset.init_seq_order(epoch=2, seq_order=[4, 3, 2])
    assert tags(dataset, None) == ["seq-4", "seq-3", "seq-2"]


def test_an_exception_at_the_start():
    """If a wrapped dataset cannot be made, every attempt raises its exception."""
    dataset = MultiProcDataset(numbers(BrokenFromTheStart), 2, 1)
    for _ in range(2):
        with pytest.raises(LookupError, match="nothing is there") as caught:
            dataset.initialize()
        assert caught.value.__cause__.worker == 0
    dataset.close()


@pytest.mark.parametrize("method", ["seq_order", "dedicated"])
def test_a_killed_worker_is_replaced(make, method):
    """The replacement loads the sequences again, so the stream is unchanged."""
    plan = TASK if method == "seq_order" else {"class": Shares, "sizes": [9, 14], "known": False}
    dataset = make(plan, sharding_method=method)
    expected = sequences(dataset)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 8)
    for pid in pids(dataset):
        kill(pid)
    assert_same(sequences(dataset, None, 8), expected[8:])
    assert dataset.stats().restarts >= 1


def test_deaths_can_be_errors(make):
    """With `max_restarts=0`, a killed worker raises WorkerDied with its name; a new epoch works."""
    dataset = make(TASK, 2, 1, max_restarts=0)
    dataset.init_seq_order(epoch=1)
    testing.kill(dataset, 1)
    with pytest.raises(cseq.WorkerDied, match=f"worker 1 {WORDS}") as caught:
        dataset.load_seqs(0, 23)
    assert caught.value.worker == 1
    assert len(tags(dataset)) == 23


@pytest.mark.needs("POSIX")
def test_a_worker_that_hangs(make, tmp_path):
    """`timeout` bounds a sequence: an error shows where the worker is, or it gets a new attempt."""
    os.mkfifo(tmp_path / "gate")
    dataset = make(numbers(Gated, str(tmp_path), 2), timeout=0.3)
    with pytest.raises(cseq.WorkerTimeout, match=r"stack of (its thread|worker)"):
        tags(dataset)
    assert pids(dataset) == []
    (tmp_path / "again").unlink(missing_ok=True)
    dataset = make(numbers(Gated, str(tmp_path), 2), timeout=3.0, on_timeout="restart")
    assert len(tags(dataset)) == 12
    assert dataset.stats().restarts == 1


@pytest.mark.needs("POSIX")
def test_what_is_loaded_is_served_while_the_next_is_loading(make, tmp_path):
    """A loaded sequence does not wait for one that is still loading."""
    os.mkfifo(tmp_path / "gate")
    dataset = make(numbers(Gated, str(tmp_path), 2), 1, 3)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 2)
    assert dataset.get_tag(1) == "seq-1"
    (tmp_path / "gate").write_bytes(b"")
    dataset.load_seqs(2, 3)
    assert dataset.get_tag(2) == "seq-2"


ADAPTER = "adapters/returnn/__init__.py"


@in_shares
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("buffer_size", "start"), [(1, 2), (8, 2), (1, 4)])
def test_ctrl_c_anywhere_in_loading(make, buffer_size, start, known, share):
    """Ctrl-C at any point of `load_seqs` ends the epoch, or loses no sequence."""
    plan = {"class": Shares, "sizes": [3, 4], "known": known}
    dataset = make(plan, 2, buffer_size, sharding_method="dedicated")
    expected = tags(dataset)

    def step(countdown):
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 2)
        with interrupted(countdown, ADAPTER, *STEPS) as struck:
            dataset.load_seqs(start, 9)
        try:
            dataset.load_seqs(start, 9)
        except RuntimeError as error:
            assert struck.is_set()
            assert "call init_seq_order first" in str(error)  # noqa: PT017
        else:
            assert [seq.seq_idx for seq in dataset.added_data] == list(range(start, 7))
            assert [seq.seq_tag for seq in dataset.added_data] == expected[start:]
            assert dataset.num_seqs == 7
            assert dataset.get_num_timesteps()["data"] == 7
        return struck.is_set()

    assert first_hits(step, share=share) > 40


@in_shares
@pytest.mark.parametrize("buffer_size", [1, 8])
def test_ctrl_c_does_not_hide_an_exception(make, buffer_size, share):
    """After an exception, the epoch has no more sequences, no matter where Ctrl-C comes."""
    plan = {"class": Breaking, "sizes": [9, 9], "known": False}
    dataset = make(plan, 2, buffer_size, sharding_method="dedicated")

    def step(countdown):
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 4)
        with interrupted(countdown, ADAPTER, *STEPS) as struck, pytest.raises(LookupError):
            dataset.load_seqs(4, 18)
        for _ in range(2):
            with pytest.raises((LookupError, RuntimeError), match=r"two is missing|init_seq_order"):
                dataset.load_seqs(4, 18)
        return struck.is_set()

    assert first_hits(step, share=share) > 10


def test_ctrl_c_anywhere_in_the_beginning_of_an_epoch(make):
    """Ctrl-C at any point of `init_seq_order` leaves no epoch, or the new one."""
    dataset = make(TASK, 2, 2)
    expected = [None, tags(dataset, 1), tags(dataset, 2)]

    def step(countdown):
        dataset.init_seq_order(epoch=1)
        dataset.load_seqs(0, 3)
        with interrupted(countdown, ADAPTER) as struck:
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


SHORT = {**TASK, "num_seqs": 7}
NOISY = {"class": "PostprocessingDataset", "dataset": SHORT, "map_seq": add_noise}
MAPPED = {key: ("inner", key) for key in ("data", "classes")}
META = {"class": "MetaDataset", "datasets": {"inner": NOISY}, "data_map": MAPPED}


@pytest.mark.parametrize("plan", [numbers(Random), NOISY, META])
def test_augmentation_does_not_depend_on_the_number_of_workers(make, plan):
    """It differs between sequences and epochs; all workers draw the same, even after a death."""
    dataset = make(plan, 1)
    expected = sequences(dataset)
    assert len({data["data"].tobytes() for _, data in expected}) == len(expected)
    assert not np.array_equal(sequences(dataset, 2)[0][1]["data"], expected[0][1]["data"])
    dataset = make(plan, 2, 1)
    assert_same(sequences(dataset), expected)
    dataset.init_seq_order(epoch=1)
    kill(pids(dataset)[0])
    assert_same(sequences(dataset, None), expected)


@pytest.mark.needs("fork")
def test_in_a_worker_of_a_data_loader(make):
    """A dataset works in torch's daemonic workers, both as a copy and forked with them."""
    data = pytest.importorskip("torch.utils.data")
    expected = tags(init_dataset(TASK))

    class Tags(data.IterableDataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __iter__(self):
            yield from tags(self.dataset)
            self.dataset.close()

    dataset = make(TASK)
    # The workers are running; they must stay this process's own.
    assert tags(dataset) == expected
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
    assert list(data.DataLoader(Tags(dataset), **options)) == expected
    assert tags(dataset) == expected


def test_a_dataset_that_is_dropped_ends_its_workers():
    """The workers end with the last reference, without a garbage collection."""
    dataset = MultiProcDataset(TASK, 2, 1)
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 3)
    workers = pids(dataset)
    del dataset
    # Another thread ends them.
    for pid in workers:
        await_death(pid)


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), KILL)", "os._exit(0)"])
def test_no_process_outlives_the_trainer(run_prepared, end):
    """Processes end after a normal exit, `os._exit` and SIGKILL; none holds the output open."""
    script = f"""
import os
from cseq.processes.launcher.base import KILL
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
    done = run_prepared(script)
    assert done.stdout.endswith("seq-3\n"), done.stderr
    assert "Traceback" not in done.stderr
