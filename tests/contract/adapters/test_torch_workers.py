"""A `cseq.DataLoader`'s workers: what they know, exceptions, deaths, time limits and Ctrl-C."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import multiprocessing
import os
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from interrupting import first_hits, interrupted  # noqa: E402
from killing import kill  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    Augmented,
    Plain,
    Sharded,
    as_is,
    drawn,
    same,
    seed_all,
    without_told,
)
from torch_loaders import (  # noqa: E402
    FORK,
    THREADS,
    Broken,
    BrokenItems,
    Deadly,
    Told,
    check,
    forked,
    loader,
    quick_processes,
    run,
)

import cseq.testing  # noqa: E402
from cseq.adapters.torch import LoaderTimeout, names  # noqa: E402

pytestmark = quick_processes


# ── in a worker ────────────────────────────────────────────────────────────────────────────


class Nested(Plain):
    def __getitem__(self, index):
        inner = cseq.DataLoader(Plain(3), batch_size=None, num_workers=1)
        return list(inner), multiprocessing.parent_process() is None


def test_a_loader_in_a_worker():
    made = loader(Nested(2), batch_size=None, num_workers=1)
    assert [numbers for numbers, _ in made] == [[0, 1, 2]] * 2


# torch 2.12 warns of this.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profile_has_torchs_name(num_workers):
    """Users search traces for it."""

    def names_in(made):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(made)
        return {each.name for each in profile.events() if each.name.startswith("enumerate")}

    options = (FORK if num_workers else {}) | {"num_workers": num_workers}
    expected = names_in(data.DataLoader(Plain(2), **options))
    assert len(expected) == 1
    assert names_in(cseq.DataLoader(Plain(2), **options)) == expected


class Leaving(Plain):
    """Raises an exception that ends a program."""

    def __init__(self, kind):
        super().__init__(8)
        self.kind = kind

    def __getitem__(self, index):
        if index == 3:
            raise self.kind(0)
        return index


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_worker_that_would_leave(kind, method):
    """The trainer must not exit successfully: it gets torch's exception instead of the batch."""
    options = {"batch_size": None, "worker_method": method}
    iterator = iter(loader(Leaving(kind), **options))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    told = rf"\(pid\(s\) \d+\) exited unexpectedly: {kind.__name__}"
    with pytest.raises(RuntimeError, match=told):
        next(iterator)
    assert list(iterator) == [4, 5, 6, 7]
    left_out = loader(Leaving(kind), on_error="skip", **options)
    assert list(left_out) == [0, 1, 2, 4, 5, 6, 7]


class Related(Plain):
    """Returns what a worker knows of the trainer's process, of its own, and of threads."""

    def __getitem__(self, index):
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join(0.01)
        numbers = multiprocessing.current_process()._identity  # type: ignore[attr-defined]
        thread = threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()
        return parent.pid, parent.name, parent.is_alive(), numbers, thread


def test_what_a_worker_knows_of_processes_and_threads(monkeypatch):
    """Workers have different numbers, by which users choose devices, and compute in one thread."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    trainer = os.getpid(), multiprocessing.current_process().name, True
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        told = list(loader(Related(2), batch_size=None))
    finally:
        torch.set_num_threads(before)
    assert told == [[*trainer, [number], ["MainThread", 1, True]] for number in (1, 2)]


OWN_VALUE = contextvars.ContextVar("OWN_VALUE", default=0)


class Inherited(Plain):
    """The samples depend on thread-local state."""

    def __getitem__(self, index):
        with contextlib.suppress(FloatingPointError):
            np.float64(1) / np.float64(0)
            return "divided"
        third = str(decimal.Decimal(1) / 3)
        product = torch.ones(1, 1) @ torch.ones(1, 1)
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return OWN_VALUE.get(), third, product.dtype, torch.is_grad_enabled(), cast


@forked
def test_what_the_calling_thread_has_is_inherited():
    """So are torch's modes: gradients, and autocast of every device."""
    usual = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def told():
        OWN_VALUE.set(7)
        decimal.getcontext().prec = 9
        with np.errstate(all="raise"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return check(Inherited(1), 1, batch_size=None, collate_fn=as_is)

    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float32)
    try:
        [[got]] = contextvars.copy_context().run(told)
    finally:
        torch.set_autocast_enabled("cuda", usual[0])
        torch.set_autocast_dtype("cuda", usual[1])
    assert got == (7, "0.333333333", torch.bfloat16, False, (True, torch.float32))


