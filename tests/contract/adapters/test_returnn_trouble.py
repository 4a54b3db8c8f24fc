"""Exceptions, deaths, Ctrl-C and ends in `cseq.adapters.returnn`."""

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import first_hits, in_shares, interrupted
from killing import WORDS, await_death, kill

import cseq
from cseq import testing

pytest.importorskip("returnn")

from returnn.datasets.basic import init_dataset

from cseq.adapters.returnn import MultiProcDataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import RunScript
from returnn_data import (
    TASK,
    Breaking,
    Broken,
    BrokenFromTheStart,
    Gated,
    Numbers,
    Random,
    Shares,
    add_noise,
    assert_same,
    make,
    numbers,
    pids,
    sequences,
    tags,
)


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


def test_an_empty_dataset(make):
    """RETURNN refuses to order no sequences; the caller gets its AssertionError."""
    dataset = make(numbers(Numbers, 0))
    with pytest.raises(AssertionError):
        dataset.init_seq_order(epoch=1)


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
    dataset.load_seqs(8, 9)
    rest = [(seq.seq_tag, dict(seq.features)) for seq in dataset.added_data]
    while dataset.is_less_than_num_seqs(8 + len(rest)):
        dataset.load_seqs(8 + len(rest), 9 + len(rest))
        rest += [(seq.seq_tag, dict(seq.features)) for seq in dataset.added_data]
    assert_same(rest, [(tag, {k: data[k] for k in rest[0][1]}) for tag, data in expected[8:]])
    assert dataset.stats().restarts >= 1


def test_cseq_testing_knows_its_workers(make):
    dataset = make(TASK)
    expected = sequences(dataset)
    testing.await_workers(dataset)
    assert testing.kill(dataset, 1) == pids(dataset)[1]
    while not dataset.stats().restarts:
        time.sleep(0.001)
    assert_same(sequences(dataset), expected)
    dataset.close()
    with pytest.raises(RuntimeError, match="not running"):
        testing.pids(dataset)


def test_deaths_can_be_errors(make):
    """With `max_restarts=0`, a killed worker raises WorkerDied with its name; a new epoch works."""
    dataset = make(TASK, 2, 1, max_restarts=0)
    dataset.init_seq_order(epoch=1)
    kill(pids(dataset)[1])
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


STEPS = (
    "adapters/returnn/__init__.py",
    "stream.py",
    "engine/pool.py",
    "tickets/items.py",
    "crews/processes.py",
    "crews/threads.py",
    "encoding/transport.py",
    "encoding/codec.py",
)


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
        with interrupted(countdown, *STEPS) as struck:
            dataset.load_seqs(start, 9)
        said = ""
        try:
            dataset.load_seqs(start, 9)
        except RuntimeError as error:
            said = str(error)
        if said:
            assert struck.is_set()
            assert "call init_seq_order first" in said
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
        with interrupted(countdown, *STEPS) as struck, pytest.raises(LookupError):
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


POSTPROCESSED = {
    "class": "PostprocessingDataset",
    "dataset": {**TASK, "num_seqs": 7},
    "map_seq": add_noise,
}


@pytest.mark.parametrize(
    "plan",
    [
        numbers(Random),
        POSTPROCESSED,
        {"class": "MetaDataset", "inner": POSTPROCESSED},
    ],
)
def test_augmentation_does_not_depend_on_the_number_of_workers(make, plan):
    """It differs between sequences and epochs; all workers draw the same, even after a death."""
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


def test_closing(make):
    """`close` ends the workers at once, may be called twice, and later use starts new ones."""
    dataset = make(TASK)
    expected = tags(dataset)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    for _ in range(2):
        dataset.close()
        assert pids(dataset) == []
    with pytest.raises(RuntimeError, match="init_seq_order"):
        dataset.load_seqs(1, 2)
    assert tags(dataset) == expected


def test_a_dataset_that_is_dropped_ends_its_workers():
    """The workers end with the last reference, without a garbage collection."""
    dataset = init_dataset(
        {"class": MultiProcDataset, "dataset": TASK, "num_workers": 2, "buffer_size": 1}
    )
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
