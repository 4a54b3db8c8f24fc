"""`install`: torch's DataLoader class with cseq's workers, or with its own."""

import contextlib
import gc
import logging
import multiprocessing
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
from conftest import complaints

pytest.importorskip("torch")

from kinds import QUICKEST
from torch.utils import data
from torch.utils.data.datapipes.iter import IterableWrapper
from torch_data import Augmented, Plain, Sharded, same, seed_all, without_told

import cseq
from cseq._memory import HAS_GIL
from cseq.adapters.torch import fallback, install, installed, is_installed, names, uninstall
from cseq.adapters.torch.iterator import LoaderIterator
from cseq.measure import advice

QUICK = QUICKEST.start_method
FORK = {"num_workers": 2, "multiprocessing_context": QUICK}

pytestmark = pytest.mark.needs("quick processes")


@pytest.fixture(autouse=True)
def undone():
    """Restore torch's class."""
    own = data.DataLoader._get_iterator
    yield
    uninstall()
    assert not hasattr(data.DataLoader, "stats")
    assert data.DataLoader._get_iterator is own


def batches(kind=data.DataLoader, **options):
    """Return an epoch of augmented samples."""
    seed_all()
    return list(kind(Augmented(9), batch_size=2, shuffle=True, **(FORK | options)))


def test_torchs_class_has_our_workers():
    expected = batches()
    install()
    install()
    assert is_installed()
    iterator = iter(data.DataLoader(Plain(2), **FORK))
    assert isinstance(iterator, LoaderIterator)
    assert "cseq" in repr(iterator)
    assert len(list(iterator)) == 2
    assert same(batches(), expected)
    with installed():
        pass
    assert is_installed()
    uninstall()
    uninstall()
    assert not is_installed()
    with installed():
        with installed():
            pass
        assert is_installed()
    assert not is_installed()


@pytest.mark.parametrize("kept", [False, True])
def test_loaders_count(kept):
    """Torch's loaders report what their workers have done, without being kept alive."""
    install()
    loader = data.DataLoader(Plain(6), batch_size=2, persistent_workers=kept, **FORK)
    with pytest.raises(RuntimeError, match="start an epoch"):
        loader.stats()
    for epoch in (1, 2):
        list(loader)
        assert loader.stats().batches == (3 * epoch if kept else 3)
    seen = weakref.ref(loader)
    del loader
    gc.collect()
    assert seen() is None
    inline = data.DataLoader(Plain(2))
    list(inline)
    with pytest.raises(RuntimeError, match="no cseq workers"):
        inline.stats()


def test_the_log_says_a_cause_once(monkeypatch, caplog):
    """It holds for each loader, even though each of its epochs has its own workers."""
    monkeypatch.setattr("cseq.engine.pool.LONG", 0.0)
    monkeypatch.setattr("cseq.engine.pool.LOGGED", 0.0)
    monkeypatch.setattr(advice, "RULES", advice.RULES[-1:])
    caplog.set_level("INFO", logger="cseq")
    loaders = [cseq.DataLoader(Plain(16), num_workers=1) for _ in range(2)]
    for loader in loaders:
        for _ in range(2):
            list(loader)
    assert caplog.text.count("buffer: ") == 2


class Stateful(data.SequentialSampler):
    """Counts the requests for its state."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return {}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_state_is_asked_for(num_workers, monkeypatch):
    """A loader of torch's class has no state to return."""
    # Without this, torch's own iterator would serve the loader without workers.
    monkeypatch.setattr("cseq.adapters.torch.defaults.rng", "batch")
    sampler = Stateful(range(3))
    options = FORK if num_workers else {}
    with installed():
        assert len(list(data.DataLoader(Plain(3), sampler=sampler, **options))) == 3
    assert sampler.asked == 0
    assert len(list(cseq.DataLoader(Plain(3), sampler=sampler, **options))) == 3
    assert sampler.asked > 0


def test_which_loaders_have_our_iterator():
    class Kept(data.DataLoader):
        pass

    class Own(data.DataLoader):
        def _get_iterator(self):
            return iter(["own"])

    with installed():
        assert type(iter(Kept(Plain(2), **FORK))) is LoaderIterator
        assert next(iter(Own(Plain(2), **FORK))) == "own"
        assert type(iter(cseq.DataLoader(Plain(2), **FORK))) is LoaderIterator
        assert type(iter(data.DataLoader(Plain(2)))) is names.Inline


def test_the_default_of_the_process(monkeypatch):
    expected = without_told(batches(cseq.DataLoader, rng="batch"))
    monkeypatch.setattr("cseq.adapters.torch.defaults.rng", "batch")
    with installed():
        assert same(without_told(batches()), expected)
        alone = batches(num_workers=0, multiprocessing_context=None)
        assert same([b["drawn"] for b in alone], [b["drawn"] for b in expected])