class Elsewhere(TorchFunctionMode):
    """Acts as a default device, except for the number from which the loader draws its seed."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        if function in (torch.empty, torch.zeros) and args[0] != ():
            given.setdefault("device", "meta")
        return function(*args, **given)


class Made(Plain):
    """Returns its tensors' devices, with some CPU tensors in an object, and one of a rare type."""

    def __getitem__(self, index):
        numbers = torch.arange(index + 3, device="cpu")
        return str(torch.zeros(1).device), {1: numbers[1:]}, numbers.to(torch.float8_e5m2)


@forked
def test_function_modes_are_inherited():
    """A default device is such a mode: samples are made on it, and travel normally."""
    with Elsewhere():
        got = list(loader(Made(2), batch_size=None))
    for index, (device, held, rare) in enumerate(got):
        assert device == "meta"
        assert held[1].tolist() == [*range(1, index + 3)]
        assert rare.dtype == torch.float8_e5m2
        assert rare.float().tolist() == [*range(index + 3)]


@forked
def test_inference_mode_is_inherited():
    """A data set may change a tensor made in inference mode."""
    with torch.inference_mode():
        counted = torch.zeros(1)

        class Counting(Plain):
            def __getitem__(self, index):
                return counted.add_(1).clone()

        made = loader(Counting(3), batch_size=None, num_workers=1)
        assert [one.item() for one in made] == [1, 2, 3]


# ── errors ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "how"), [("process", FORK), ("thread", THREADS)])
def test_the_text_of_an_exception_has_the_traceback(kind, how):
    iterator = iter(cseq.DataLoader(Broken(3, (1,)), batch_size=None, **how))
    assert next(iterator) == 0
    with pytest.raises(LookupError, match=r"in __getitem__[^$]*no sample 1") as caught:
        next(iterator)
    if hasattr(caught.value, "__notes__"):
        # Exceptions have notes from Python 3.11 on.
        said = f"Caught LookupError in DataLoader worker {kind} 1.\nOriginal"
        assert str(caught.value).startswith(said)
    assert list(iterator) == [2]


class Reading(Plain):
    """Two workers seek in one file, and read when both have done so."""

    def __init__(self, path):
        super().__init__(8)
        self.file = path.open("rb", buffering=0)
        self.sought = [multiprocessing.get_context("fork").Semaphore(0) for _ in range(2)]

    def __getitem__(self, index):
        self.file.seek(index)
        worker = data.get_worker_info()
        self.sought[worker.id].release()
        self.sought[1 - worker.id].acquire()
        return self.file.read(1)[0]


@pytest.mark.needs("Linux")
def test_forked_workers_read_one_file_each_at_its_own_offset(tmp_path):
    """It holds although the trainer has opened the file."""
    (tmp_path / "read").write_bytes(bytes(range(8)))
    dataset = Reading(tmp_path / "read")
    assert list(cseq.DataLoader(dataset, batch_size=None, **FORK)) == list(range(8))
    dataset.file.close()


class Seeds(data.IterableDataset[int]):
    """Returns the seeds of torch's generator for six batches."""

    def __iter__(self):
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for _ in range(first, 6, step):
            yield torch.initial_seed()


def test_seeds_of_a_streams_batches():
    """With rng="batch", batch k has the same seed for any number of workers."""

    def seeds(num_workers, seed=3):
        generator = torch.Generator().manual_seed(seed)
        options = FORK | {"num_workers": num_workers} if num_workers else {}
        made = cseq.DataLoader(
            Seeds(), batch_size=None, rng="batch", generator=generator, **options
        )
        return list(made)

    assert len(set(seeds(0))) == 6
    assert seeds(2) == seeds(1) == seeds(0)
    assert not {*seeds(0)} & {*seeds(0, 4)}


