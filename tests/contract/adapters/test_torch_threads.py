"""``DataLoader(worker_method="thread")``: torch's rules, one data set for all workers."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402
from torch_loaders import few_processors  # noqa: E402
from torch_states import Tally  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import defaults, installed  # noqa: E402

pytestmark = few_processors


def threads(dataset, **options):
    return cseq.DataLoader(dataset, worker_method="thread", **{"num_workers": 3, **options})


def flat(batches):
    return [number for batch in batches for number in batch.tolist()]


class Drawing(Plain):
    def __getitem__(self, index):
        rng = cseq.rng()
        return index, rng.random(), rng.integers(9, size=2)


class Streaming(data.IterableDataset[Any]):
    def __iter__(self):
        assert data.get_worker_info() is None
        yield from range(8)


# ── the same batches ───────────────────────────────────────────────────────────────────────


@pytest.mark.needs("fork")
@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_seed_and_a_state_are_for_threads_and_processes(taken):
    """With rng="batch", batches are the same for any number of them, also after a resume."""

    def make(**options):
        torch.manual_seed(11)
        return cseq.DataLoader(Drawing(20), batch_size=3, shuffle=True, rng="batch", **options)

    kinds = [
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 3, "multiprocessing_context": "fork"},
        {"num_workers": 1, "worker_method": "thread"},
    ]
    expected = [*make(**kinds[0])]
    for before, after in zip(kinds, kinds[1:] + kinds[:1], strict=True):
        loader = make(**before)
        made = [*itertools.islice(loader, taken)]
        resumed = make(**after)
        resumed.load_state_dict(loader.state_dict())
        made += resumed
        assert len(made) == len(expected) == 7
        for one, other in zip(made, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_thread_has_a_generator_of_its_own():
    """It starts as torch seeds numpy in the worker of that number, once for all batches."""
    torch.manual_seed(5)
    made = [*threads(Drawing(6), batch_size=None, num_workers=2)]
    torch.manual_seed(5)
    seed = torch.empty((), dtype=torch.int64).random_().item()
    for number in range(2):
        rng = np.random.default_rng(data._utils.worker._generate_state(seed, number))
        for index, first, rest in made[number::2]:
            assert (index % 2, first) == (number, rng.random())
            assert rest.tolist() == rng.integers(9, size=2).tolist()


def test_global_generators_are_the_programs():
    """Threads seed none of them, for any `rng`."""

    class Globals(Plain):
        def __getitem__(self, index):
            return random.random()

    for rng in ("worker", "batch"):
        random.seed(3)
        made = [*threads(Globals(6), batch_size=None, num_workers=1, rng=rng)]
        expected = random.Random(3)
        assert made == [expected.random() for _ in range(6)]


class Told(Plain):
    def __getitem__(self, index):
        return data.get_worker_info(), cseq.worker_info()


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_what_a_thread_knows_of_itself(rng):
    """`cseq.worker_info` is the thread's own; torch's has no entry for threads."""
    told = [*threads(Told(6), batch_size=None, num_workers=2, rng=rng)]
    assert {info for info, _ in told} == {None}
    assert {(own.number, own.num_workers) for _, own in told} == {(0, 2), (1, 2)}
    if rng == "batch":
        assert [own.batch for _, own in told] == [*range(6)]


# ── one data set, no pickling ──────────────────────────────────────────────────────────────


class Unpicklable(Plain):
    def __init__(self, length=12):
        super().__init__(length)
        self.lock = threading.Lock()
        self.seen: list[int] = []

    def __getitem__(self, index):
        with self.lock:
            self.seen.append(index)
        return index


def test_the_data_set_and_the_batches_are_the_objects_themselves():
    dataset, made = Unpicklable(), []

    def collate(samples):
        made.append([samples])
        return made[-1]

    batches = [*threads(dataset, batch_size=4, num_workers=2, collate_fn=collate)]
    assert sorted(dataset.seen) == [*range(12)]
    assert {id(batch) for batch in batches} == {id(batch) for batch in made}


def test_keys_are_the_objects_themselves():
    keys = [object() for _ in range(5)]
    table = {key: number for number, key in enumerate(keys)}
    assert [*threads(table, sampler=keys, batch_size=None, num_workers=2)] == [0, 1, 2, 3, 4]


def test_default_collate_makes_ordinary_tensors():
    """Torch's collate would take a thread for a process, and put tensors into shared memory."""

    class Arrays(Plain):
        def __getitem__(self, index):
            return torch.full((3,), index), np.full(2, index)

    def collate(samples):
        return data.default_collate(samples)

    for function in (None, collate):
        for tensors, arrays in threads(Arrays(4), batch_size=2, collate_fn=function):
            assert not tensors.is_shared()
            assert not arrays.is_shared()


