"""The most common complaints about torch's DataLoader, and the proof that cseq does better."""

import mmap
import os
import sqlite3
import threading
import time

import held
import pytest

torch = pytest.importorskip("torch")

from torch_data import Counting, Plain  # noqa: E402
from torch_loaders import BrokenItems, few_processors, forked, loader  # noqa: E402

from cseq import testing  # noqa: E402
from cseq.adapters.torch import names  # noqa: E402

pytestmark = [forked, few_processors]


# ── memory ──────────────────────────────────────────────────────────────────────────────


# A process of its own, so that the copies of a worker's other objects cost both loaders the same.
COPYING = """\
import re, torch
import cseq
from torch.utils.data import DataLoader

class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.texts = [f"a text of its own: {number}" for number in range(200_000)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return len(self.texts[index]), private() if index % 2000 == 0 else 0

def private():
    \"\"\"How many kB of memory this process shares with no other.\"\"\"
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(kb) for kb in re.findall(r"^Private_\\w+: +(\\d+) kB", file.read(), re.M))

dataset = Texts()
for kind in (DataLoader, cseq.DataLoader):
    loader = kind(dataset, batch_size=1000, num_workers=1, multiprocessing_context="fork",
                  persistent_workers=True)
    print(max(int(batch[1].max()) for _ in range(3) for batch in loader))
    del loader
"""


@pytest.mark.nightly
@pytest.mark.needs("Linux")
def test_workers_copy_no_more_of_the_data_set_than_torchs(run_prepared):
    torchs, ours = map(int, run_prepared(COPYING).stdout.split())
    assert 1000 < ours < 1.1 * torchs


# ── descriptors and shared memory ───────────────────────────────────────────────────────

KEEPING = """\
import resource, sys, torch
import cseq

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.full((10_000,), index)

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
made = cseq.DataLoader(Large(), batch_size=None, num_workers=2, multiprocessing_context="fork")
kept = list(made)
print(len(kept), all(bool((batch == number).all()) for number, batch in enumerate(kept)))
"""


def test_a_thousand_batches_are_kept_with_a_hundred_descriptors(run_prepared):
    done = run_prepared(KEEPING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1000", "True"]


# ── pinning ────────────────────────────────────────────────────────────────────────────


class Begun(Plain):
    """Records which sample was begun last."""

    def __init__(self, length):
        super().__init__(length)
        # Forked workers share this memory.
        self.latest = mmap.mmap(-1, 1)

    def __getitem__(self, index):
        self.latest[0] = index
        return super().__getitem__(index)

    def wait_for(self, index):
        """Wait until a sample is begun; a single worker's earlier samples are then ready."""
        while self.latest[0] < index:
            time.sleep(0.001)


def pinning_threads():
    return [thread for thread in threading.enumerate() if thread.name == "cseq-pin"]


def pinned_by(iterator):
    """Return an iterator that pins its batches, as on a machine with an accelerator."""
    iterator._pin_memory = True
    return iterator


def test_pinning_overlaps_the_loop(monkeypatch):
    """While the loop has a batch, the next one, if ready, is pinned; this draws no key."""
    pinned = []
    changed = threading.Condition()

    def pin(batch, device):
        with changed:
            pinned.append(batch)
            changed.notify_all()
        return -batch

    monkeypatch.setattr(names, "pin", pin)
    dataset, keys = Begun(12), Counting(range(12))
    made = loader(dataset, batch_size=None, sampler=keys, num_workers=1, prefetch_factor=4)
    iterator = pinned_by(iter(made))
    assert keys.count == 4
    for number in range(12):
        # The next batch is then ready.
        dataset.wait_for(min(number + 2, 11))
        assert next(iterator) == -number
        assert keys.count == min(12, 4 + number + 1)
        assert made.state_dict()["_num_yielded"] == number + 1
        if number < 10:
            with changed:
                assert changed.wait_for(lambda last=number + 1: last in pinned, 60)
    assert list(iterator) == []
    assert pinned == list(range(12))
    # The threads end with the epoch.
    for thread in pinning_threads():
        thread.join(60)
        assert not thread.is_alive()


def test_nothing_is_pinned_ahead_where_the_order_is_not_known(monkeypatch):
    """There is no such thread, and none where nothing is to be pinned."""
    monkeypatch.setattr(names, "pin", lambda batch, device: -batch)
    options = {"batch_size": None, "num_workers": 1, "prefetch_factor": 4}
    dataset = Begun(6)
    unordered = pinned_by(iter(loader(dataset, in_order=False, **options)))
    dataset.wait_for(2)
    assert next(unordered) == 0
    iterable = pinned_by(iter(loader(BrokenItems(6, ()), **options)))
    assert next(iterable) == 0
    unpinned = Begun(6)
    plain = iter(loader(unpinned, **options))
    unpinned.wait_for(2)
    assert next(plain) == 0
    assert pinning_threads() == []
    assert list(unordered) == [-1, -2, -3, -4, -5]
    assert list(iterable) == [-1, -2, -3, -4, -5]
    assert list(plain) == [1, 2, 3, 4, 5]


def test_what_cannot_be_pinned_ahead_is_raised_in_its_place(monkeypatch):
    failed = threading.Event()

    def pin(batch, device):
        if batch == 1:
            failed.set()
            raise RuntimeError("no page-locked memory")
        return -batch

    monkeypatch.setattr(names, "pin", pin)
    dataset = Begun(4)
    iterator = pinned_by(iter(loader(dataset, batch_size=None, num_workers=1, prefetch_factor=4)))
    dataset.wait_for(3)
    assert next(iterator) == 0
    assert failed.wait(60)
    with pytest.raises(RuntimeError, match="page-locked"):
        next(iterator)
    assert list(iterator) == [-2, -3]


class Noting(Plain):
    """A sample tells whether a batch was being pinned when its worker was forked."""

    is_pinning = False

    def __getitem__(self, index):
        return index, self.is_pinning


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_no_worker_is_forked_while_a_batch_is_pinned(whose, monkeypatch):
    """The next epoch waits for the pinning, and gets no batch of the previous epoch."""
    dataset = Noting(8)
    begun, ended = threading.Event(), threading.Event()

    def pin(batch, device):
        if threading.current_thread() is threading.main_thread() or ended.is_set():
            return batch
        dataset.is_pinning = True
        begun.set()
        assert ended.wait(60)
        dataset.is_pinning = False
        return "of the epoch before"

    monkeypatch.setattr(names, "pin", pin)
    options = {"num_workers": 1, "batch_size": None}
    made = loader(dataset, persistent_workers=True, **options)
    iterator = pinned_by(iter(made))
    testing.await_workers(made)
    taken = 0
    # The loop ends once a batch was ready when another one was returned.
    while not begun.wait(0.01):
        assert next(iterator) == [taken, False]
        taken += 1
    if whose == "its own":
        testing.kill(made, 0)
        # Wait until the death is known.
        while held.ready(made)[0]:
            time.sleep(0.001)
    else:
        made = loader(dataset, **options)
    threading.Timer(0.2, ended.set).start()
    assert list(made) == [[number, False] for number in range(8)]


PINNING_AT_THE_END = """
import threading
import cseq
from cseq.adapters.torch import names

begun, left = threading.Event(), threading.Event()

def pin(batch, device):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        left.wait()
        print("pinned")
    return batch

names.pin = pin
loader = cseq.DataLoader(range(100), num_workers=1, persistent_workers=True)
iterator = iter(loader)
iterator._pin_memory = True
while not begun.wait(0.01):
    next(iterator)
print("the loop is left", flush=True)
threading.Timer(0.2, left.set).start()
"""


def test_the_program_ends_while_a_batch_is_pinned(run_prepared):
    """The program waits: the device's library must not end in the middle of a call."""
    done = run_prepared(PINNING_AT_THE_END)
    assert (done.returncode, done.stdout) == (0, "the loop is left\npinned\n"), done.stderr


def test_a_thread_that_pins_has_the_loops_device(monkeypatch):
    chosen = []

    class Module:
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 3)
        set_device = chosen.append

    threads = []
    monkeypatch.setattr(torch, "cuda", Module)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    names.settle_pinning("cuda")()
    names.settle_pinning(None)()
    assert chosen == [3, 3]
    assert threads == [1, 1]


