"""``DataLoader(worker_method="thread")``: torch's rules, one data set for all workers."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import defaults, installed  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FORK = {"multiprocessing_context": "fork"}
forks = pytest.mark.needs("fork")


def threads(dataset: Any, **options: Any) -> Any:
    return cseq.DataLoader(dataset, worker_method="thread", **{"num_workers": 3, **options})


def flat(batches: Any) -> list[Any]:
    return [number for batch in batches for number in batch.tolist()]


def own() -> Any:
    """The generators to draw from: the thread's, or the process's."""
    rng = getattr(data.get_worker_info(), "rng", None)
    return (random, None) if rng is None else (rng.random_generator, rng.torch_generator)


class Drawing(Plain):
    """Each sample draws from Python's generator and from torch's."""

    def __getitem__(self, index: int) -> Any:
        python, torchs = own()
        return index, python.random(), torch.rand(2, generator=torchs)


class Streaming(data.IterableDataset[Any]):
    """Each worker has every so many-th number, and draws."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            python, torchs = own()
            yield number, python.random(), torch.rand(2, generator=torchs)


def assert_equal(made: list[Any], expected: list[Any]) -> None:
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ── the same batches ───────────────────────────────────────────────────────────────────────


@forks
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("kind", [Drawing, Streaming])
def test_batches_are_those_of_torchs_processes(kind: Any, num_workers: int) -> None:
    """Bit for bit, over two epochs, where the data set draws from what is its worker's."""
    options: Any = {"batch_size": 3, "num_workers": num_workers, "shuffle": kind is Drawing or None}
    torch.manual_seed(3)
    theirs = data.DataLoader(kind(20), **options, **FORK)
    expected = [*theirs, *theirs]
    torch.manual_seed(3)
    ours = threads(kind(20), **options)
    assert_equal([*ours, *ours], expected)


@forks
def test_batches_of_a_seed_for_each_batch() -> None:
    """They are the same for any number of threads, and in processes."""

    def made(**options: Any) -> list[Any]:
        torch.manual_seed(5)
        return [*cseq.DataLoader(Drawing(20), batch_size=3, shuffle=True, rng="batch", **options)]

    expected = made(num_workers=2, **FORK)
    for num_workers in (1, 2, 5):
        assert_equal(made(num_workers=num_workers, worker_method="thread"), expected)


class Numpys(Plain):
    def __getitem__(self, index: int) -> Any:
        info: Any = data.get_worker_info()
        rng = info.rng.numpy_generator if getattr(info, "rng", None) else cseq.rng()
        return index, rng.random()


@forks
def test_numpys_generator_of_a_batch_is_that_of_cseq_rng() -> None:
    torch.manual_seed(5)
    expected = [*cseq.DataLoader(Numpys(9), batch_size=2, num_workers=2, rng="batch", **FORK)]
    torch.manual_seed(5)
    assert_equal([*threads(Numpys(9), batch_size=2, rng="batch")], expected)


class Told(Plain):
    def __getitem__(self, index: int) -> Any:
        return data.get_worker_info()


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_a_thread_has_an_info_of_its_own(rng: str) -> None:
    dataset = Told(6)
    torch.manual_seed(7)
    told = [*threads(dataset, batch_size=None, num_workers=2, rng=rng)]
    assert [info.id for info in told[:2]] == [0, 1]
    assert data.get_worker_info() is None
    for info in told:
        assert (info.num_workers, info.worker_method) == (2, "thread")
        assert info.dataset is dataset
    if rng == "worker":
        first, second = told[:2]
        assert second.seed == first.seed + 1
        assert first.rng.random_generator.random() == random.Random(first.seed).random()
        assert first.rng.torch_generator.initial_seed() == first.seed
        words = data._utils.worker._generate_state(first.seed, 0)
        assert first.rng.numpy_generator.random() == np.random.default_rng(words).random()


@pytest.mark.skipif(not hasattr(torch, "thread_safe_generator"), reason="torch before 2.13")
def test_torchs_thread_safe_generator_is_the_threads() -> None:
    class Asking(Plain):
        def __getitem__(self, index: int) -> Any:
            info: Any = data.get_worker_info()
            return torch.thread_safe_generator() is info.rng.torch_generator

    assert all(threads(Asking(6), batch_size=None))


# ── one data set, no pickling ──────────────────────────────────────────────────────────────