@pytest.mark.needs("Linux")
def test_what_the_loop_drops_is_used_again():
    """`malloc` maps 40 MiB each time, with zeros; about four such tensors exist at once."""

    class Found(Plain):
        def __getitem__(self, index):
            batch = np.empty(40 << 20, np.uint8)
            found, batch[0] = batch[0], 77
            return torch.from_numpy(batch), int(found)

    loader = threads(Found(20), batch_size=None, num_workers=1, prefetch_factor=1)
    assert [found for _, found in loader].count(77) >= 10


def test_threads_are_initialised_once_and_end_with_the_epoch_or_with_the_loader():
    called = []

    def initialise(number):
        called.append((number, cseq.worker_info().number))

    def count():
        return sum(thread.name.startswith("cseq-w") for thread in threading.enumerate())

    options = {"batch_size": 4, "num_workers": 2, "worker_init_fn": initialise}
    assert flat(threads(Plain(8), **options)) == [*range(8)]
    assert count() == 0
    called.clear()
    loader = threads(Plain(8), persistent_workers=True, **options)
    for _ in range(2):
        assert flat(loader) == [*range(8)]
        assert count() == 2
    assert sorted(called) == [(0, 0), (1, 1)]
    iterator = weakref.ref(loader._iterator)
    del loader
    gc.collect()
    assert iterator() is None
    cseq.runs.await_closings(10)
    assert count() == 0


# ── what goes wrong ────────────────────────────────────────────────────────────────────────


def test_what_threads_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"dataset=Streaming is an IterableDataset.*num_workers=1"):
        iter(threads(Streaming()))
    assert flat(threads(Streaming(), num_workers=1)) == [*range(8)]
    with pytest.raises(ValueError, match=r"dataset=Tally has a state.*pass num_workers=1"):
        iter(cseq.StatefulDataLoader(Tally(4), num_workers=2, worker_method="thread"))
    loader = cseq.StatefulDataLoader(Tally(4), num_workers=1, worker_method="thread")
    assert flat(loader) == [1, 2, 3, 4]


def ended(source):
    """Run a program until its end."""
    command = [sys.executable, "-c", source]
    return subprocess.run(command, timeout=50, capture_output=True, check=False)


INTERRUPTED = """
import os, signal, threading, time, torch, cseq
class Sleeping:
    def __len__(self): return 100
    def __getitem__(self, index):
        time.sleep(60)
loader = cseq.DataLoader(Sleeping(), num_workers=2, worker_method="thread")
iterator = iter(loader)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
next(iterator)
"""


@pytest.mark.skipif(os.name == "nt", reason="a signal of POSIX")
def test_ctrl_c_ends_a_program_whose_threads_sleep():
    done = ended(INTERRUPTED)
    assert done.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in done.stderr
    assert b"ignored" not in done.stderr


KEPT = """
import builtins, torch, cseq
builtins.kept = iter(cseq.DataLoader(range(64), num_workers=2, worker_method="thread"))
next(builtins.kept)
"""


def test_an_iterator_may_outlive_the_modules():
    """The interpreter's end drops it silently."""
    done = ended(KEPT)
    assert (done.returncode, done.stderr) == (0, b"")


# ── states, orders, defaults ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_a_state_has_what_earlier_epochs_have_left_in_the_data_set(taken):
    """All of them share the object, also after the last batch and after the end."""

    def make():
        options = {"batch_size": None, "num_workers": 1, "worker_method": "thread"}
        return cseq.StatefulDataLoader(Tally(4), **options)

    loader, resumed = make(), make()
    first = [*loader]
    begun = [*itertools.islice(iter(loader), taken)]
    resumed.load_state_dict(loader.state_dict())
    numbers = [*first, *begun, *resumed, *resumed]
    assert numbers == [*range(1, 17 if taken == 5 else 13)]


class Infos(data.IterableDataset[Any]):
    def __iter__(self):
        yield data.get_worker_info() is None


def test_the_default_is_for_map_style_data_without_a_context(monkeypatch):
    monkeypatch.setattr(defaults, "worker_method", "thread")
    assert flat(cseq.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
    with installed():
        assert flat(data.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
    assert [*cseq.DataLoader(Infos(), num_workers=1, batch_size=None)] == [False]


SCRIPT = """
import json, sys, threading
from torch.utils.data import DataLoader
class Names:
    def __len__(self): return 4
    def __getitem__(self, index): return threading.current_thread().name
if __name__ == "__main__":
    json.dump([*DataLoader(Names(), batch_size=None, num_workers=2)], open(sys.argv[1], "w"))
"""


def test_a_script_is_run_with_threads(run_command, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run_command(tmp_path, "run", "--threads", "script.py", "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == ["cseq-w0", "cseq-w1"] * 2
