"""What a data set sees of its worker, and how exceptions arrive, as with torch's own loader."""

import contextlib
import contextvars
import decimal
import multiprocessing
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Plain, as_is  # noqa: E402
from torch_loaders import FORK, check, forked, loader  # noqa: E402

import cseq.testing  # noqa: E402

pytestmark = [
    pytest.mark.needs("quick processes"),
    # torch warns of this on machines with few processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


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

    def __init__(self, error):
        super().__init__(8)
        self.error = error

    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return index


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_worker_that_would_leave(error):
    """The trainer must not exit successfully: it gets torch's exception instead of the batch."""
    iterator = iter(loader(Leaving(error), batch_size=None))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    name = type(error).__name__
    with pytest.raises(RuntimeError, match=rf"\(pid\(s\) \d+\) exited unexpectedly: {name}"):
        next(iterator)
    assert list(iterator) == [4, 5, 6, 7]
    left_out = loader(Leaving(error), batch_size=None, on_error="skip")
    assert list(left_out) == [0, 1, 2, 4, 5, 6, 7]


class Threads(Plain):
    """Returns the thread's name, which log lines show."""

    def __getitem__(self, index):
        return threading.current_thread().name


def test_the_thread_of_a_worker():
    assert list(loader(Threads(2), batch_size=None)) == ["MainThread"] * 2


class Related(Plain):
    """Returns what multiprocessing knows of its process, and of the trainer's."""

    def __getitem__(self, index):
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join(0.01)
        numbers = multiprocessing.current_process()._identity  # type: ignore[attr-defined]
        return parent.pid, parent.name, parent.is_alive(), numbers


def test_what_multiprocessing_knows_of_the_trainer():
    """Workers have different numbers as well, by which users choose devices and files."""
    told = os.getpid(), multiprocessing.current_process().name, True
    assert list(loader(Related(2), batch_size=None)) == [[*told, [1]], [*told, [2]]]


OWN_VALUE = contextvars.ContextVar("OWN_VALUE", default=0)


class Inherited(Plain):
    """The samples depend on thread-local state."""

    def __getitem__(self, index):
        with contextlib.suppress(FloatingPointError):
            np.float64(1) / np.float64(0)
            return "divided"
        third = str(decimal.Decimal(1) / 3)
        return OWN_VALUE.get(), third, torch.ones(1, 1) @ torch.ones(1, 1), index


@forked
def test_what_the_calling_thread_has_is_inherited():
    def told():
        OWN_VALUE.set(7)
        decimal.getcontext().prec = 9
        with np.errstate(all="raise"), torch.autocast("cpu", torch.bfloat16):
            [[[value, third, product, _]]] = check(Inherited(1), epochs=1)
        assert value.item() == 7
        assert third == ("0.333333333",)
        assert product.dtype == torch.bfloat16

    contextvars.copy_context().run(told)


@forked
def test_modes_of_the_calling_thread_are_inherited():
    """The modes are gradients, and autocast of every device."""

    class Modes(Plain):
        def __getitem__(self, index):
            cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            return torch.is_grad_enabled(), cast

    options = {"batch_size": None, "collate_fn": as_is}
    [usual] = loader(Modes(1), **options)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float32)
    try:
        with torch.no_grad():
            [[changed]] = check(Modes(1), 1, **options)
    finally:
        torch.set_autocast_enabled("cuda", usual[1][0])
        torch.set_autocast_dtype("cuda", usual[1][1])
    assert usual[0] is True
    assert changed == (False, (True, torch.float32))


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


class Fails(Plain):
    def __getitem__(self, index):
        if index == 1:
            raise LookupError(index)
        return index


def test_a_batch_that_raises_has_torchs_number():
    """Torch's count, by which it warns of a length that is too small, excludes the batch."""

    def numbers(kind):
        iterator = iter(kind(Fails(3), batch_size=None))
        counted = []
        for _ in range(3):
            with contextlib.suppress(LookupError):
                next(iterator)
            counted.append(iterator._num_yielded)
        return counted

    assert numbers(cseq.DataLoader) == numbers(data.DataLoader) == [1, 1, 2]


def test_the_text_of_an_exception_has_the_traceback():
    iterator = iter(loader(Fails(3), batch_size=None))
    assert next(iterator) == 0
    with pytest.raises(LookupError, match="in __getitem__") as caught:
        next(iterator)
    if hasattr(caught.value, "__notes__"):
        # Exceptions have notes from Python 3.11 on.
        said = "Caught LookupError in DataLoader worker process 1.\nOriginal"
        assert str(caught.value).startswith(said)


class Computing(Plain):
    def __getitem__(self, index):
        return torch.get_num_threads()


def test_a_worker_computes_with_one_thread(monkeypatch):
    """Workers do as torch's do, for any environment."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(loader(Computing(2), batch_size=None)) == [1, 1]
    finally:
        torch.set_num_threads(before)


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