class Unpicklable(Plain):
    """Has a lock and a list that grows."""

    def __init__(self, length: int = 12) -> None:
        super().__init__(length)
        self.lock = threading.Lock()
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.seen.append(index)
        return index


def test_the_data_set_and_the_batches_are_the_objects_themselves() -> None:
    dataset, made = Unpicklable(), []

    def collate(samples: list[int]) -> Any:
        made.append([samples])
        return made[-1]

    batches = [*threads(dataset, batch_size=4, num_workers=2, collate_fn=collate)]
    assert sorted(dataset.seen) == [*range(12)]
    assert {id(batch) for batch in batches} == {id(batch) for batch in made}


def test_keys_are_the_objects_themselves() -> None:
    keys = [object() for _ in range(5)]
    table = {key: number for number, key in enumerate(keys)}
    assert [*threads(table, sampler=keys, batch_size=None, num_workers=2)] == [0, 1, 2, 3, 4]


def test_default_collate_makes_ordinary_tensors() -> None:
    """To torch's collate a worker is a process, and tensors belong into shared memory."""

    class Arrays(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.full((3,), index), np.full(2, index)

    def collate(samples: Any) -> Any:
        return data.default_collate(samples)

    for function in (None, collate):
        for tensors, arrays in threads(Arrays(4), batch_size=2, collate_fn=function):
            assert not tensors.is_shared()
            assert not arrays.is_shared()


@pytest.mark.needs("Linux")
def test_what_the_loop_drops_is_used_again() -> None:
    """Of 40 MiB, which malloc maps anew each time, with zeros; some four are there at once."""

    class Found(Plain):
        def __getitem__(self, index: int) -> Any:
            batch = np.empty(40 << 20, np.uint8)
            found, batch[0] = batch[0], 77
            return torch.from_numpy(batch), int(found)

    loader = threads(Found(20), batch_size=None, num_workers=1, prefetch_factor=1)
    assert [found for _, found in loader].count(77) >= 10


def test_threads_end_with_the_epoch_or_with_the_loader() -> None:
    def count() -> int:
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
    cseq.manager.await_closings(10)
    assert count() == 0


def test_each_thread_is_initialised_once() -> None:
    called = []
    loader = threads(
        Plain(12),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=lambda number: called.append((number, data.get_worker_info().id)),
    )
    for _ in range(2):
        assert flat(loader) == [*range(12)]
    assert sorted(called) == [(0, 0), (1, 1)]


# ── what goes wrong ────────────────────────────────────────────────────────────────────────


class Failing(Plain):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(12)
        self.kind = kind

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.kind("five")
        return index


def test_an_exception_has_torchs_words_and_the_epoch_goes_on() -> None:
    iterator = iter(threads(Failing(ValueError), batch_size=2, num_workers=2))
    assert flat([next(iterator), next(iterator)]) == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r"Caught ValueError in DataLoader worker thread 0\.[^$]*five"
    ):
        next(iterator)
    assert flat(iterator) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_thread_that_would_end_the_program(kind: type[BaseException]) -> None:
    iterator = iter(threads(Failing(kind), batch_size=None, num_workers=2))
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=rf"exited unexpectedly: {kind.__name__}"):
        next(iterator)
    assert [*iterator] == [*range(6, 12)]


def test_one_sample_is_left_out() -> None:
    loader = threads(Failing(ValueError), batch_size=4, num_workers=2, on_error="skip")
    assert flat(loader) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    [left] = loader.skipped
    assert (left.batch, left.sample) == (1, 5)


def test_what_takes_too_long_shows_its_stack_and_comes_later() -> None:
    opened = threading.Event()

    class Waiting(Plain):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                opened.wait(60)
            return index

    iterator = iter(threads(Waiting(8), batch_size=None, num_workers=2, timeout=0.2))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds[^$]*opened\.wait"):
        next(iterator)
    opened.set()
    assert [*iterator] == [3, 4, 5, 6, 7]


class Itself(data.IterableDataset[int]):
    def __iter__(self) -> Itself:
        return self

    def __next__(self) -> int:
        raise StopIteration