def test_somebody_elses_change_is_kept(monkeypatch):
    def other(self):
        return None

    with monkeypatch.context() as patched:
        patched.setattr(data.DataLoader, "_get_iterator", other)
        with pytest.raises(RuntimeError, match="another library has replaced torch"):
            install()
    install()
    with monkeypatch.context() as patched:
        patched.setattr(data.DataLoader, "_get_iterator", other)
        with pytest.raises(RuntimeError, match="undo that first"):
            uninstall()
    assert is_installed()


@pytest.fixture
def seeds(monkeypatch):
    """Record the seeds that torch's own iterators draw, which start no workers."""
    drawn = []

    def make(self, loader):
        names.Base.__init__(self, loader)
        drawn.append(self._base_seed)
        self._shutdown = True

    monkeypatch.setattr(names.Workers, "__init__", make)
    return drawn


def check_fallback(loader, caplog, reason):
    """Check that an iterator is torch's own, and that one line gives the reason, once."""
    for _ in range(2):
        iterator = iter(loader)
        assert type(iterator) in (names.Inline, names.Workers)
        if loader.num_workers == 0:
            next(iterator)
    [record] = [each for each in caplog.records if each.name == "cseq"]
    assert record.levelno == logging.WARNING
    assert "falls back to torch's own iterator" in record.message
    assert reason in record.message


def test_a_torch_that_has_worker_threads_itself(seeds):
    """Such loaders keep torch's threads, with the `get_worker_info` of these."""
    with installed():
        loader = data.DataLoader(Plain(2), **FORK)
        loader.worker_method = "thread"
        assert type(iter(loader)) is names.Workers
        assert seeds
        loader.worker_method = "multiprocessing"
        assert type(iter(loader)) is LoaderIterator


SPAWN = {"num_workers": 1, "multiprocessing_context": "spawn"}


class Known(Plain):
    """Only multiprocessing has a reducer for it; counts the attempts to do without."""

    tried = 0

    def __reduce__(self):
        self.tried += 1
        raise TypeError("this data set stays here")


ForkingPickler.register(Known, lambda _: (Plain, (4,)))


def test_what_cannot_be_pickled(seeds):
    """It is tried once, even where torch's class has cseq's workers.

    The generators are then as before, so torch's own iterator draws the same seed.
    """
    tried = []
    for kind in (cseq.DataLoader, data.DataLoader):
        for context in (contextlib.nullcontext(), installed()):
            seed_all()
            dataset = Known()
            with context:
                assert type(iter(kind(dataset, **SPAWN))) is names.Workers
            tried.append(dataset.tried)
    assert seeds == seeds[:1] * 4
    assert tried == [tried[0], tried[0], 0, tried[0]]
    assert tried[0] > 0


def test_what_torch_cannot_pickle_either(seeds):
    """Torch's way is not tried: one sentence names the part and the remedy."""
    dataset = Plain(4)
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^dataset: cannot pickle .*of the data set") as caught:
        iter(cseq.DataLoader(dataset, **SPAWN))
    assert caught.value.__suppress_context__
    assert not seeds


def test_all_options_that_are_lost_are_named(seeds, caplog):
    loader = cseq.DataLoader(Known(), **SPAWN, rng="batch", on_error="skip")
    check_fallback(loader, caplog, "it ignores rng='batch', on_error='skip'")
    caplog.clear()
    check_fallback(cseq.DataLoader(Known(), **SPAWN), caplog, "stays here")
    assert "it ignores" not in caplog.text


def test_a_state_that_would_be_lost(seeds):
    """A fallback would start again at the first batch."""
    made = cseq.DataLoader(Plain(4), **FORK)
    iterator = iter(made)
    next(iterator)
    state = made.state_dict()
    list(iterator)
    loader = cseq.DataLoader(Known(4), **SPAWN)
    loader.load_state_dict(made.state_dict())
    assert type(iter(loader)) is names.Workers
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"state cannot be used, .* stays here"):
            iter(loader)
    assert loader.state_dict() == state
    pipe = cseq.DataLoader(IterableWrapper(range(6)), **FORK)
    stream = cseq.DataLoader(Sharded(6, 6), **FORK)
    next(iter(stream))
    with pytest.raises(ValueError, match=r"cannot be used, .* because its data set is a datapipe"):
        pipe.load_state_dict(stream.state_dict())
    loader.load_state_dict({})
    assert type(iter(loader)) is names.Workers