INHERITED = """
import os, sys
import torch
import cseq

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return index

def read(batches):
    return [int(number) for batch in batches for number in batch]

if __name__ == "__main__":
    method, persistent = sys.argv[1:]
    how = {"worker_method": "thread"} if method == "thread" else {"multiprocessing_context": method}
    loader = cseq.DataLoader(
        Samples(), batch_size=2, num_workers=2, persistent_workers=bool(persistent), **how
    )
    iterator = iter(loader)
    got = read([next(iterator)])
    child = os.fork()
    if not child:
        try:
            next(iterator)
        except InterruptedError as error:
            print(str(error).partition("; ")[2])
        print(read(loader) == read(loader) == list(range(24)), loader.stats().batches, flush=True)
        del iterator, loader
        os._exit(0)
    os.waitpid(child, 0)
    print(got + read(iterator) == read(loader) == list(range(24)))
"""


@pytest.mark.needs("fork")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", ["", "persistent"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "thread"])
def test_a_forked_process_has_workers_of_its_own(run_prepared, method, persistent):
    """New iterators work; an inherited one raises, and the parent's goes on."""
    done = run_prepared(INHERITED, method, persistent)
    batches = 24 if persistent else 12
    said = ["call iter() on the DataLoader again", f"True {batches}", "True"]
    assert done.stdout.splitlines() == said, done.stderr


# ── Ctrl-C, deaths and time limits ─────────────────────────────────────────────────────────


class Unsent(Plain):
    def __getitem__(self, index):
        return Refusing() if index == 1 else index


class Refusing:
    def __reduce__(self):
        raise LookupError("no sample 1")