class Stateful(Plain):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_what_threads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="Itself returns the data set itself, which threads share"):
        next(iter(threads(Itself())))
    assert [*threads(Itself(), num_workers=1)] == []
    with pytest.raises(ValueError, match=r"dataset=Stateful has a state.*give num_workers=1"):
        iter(cseq.StatefulDataLoader(Stateful(4), num_workers=2, worker_method="thread"))
    loader = cseq.StatefulDataLoader(Stateful(4), num_workers=1, worker_method="thread")
    assert flat(loader) == [0, 1, 2, 3]


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"should be 'multiprocessing' or 'thread'.*'fibre'"):
        cseq.DataLoader(Plain(3), worker_method="fibre")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiprocessing_context says how processes are started"):
        threads(Plain(3), multiprocessing_context="spawn")


def test_global_draws_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Globals(Plain):
        def __getitem__(self, index: int) -> Any:
            first.wait(60)
            return random.random(), np.random.rand()

    first = threading.Event()
    caplog.set_level(logging.WARNING, "cseq")
    loader = threads(Globals(20), batch_size=2, num_workers=2)
    iterator = iter(loader)
    assert not caplog.records
    threading.Timer(0.05, first.set).start()  # while the loop is in its first call
    assert len([*iterator, *loader]) == 20
    [record] = caplog.records
    assert "dataset=Globals draws from the global generators of random and numpy" in record.message
    caplog.clear()
    assert len([*threads(Drawing(20), batch_size=2, shuffle=True)]) == 10
    assert not caplog.records


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
def test_ctrl_c_ends_a_program_whose_threads_sleep() -> None:
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


def test_an_iterator_may_outlive_the_modules() -> None:
    """It is dropped when the interpreter ends: nothing is said."""
    ended = subprocess.run(
        [sys.executable, "-c", KEPT], timeout=50, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# ── states, orders, defaults ───────────────────────────────────────────────────────────────


@forks
@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_state_is_for_threads_and_processes(taken: int) -> None:
    def make(**options: Any) -> Any:
        torch.manual_seed(11)
        return cseq.DataLoader(Drawing(20), batch_size=3, shuffle=True, rng="batch", **options)

    kinds: list[Any] = [
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
    """Each sample is one more than the one before, of any epoch."""

    made = 0

    def __getitem__(self, index: int) -> int:
        self.made += 1
        return self.made

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_a_state_has_what_earlier_epochs_have_left_in_the_data_set(taken: int) -> None:
    """It is the same object in all of them, also behind the last batch, and behind the end."""

    def make() -> Any:
        options: Any = {"batch_size": None, "num_workers": 1, "worker_method": "thread"}
        return cseq.StatefulDataLoader(Counting(4), **options)

    loader, resumed = make(), make()
    first = [*loader]
    begun = [*itertools.islice(iter(loader), taken)]
    resumed.load_state_dict(loader.state_dict())
    numbers = [*first, *begun, *resumed, *resumed]
    assert numbers == [*range(1, 17 if taken == 5 else 13)]


def test_batches_in_no_order() -> None:
    opened = threading.Event()

    class Gated(Plain):
        def __getitem__(self, index: int) -> int:
            if index == 0:
                opened.wait(60)
            return index

    iterator = iter(threads(Gated(6), batch_size=None, num_workers=2, in_order=False))
    first = next(iterator)
    assert first != 0
    opened.set()
    assert sorted([first, *iterator]) == [*range(6)]


def test_the_default_is_for_map_style_data_without_a_context() -> None:
    defaults.worker_method = "thread"
    try:
        assert flat(cseq.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
        with installed():
            assert flat(data.DataLoader(Unpicklable(6), num_workers=2)) == [*range(6)]
        told = [*cseq.DataLoader(Infos(), num_workers=1, batch_size=None)]
        assert told == ["multiprocessing"]
    finally:
        defaults.worker_method = "multiprocessing"


class Infos(data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield getattr(data.get_worker_info(), "worker_method", "multiprocessing")


SCRIPT = """
import json, sys, threading
from torch.utils.data import DataLoader
class Names:
    def __len__(self): return 4
    def __getitem__(self, index): return threading.current_thread().name
if __name__ == "__main__":
    json.dump([*DataLoader(Names(), batch_size=None, num_workers=2)], open(sys.argv[1], "w"))
"""


def test_a_script_is_run_with_threads(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cseq", "run", "--threads", str(script), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(out.read_text()) == ["cseq-w0", "cseq-w1"] * 2