class Owned(type(multiprocessing.get_context(QUICK))):
    """A context that may start its own processes."""


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize(
    ("reason", "dataset", "options"),
    [
        ("this torch is another", Plain(6), {}),
        ("worker_method='thread'", Plain(6), FORK),
        ("datapipe", IterableWrapper(range(6)), {}),
        ("multiprocessing_context=<", Plain(6), FORK | {"multiprocessing_context": Owned()}),
        ("does not support the start method 'spawn'", Plain(6), SPAWN),
        ("stays here", Known(), SPAWN),
    ],
)
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_loader_with_torchs_own_iterator(reason, dataset, options, is_begun, caplog, monkeypatch):
    """The log gives the reason, once. The state is empty, and the log says so.

    It does not claim that nothing was taken.
    """
    if reason == "this torch is another":
        monkeypatch.setattr(names, "REASON", reason)
        monkeypatch.setattr(fallback, "_warned", weakref.WeakSet())
    if "spawn" in reason:
        monkeypatch.setattr(fallback, "start_methods", lambda: ("fork",))
    # As if torch had a new argument with this default.
    monkeypatch.setitem(names.UNKNOWN, "worker_method", "multiprocessing")
    loader = cseq.DataLoader(dataset, **options)
    loader.worker_method = "thread" if "thread" in reason else "multiprocessing"
    # What cannot be pickled is found out where workers would begin.
    if is_begun or reason == "stays here":
        check_fallback(loader, caplog, reason)
        caplog.clear()
    assert [loader.state_dict(), loader.state_dict()] == [{}, {}]
    [told] = caplog.messages
    assert told.startswith("the state of this DataLoader is empty: the loader falls back")
    assert reason in told


@pytest.mark.parametrize("context", [contextlib.nullcontext, installed])
def test_the_engine_of_a_loader_of_cseqs(context):
    """The log reports it once, whether torch's class is patched or not."""

    class Kind(cseq.DataLoader):
        pass

    fallback.made.clear()
    name = f"{Kind.__module__}.{Kind.__qualname__}"
    with context():
        iter(Kind(Plain(2)))
        iter(Kind(Plain(2), **FORK))
        assert fallback.made == {(name, None): 2}
        iter(Kind(IterableWrapper([1, 2]), batch_size=None, **FORK))
    assert fallback.made == {(name, None): 2, (name, "its data set is a datapipe"): 1}


# Like accelerate's `prepare` and `skip_first_batches`, this passes on the attributes of torch's
# class.
ANOTHER = """
from torch.utils.data import DataLoader

def another(loader):
    names = "dataset", "batch_sampler", "num_workers", "multiprocessing_context", "collate_fn"
    return DataLoader(**{name: getattr(loader, name) for name in names})
"""


class Odd(Plain):
    def __getitem__(self, index):
        if index % 2 == 0:
            raise ValueError(index)
        return index


@pytest.mark.skipif(not HAS_GIL, reason="torch's own loader leaves its workers there")
def test_what_accelerate_loses_is_said_with_what_keeps_it(caplog, monkeypatch):
    """The log says so once, but not if nothing is lost, or if other code reads the attributes."""
    there, elsewhere = {"__name__": "accelerate.data_loader"}, {"__name__": "another"}
    for module in (there, elsewhere):
        exec(ANOTHER, module)
    made = cseq.DataLoader(Odd(4), batch_size=2, **FORK, on_error="skip", rng="batch")
    elsewhere["another"](made)
    assert complaints(caplog.messages) == []
    for _ in range(2):
        with pytest.raises(ValueError, match="0"):
            list(there["another"](made))
    (said,) = caplog.messages
    assert "loses cseq's workers, rng='batch', on_error='skip'; before" in said
    assert "set cseq.adapters.torch.defaults.on_error = 'skip'" in said
    install()
    monkeypatch.setattr("cseq.adapters.torch.defaults.rng", "batch")
    caplog.clear()
    there["another"](made)
    assert "loses on_error='skip'; before" in caplog.text
    monkeypatch.setattr("cseq.adapters.torch.defaults.on_error", "skip")
    caplog.clear()
    assert [batch.tolist() for batch in there["another"](made)] == [[1], [3]]
    assert "accelerate" not in caplog.text


def test_a_program_may_put_the_class_under_torchs_name(monkeypatch):
    own, expected = data.DataLoader, batches(cseq.DataLoader)
    with monkeypatch.context() as patched:
        for module in (data, data.dataloader):
            patched.setattr(module, "DataLoader", cseq.DataLoader)
        assert same(batches(data.DataLoader), expected)
        install()
        assert same(batches(own), expected)