INTERRUPTED: dict[str, dict[str, Any]] = {
    "map": {},
    "profiled": {},
    "seeded": {"rng": "batch"},
    "skipping": {"on_error": "skip"},
    "unsent": {"dataset": Unsent(5)},
    "iterable": {"dataset": BrokenItems(5, (1,))},
}


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 2) for kind in INTERRUPTED),
        *((kind, 0) for kind in INTERRUPTED if kind != "unsent"),
    ],
)
def test_a_state_after_ctrl_c_is_right(kind, num_workers, monkeypatch):
    """Wherever a signal handler raises in `next`, a resume has what the loop did not get."""
    if kind == "profiled":
        monkeypatch.setattr(names, "profiler_enabled", lambda: True)
    options = {"dataset": Broken(5, (1,)), **INTERRUPTED[kind]}
    if num_workers:
        options |= FORK
    made = cseq.DataLoader(batch_size=None, **options)
    files = "adapters/torch/iterator.py", "adapters/torch/worker.py"
    expected = everything(iter(made))

    def step(countdown):
        iterator = iter(made)
        got = [take(iterator) for _ in range(countdown % 4)]
        seed_all()
        with interrupted(countdown // 4 + 1, *files) as struck:
            got.append(take(iterator))
        own = drawn()
        seed_all()
        assert own == drawn()
        made.load_state_dict(made.state_dict())
        got += everything(iter(made))
        assert [each for each in got if each != "end"] == expected
        return struck.is_set()

    assert first_hits(step, 7 if num_workers else 1) > 3


class Pressing(Plain):
    """Ctrl-C comes once, in the middle of its sample 4."""

    pressed = False

    def __getitem__(self, index):
        if index == 4 and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return index


def test_ctrl_c_in_a_data_set_without_workers():
    """A resume makes the batch; the iterator has lost it, as torch's does."""
    made = cseq.DataLoader(Pressing(8), batch_size=2)
    iterator = iter(made)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = made.state_dict()
    assert state["_num_yielded"] == 2
    assert [batch.tolist() for batch in iterator] == [[6, 7]]
    made.load_state_dict(state)
    assert [batch.tolist() for batch in made] == [[4, 5], [6, 7]]


def take(iterator):
    """Take a batch, or the exception raised instead."""
    try:
        return next(iterator, "end")
    except (LookupError, TypeError) as error:
        return "no sample 1" if "no sample 1" in str(error) else repr(error)


def everything(iterator):
    """Take all that remains."""
    return list(iter(lambda: take(iterator), "end"))


class Stuck(Plain):
    def __init__(self, path):
        super().__init__(3)
        self.path = path

    def __getitem__(self, index):
        while not self.path.exists():
            a_place_to_be_found()
        return index


def a_place_to_be_found():
    """Appear by name in the stack."""
    time.sleep(0.05)


# At this time, a worker that imports torch is not yet in the data set.
@pytest.mark.parametrize("how", [pytest.param(FORK, marks=forked), THREADS], ids=["fork", "thread"])
def test_a_timeout_shows_where_the_worker_is(tmp_path, how):
    """The batch is not lost."""
    path = tmp_path / "gate"
    iterator = iter(cseq.DataLoader(Stuck(path), batch_size=None, timeout=0.5, **how))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds") as late:
        next(iterator)
    assert isinstance(late.value, TimeoutError)
    assert isinstance(late.value, LoaderTimeout)
    assert "a_place_to_be_found" in str(late.value)
    path.touch()
    assert next(iterator) == 0
    assert list(iterator) == [1, 2]


def test_a_batch_that_kills_again_and_again_is_an_error():
    iterator = iter(loader(Deadly(4, 1), batch_size=None))
    assert next(iterator) == 0
    told = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
    with pytest.raises(cseq.WorkerDied, match=told) as caught:
        next(iterator)
    died = caught.value
    assert str(died).count(": worker 1 ") == 1
    assert died.indices == [1]
    assert list(iterator) == []


@pytest.mark.parametrize(
    ("batch_size", "number", "key"), [(None, 1, 1), (1, 1, [1]), (10, 0, [*range(10)])]
)
def test_a_death_names_the_key(batch_size, number, key):
    """With a generator for each batch, the number of the batch is no key."""
    iterator = iter(loader(Deadly(10, 1), batch_size=batch_size, rng="batch", num_workers=1))
    for _ in range(number):
        next(iterator)
    named = re.escape(f"batch {number} ({key}) of worker 0, epoch 0")
    with pytest.raises(cseq.WorkerDied, match=named) as caught:
        next(iterator)
    assert caught.value.indices == ([key] if batch_size is None else key)


def test_who_makes_the_batches_behind_a_resume():
    """Worker k mod N makes batch k, of the resumed epoch and of the next one; its death says so."""
    options = {"num_workers": 3, "batch_size": None, "persistent_workers": True}
    made = loader(Told(8), **options)
    assert list(made) == [0, 1, 2, 0, 1, 2, 0, 1]
    iterator = iter(made)
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 0]
    again = loader(Told(8), **options)
    again.load_state_dict(made.state_dict())
    assert list(again) == [1, 2, 0, 1]
    assert list(again) == [0, 1, 2, 0, 1, 2, 0, 1]
    again = loader(Told(8, deadly=5), **options)
    again.load_state_dict(made.state_dict())
    iterator = iter(again)
    assert next(iterator) == 1
    with pytest.raises(cseq.WorkerDied, match="worker 2") as caught:
        next(iterator)
    assert (caught.value.worker, caught.value.batch) == (2, 1)


def test_death_in_an_iterable_data_set():
    made = loader(Sharded(60, 60), batch_size=2)
    seed_all()
    expected = list(made)
    seed_all()
    iterator = iter(made)
    taken = [next(iterator) for _ in range(3)]
    kill(iterator._workers[0].pid)
    taken += iterator
    assert same(taken, expected)


# ── generators seeded for each batch ───────────────────────────────────────────────────────


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_same_for_any_number_of_workers(persistent):
    options = {"batch_size": 3, "shuffle": True, "rng": "batch"}
    expected, after = run(cseq.DataLoader, Augmented(13), 2, options)
    expected = [without_told(epoch) for epoch in expected]
    assert not same(*expected)
    for num_workers in (1, 2, 5):
        forked = FORK | {"num_workers": num_workers, "persistent_workers": persistent}
        batches, drawn_after = run(cseq.DataLoader, Augmented(13), 2, options | forked)
        assert same([without_told(epoch) for epoch in batches], expected)
        assert drawn_after == after
