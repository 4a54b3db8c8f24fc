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

import cseq  # noqa: E402
from cseq.adapters.torch import defaults, installed  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FORK = {"multiprocessing_context": "fork"}
forks = pytest.mark.needs("fork")


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


def assert_equal(made, expected):
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ── the same batches ───────────────────────────────────────────────────────────────────────


@forks
def test_batches_of_a_seed_for_each_batch():
    """They are the same for any number of threads, and in processes."""

    def made(**options):
        torch.manual_seed(5)
        return [*cseq.DataLoader(Drawing(20), batch_size=3, shuffle=True, rng="batch", **options)]

    expected = made(num_workers=2, **FORK)
    for num_workers in (1, 2, 5):
        assert_equal(made(num_workers=num_workers, worker_method="thread"), expected)


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


def test_threads_end_with_the_epoch_or_with_the_loader():
    def count():
        return sum(thread.name.startswith("cseq-w") for thread in threading.enumerate())

    assert flat(threads(Plain(8), batch_size=4, num_workers=2)) == [*range(8)]
    assert count() == 0
    loader = threads(Plain(8), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert flat(loader) == [*range(8)]
        assert count() == 2
    iterator = weakref.ref(loader._iterator)
    del loader
    gc.collect()
    assert iterator() is None
    cseq.runs.await_closings(10)
    assert count() == 0


def test_each_thread_is_initialised_once():
    called = []
    loader = threads(
        Plain(12),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=lambda number: called.append((number, cseq.worker_info().number)),
    )
    for _ in range(2):
        assert flat(loader) == [*range(12)]
    assert sorted(called) == [(0, 0), (1, 1)]


# ── what goes wrong ────────────────────────────────────────────────────────────────────────


class Failing(Plain):
    def __init__(self, kind):
        super().__init__(12)
        self.kind = kind

    def __getitem__(self, index):
        if index == 5:
            raise self.kind("five")
        return index


def test_an_exception_has_torchs_words_and_the_epoch_goes_on():
    iterator = iter(threads(Failing(ValueError), batch_size=2, num_workers=2))
    assert flat([next(iterator), next(iterator)]) == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r"Caught ValueError in DataLoader worker thread 0\.[^$]*five"
    ):
        next(iterator)
    assert flat(iterator) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_thread_that_would_end_the_program(kind):
    iterator = iter(threads(Failing(kind), batch_size=None, num_workers=2))
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=rf"exited unexpectedly: {kind.__name__}"):
        next(iterator)
    assert [*iterator] == [*range(6, 12)]


def test_one_sample_is_left_out():
    loader = threads(Failing(ValueError), batch_size=4, num_workers=2, on_error="skip")
    assert flat(loader) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    [left] = loader.skipped
    assert (left.batch, left.sample) == (1, 5)


def test_what_takes_too_long_shows_its_stack_and_comes_later():
    opened = threading.Event()

    class Waiting(Plain):
        def __getitem__(self, index):
            if index == 3:
                opened.wait(60)
            return index

    iterator = iter(threads(Waiting(8), batch_size=None, num_workers=2, timeout=0.2))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds[^$]*opened\.wait"):
        next(iterator)
    opened.set()
    assert [*iterator] == [3, 4, 5, 6, 7]


class Stateful(Plain):
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_what_threads_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"dataset=Streaming is an IterableDataset.*num_workers=1"):
        iter(threads(Streaming()))
    assert flat(threads(Streaming(), num_workers=1)) == [*range(8)]
    with pytest.raises(ValueError, match=r"dataset=Stateful has a state.*pass num_workers=1"):
        iter(cseq.StatefulDataLoader(Stateful(4), num_workers=2, worker_method="thread"))
    loader = cseq.StatefulDataLoader(Stateful(4), num_workers=1, worker_method="thread")
    assert flat(loader) == [0, 1, 2, 3]


def test_arguments_that_cannot_be():
    with pytest.raises(
        ValueError, match=r"worker_method='fibre' is .* 'multiprocessing', 'thread'"
    ):
        cseq.DataLoader(Plain(3), worker_method="fibre")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiprocessing_context= cannot be combined with"):
        threads(Plain(3), multiprocessing_context="spawn")


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
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], timeout=50, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in ended.stderr
    assert b"ignored" not in ended.stderr


KEPT = """
import builtins, torch, cseq
builtins.kept = iter(cseq.DataLoader(range(64), num_workers=2, worker_method="thread"))
next(builtins.kept)
"""


def test_an_iterator_may_outlive_the_modules():
    """The interpreter's end drops it silently."""
    ended = subprocess.run(
        [sys.executable, "-c", KEPT], timeout=50, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# ── states, orders, defaults ───────────────────────────────────────────────────────────────


@forks
@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_state_is_for_threads_and_processes(taken):
    def make(**options):
        torch.manual_seed(11)
        return cseq.DataLoader(Drawing(20), batch_size=3, shuffle=True, rng="batch", **options)

    kinds = [
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 3, **FORK},
        {"num_workers": 1, "worker_method": "thread"},
    ]
    expected = [*make(**kinds[0])]
    for before, after in zip(kinds, kinds[1:] + kinds[:1], strict=True):
        loader = make(**before)
        iterator = iter(loader)
        begun = [next(iterator) for _ in range(taken)]
        state = loader.state_dict()
        resumed = make(**after)
        resumed.load_state_dict(state)
        assert_equal([*begun, *resumed], expected)


class Counting(Plain):
    made = 0

    def __getitem__(self, index):
        self.made += 1
        return self.made

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_a_state_has_what_earlier_epochs_have_left_in_the_data_set(taken):
    """All of them share the object, also after the last batch and after the end."""

    def make():
        options = {"batch_size": None, "num_workers": 1, "worker_method": "thread"}
        return cseq.StatefulDataLoader(Counting(4), **options)

    loader, resumed = make(), make()
    first = [*loader]
    begun = [*itertools.islice(iter(loader), taken)]
    resumed.load_state_dict(loader.state_dict())
    numbers = [*first, *begun, *resumed, *resumed]
    assert numbers == [*range(1, 17 if taken == 5 else 13)]


def test_batches_in_no_order():
    opened = threading.Event()

    class Gated(Plain):
        def __getitem__(self, index):
            if index == 0:
                opened.wait(60)
            return index

    iterator = iter(threads(Gated(6), batch_size=None, num_workers=2, in_order=False))
    first = next(iterator)
    assert first != 0
    opened.set()
    assert sorted([first, *iterator]) == [*range(6)]


def test_the_default_is_for_map_style_data_without_a_context():
    defaults.worker_method = "thread"
    try:
        assert flat(cseq.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
        with installed():
            assert flat(data.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
        [told] = cseq.DataLoader(Infos(), num_workers=1, batch_size=None)
        assert told == 1
    finally:
        defaults.worker_method = "multiprocessing"


class Infos(data.IterableDataset[Any]):
    def __iter__(self):
        info = data.get_worker_info()
        yield None if info is None else info.num_workers


SCRIPT = """
import json, sys, threading
from torch.utils.data import DataLoader
class Names:
    def __len__(self): return 4
    def __getitem__(self, index): return threading.current_thread().name
if __name__ == "__main__":
    json.dump([*DataLoader(Names(), batch_size=None, num_workers=2)], open(sys.argv[1], "w"))
"""


def test_a_script_is_run_with_threads(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cseq", "run", "--threads", str(script), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(out.read_text()) == ["cseq-w0", "cseq-w1"] * 2