# ── one slow sample ────────────────────────────────────────────────────────────────────


class Gated(Plain):
    """Indices 0 to 2 wait for a file; the others record which process made them."""

    def __init__(self, folder):
        super().__init__(16)
        self.folder = folder

    def __getitem__(self, index):
        while index < 3 and not (self.folder / ("gate" if index == 2 else "asked")).exists():
            time.sleep(0.01)
        (self.folder / str(index)).touch()
        return index, os.getpid()


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_a_slow_batch_leaves_the_rest_to_other_workers(tmp_path, rng):
    """The sampler's order still holds; with rng="batch", the slow worker gets no more keys."""
    made = loader(Gated(tmp_path), batch_size=None, prefetch_factor=4, rng=rng, shuffle=False)
    iterator = iter(made)
    # Before this point, index 2 might go to the quick worker.
    (tmp_path / "asked").touch()
    # The loop ends when the other worker has made all of its batches.
    while not (tmp_path / "7").exists():
        time.sleep(0.01)
    batches = [next(iterator), next(iterator)]
    if rng == "batch":
        # The next two keys are drawn, and the slow worker gets neither.
        while not ((tmp_path / "8").exists() and (tmp_path / "9").exists()):
            time.sleep(0.01)
    (tmp_path / "gate").touch()
    batches += iterator
    assert [index for index, _ in batches] == list(range(16))
    workers = [worker.pid for worker in iterator._workers]
    made_by = [workers.index(pid) for _, pid in batches]
    assert made_by[:8] == [0, 1] * 4
    assert made_by[8:10] == ([1, 1] if rng == "batch" else [0, 1])


class Rows(Plain):
    """Reads a database over a connection opened before the start, or at first use."""

    def __init__(self, path, *, early):
        super().__init__(4)
        self.path = path
        self.connection = sqlite3.connect(path) if early else None

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        return int(self.connection.execute("SELECT ?", (index,)).fetchone()[0])


# From Python 3.13 on, sqlite3 warns of connections that are not closed.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.parametrize("method", ["fork", "thread"])
def test_a_connection_from_before_the_start_is_refused_with_what_to_do(tmp_path, method):
    """sqlite3's error mentions threads only; a note says to open it in the workers, which works."""
    given = {"worker_method": "thread", "num_workers": 1} if method == "thread" else {}
    with pytest.raises(sqlite3.ProgrammingError) as caught:
        list(loader(Rows(tmp_path / "rows", early=True), **given))
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("open it in each worker instead, on first use" in each for each in told)
    assert [int(x) for x in loader(Rows(tmp_path / "rows", early=False), **given)] == [*range(4)]
