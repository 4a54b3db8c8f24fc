"""`install`: torch's own DataLoader class with cseq's workers; `cseq run`."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
import zipfile
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
from conftest import complaints

torch = pytest.importorskip("torch")

from checkout import import_path  # noqa: E402
from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Augmented, Plain, Sharded, same, seed_all, without_told  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import (  # noqa: E402
    defaults,
    fallback,
    install,
    installed,
    is_installed,
    names,
    uninstall,
)
from cseq.adapters.torch.fallback import made  # noqa: E402
from cseq.adapters.torch.iterator import LoaderIterator  # noqa: E402
from cseq.measure import advice  # noqa: E402

QUICK = QUICKEST.start_method
FORK: Any = {"num_workers": 2, "multiprocessing_context": QUICK}

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
    uninstall()
    uninstall()
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
    monkeypatch.setattr(defaults, "rng", "batch")
    sampler = Stateful(range(3))
    options = FORK if num_workers else {}
    with installed():
        assert len(list(data.DataLoader(Plain(3), sampler=sampler, **options))) == 3
    assert sampler.asked == 0
    assert len(list(cseq.DataLoader(Plain(3), sampler=sampler, **options))) == 3
    assert sampler.asked > 0


def test_in_a_with_statement():
    with installed():
        assert is_installed()
        with installed():
            pass
        assert is_installed()
    assert not is_installed()
    install()
    with installed():
        pass
    assert is_installed()


def test_without_workers_it_is_torchs_iterator():
    with installed():
        assert type(iter(data.DataLoader(Plain(2)))) is names.Inline


def test_subclasses():
    class Kept(data.DataLoader[Any]):
        pass

    class Own(data.DataLoader[Any]):
        def _get_iterator(self):
            return iter(["own"])

    with installed():
        assert type(iter(Kept(Plain(2), **FORK))) is LoaderIterator
        assert next(iter(Own(Plain(2), **FORK))) == "own"
        assert type(iter(cseq.DataLoader(Plain(2), **FORK))) is LoaderIterator


def test_the_default_of_the_process(monkeypatch):
    expected = without_told(batches(cseq.DataLoader, rng="batch"))
    monkeypatch.setattr(defaults, "rng", "batch")
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


# ── where it cannot be ─────────────────────────────────────────────────────────────────────


class Made(Exception):
    """Says that torch's own iterator was made."""


@pytest.fixture
def seeds(monkeypatch):
    """Stop torch's own iterator once it has drawn its seed, which is recorded."""
    drawn = []

    def make(self, loader):
        names.Base.__init__(self, loader)
        drawn.append(self._base_seed)
        self._shutdown = True
        raise Made

    monkeypatch.setattr(names.Workers, "__init__", make)
    return drawn


def check_fallback(loader, caplog, reason):
    """Check that an iterator is torch's own, and that one line gives the reason, once."""
    for _ in range(2):
        with pytest.raises(Made):
            iter(loader)
    [record] = [each for each in caplog.records if each.name == "cseq"]
    assert record.levelno == logging.WARNING
    assert "falls back to torch's own iterator" in record.message
    assert reason in record.message


def test_a_context_that_starts_its_own_processes(seeds, caplog):
    context = multiprocessing.get_context(QUICK)
    own = type("Own", (type(context),), {"Process": type("Own", (context.Process,), {})})()
    loader = cseq.DataLoader(Plain(2), num_workers=1, multiprocessing_context=own)
    check_fallback(loader, caplog, "multiprocessing_context=<")


def test_an_argument_that_is_not_known(seeds, caplog, monkeypatch):
    """The test stands in for a torch with a new argument: cseq read the signature at its import."""
    monkeypatch.setitem(names.UNKNOWN, "worker_method", "multiprocessing")
    loader = cseq.DataLoader(Plain(2), **FORK)
    loader.worker_method = "multiprocessing"  # type: ignore[attr-defined]
    assert type(iter(loader)) is LoaderIterator
    loader.worker_method = "thread"  # type: ignore[attr-defined]
    check_fallback(loader, caplog, "worker_method='thread'")


def test_a_torch_that_has_worker_threads_itself(seeds):
    """Such loaders keep torch's threads, with the `get_worker_info` of these."""
    with installed():
        loader = data.DataLoader(Plain(2), **FORK)
        loader.worker_method = "thread"  # type: ignore[attr-defined]
        with pytest.raises(Made):
            iter(loader)
        assert seeds
        loader.worker_method = "multiprocessing"  # type: ignore[attr-defined]
        assert type(iter(loader)) is LoaderIterator


SPAWN: Any = {"num_workers": 1, "multiprocessing_context": "spawn"}


class Unsent(Plain):
    """Cannot be pickled; counts the attempts."""

    def __init__(self):
        super().__init__(4)
        self.tried = 0

    def __reduce__(self):
        self.tried += 1
        raise TypeError("this data set stays here")


class Known(Unsent):
    """multiprocessing has a reducer for it."""


ForkingPickler.register(Known, lambda _: (Plain, (4,)))


def test_what_cannot_be_pickled(seeds, caplog):
    """The generators are as before the attempt, so torch's own iterator draws the same seed."""
    seed_all()
    check_fallback(cseq.DataLoader(Known(), **SPAWN), caplog, "stays here")
    seed_all()
    with pytest.raises(Made):
        iter(data.DataLoader(Known(), **SPAWN))
    assert seeds[0] == seeds[2]


def test_what_torch_cannot_pickle_either(seeds):
    """Torch's way is not tried: one sentence names the part and the remedy."""
    dataset = Plain(4)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^dataset: cannot pickle .*of the data set") as caught:
        iter(cseq.DataLoader(dataset, **SPAWN))
    assert caught.value.__suppress_context__
    assert not seeds


def test_what_cannot_be_is_tried_once(seeds):
    """It holds even where torch's class has cseq's workers."""
    tried = []
    for context in (contextlib.nullcontext(), installed()):
        dataset = Known()
        with context, pytest.raises(Made):
            iter(cseq.DataLoader(dataset, **SPAWN))
        tried.append(dataset.tried)
    assert tried[0] == tried[1] > 0


def test_all_options_that_are_lost_are_named(seeds, caplog):
    loader = cseq.DataLoader(Known(), **SPAWN, rng="batch", on_error="skip")
    check_fallback(loader, caplog, "it ignores rng='batch', on_error='skip'")
    caplog.clear()
    with pytest.raises(Made):
        iter(cseq.DataLoader(Known(), **SPAWN))
    assert "it ignores" not in caplog.text


def test_a_state_that_would_be_lost(seeds):
    """A fallback would start again at the first batch."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    made = cseq.DataLoader(Plain(4), **FORK)
    iterator = iter(made)
    next(iterator)
    state = made.state_dict()
    list(iterator)
    loader = cseq.DataLoader(Known(), **SPAWN)
    loader.load_state_dict(made.state_dict())
    with pytest.raises(Made):
        iter(loader)
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
    with pytest.raises(Made):
        iter(loader)


class Owned(type(multiprocessing.get_context(QUICK))):  # type: ignore[misc]
    """A context that may start its own processes."""


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("this torch is another", {"num_workers": 0}),
        ("worker_method='thread'", {"num_workers": 0}),
        ("datapipe", {"num_workers": 0}),
        ("multiprocessing_context=<", {"num_workers": 1, "multiprocessing_context": Owned()}),
        ("does not support the start method 'spawn'", SPAWN),
        ("stays here", SPAWN),
    ],
)
@pytest.mark.parametrize("is_begun", [False, True])
def test_the_state_of_a_loader_with_torchs_own_iterator(
    reason, options, is_begun, caplog, monkeypatch
):
    """The state is empty, and the log says so; it does not claim that nothing was taken."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    def make(self, loader):
        names.Base.__init__(self, loader)
        self._shutdown = True

    monkeypatch.setattr(names.Workers, "__init__", make)
    dataset = IterableWrapper(range(6)) if reason == "datapipe" else Plain(6)
    if reason == "this torch is another":
        monkeypatch.setattr(names, "REASON", reason)
    if "spawn" in reason:
        monkeypatch.setattr(fallback, "start_methods", lambda: ("fork",))
    monkeypatch.setitem(names.UNKNOWN, "worker_method", "multiprocessing")
    dataset = Known() if reason == "stays here" else dataset
    loader = cseq.DataLoader(dataset, **options)
    loader.worker_method = "thread" if "thread" in reason else "multiprocessing"  # type: ignore[attr-defined]
    if is_begun:
        iterator = iter(loader)
        if loader.num_workers == 0:
            next(iterator)
    elif reason == "stays here":
        pytest.skip("it is found out where workers would begin")
    caplog.clear()
    assert [loader.state_dict(), loader.state_dict()] == [{}, {}]
    [told] = caplog.messages
    assert told.startswith("the state of this DataLoader is empty: the loader falls back")
    assert reason in told


# ── the command ────────────────────────────────────────────────────────────────────────────

SCRIPT = """\
import os, sys
from torch.utils.data import DataLoader

class Numbers:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index

loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[3])
iterator = iter(loader)
print(__name__, sys.argv[1:], type(iterator).__module__)
print([batch.tolist() for batch in iterator])
from cseq.adapters.torch import defaults
print(defaults.rng)
os.chdir("/")
print(os.path.exists(__file__))
"""


RUN = ["-m", "cseq", "run"]


def called(folder, *arguments):
    """Run Python in a folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("as_module", [False, True])
def test_the_command(run_command, tmp_path, as_module):
    path = tmp_path / "training.py"
    path.write_text(SCRIPT)
    what = ["-m", "training"] if as_module else [path.name]
    done = run_command(tmp_path, "run", "--rng", "batch", *what, "--lr", "3", QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"__main__ ['--lr', '3', '{QUICK}'] cseq.adapters.torch.iterator",
        "[[0, 1], [2, 3]]",
        "batch",
        "True",
    ]


SHOWS = """\
import atexit, sys
print(sys.argv)
print(__name__, __file__, __package__, __spec__ and __spec__.name)
print(sys.path)
print(sys.modules["__main__"].__dict__ is globals())
import beside
atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
"""


@pytest.fixture
def scripts(tmp_path):
    """Make a script with a module beside it, a link to it elsewhere, a folder and an archive."""
    for folder in ("own", "own/program", "links"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own/shows.py").write_text(SHOWS)
    (tmp_path / "own/beside.py").write_text("")
    (tmp_path / "own/program/__main__.py").write_text(SHOWS)
    (tmp_path / "own/program/beside.py").write_text("")
    with zipfile.ZipFile(tmp_path / "own/program.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOWS)
        archive.writestr("beside.py", "")
    (tmp_path / "links/shows.py").symlink_to("../own/shows.py")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["./shows.py", "--", "a", "--lr", "--", "3"],
        ["--", "../links/shows.py", "--help", "--rng"],
        ["-m", "shows", "--", "a", "-m"],
    ],
)
def test_a_script_sees_what_python_shows_it(run_command, scripts, arguments):
    """The script sees its arguments, its name and the modules' search path, even after its end."""
    expected = called(scripts / "own", *arguments)
    assert expected.returncode == 0, expected.stderr
    done = run_command(scripts / "own", "run", *arguments)
    if arguments[0] == "-m":
        # The module exists only while it runs.
        expected.stdout = expected.stdout.removesuffix("True\n")
        done.stdout = done.stdout.removesuffix("False\n")
    assert done.stdout == expected.stdout, done.stderr
    assert done.returncode == 0


def test_the_command_as_it_is_installed(scripts):
    """Its own folder is not on the search path of modules."""
    (scripts / "cseq").write_text("import sys\nfrom cseq.__main__ import main\nsys.exit(main())\n")
    arguments = ["./shows.py", "--", "a"]
    expected = called(scripts / "own", *arguments)
    assert called(scripts / "own", "../cseq", "run", *arguments).stdout == expected.stdout


@pytest.mark.parametrize("program", ["program", "program.pyz"])
def test_a_folder_and_an_archive(run_command, scripts, program):
    done = run_command(scripts / "own", "run", program, "--", "a")
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"{program}', '--', 'a']"), done.stderr
    assert lines[1].startswith(f"__main__ {scripts}/own/{program}/__main__.py")
    assert lines[2].startswith(f"['{scripts}/own/{program}'")
    assert done.returncode == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is new in 3.11")
def test_a_safe_path(scripts):
    (scripts / "own/shows.py").write_text("import sys; print(sys.path)")
    expected = called(scripts, "-P", "own/shows.py")
    assert called(scripts, "-P", *RUN, "own/shows.py").stdout == expected.stdout


@pytest.mark.parametrize(
    "arguments",
    [["./missing.py", "-m"], ["-m", "missing"], ["-m", "missing.too"]],
)
def test_a_script_that_is_not_there(run_command, scripts, arguments):
    """The output is the same line, without a traceback of cseq's."""
    expected = called(scripts, *arguments)
    done = run_command(scripts, "run", *arguments)
    assert done.stderr == expected.stderr
    assert done.returncode == expected.returncode


def test_the_command_without_a_script(run_command, tmp_path):
    assert run_command(tmp_path, "--version").stdout == f"cseq {cseq.__version__}\n"
    done = run_command(tmp_path, "run")
    assert done.returncode == 2
    assert "required: script" in done.stderr


ENGINES = """
import os
import sys
import warnings
from torch.utils import data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

warnings.simplefilter("ignore")
options = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
if __name__ == "__main__":
    samples = list(range(3))
    for loader in data.DataLoader(samples, **options), data.DataLoader(samples):
        for epoch in range(2):
            assert [batch.item() for batch in loader] == samples
    made = _MultiProcessingDataLoaderIter(data.DataLoader(samples, **options))
    assert [batch.item() for batch in made] == samples
    if hasattr(os, "fork") and os.fork():
        os.wait()
"""

TORCHS = "torch.utils.data.dataloader.DataLoader"


def test_the_command_ends_with_the_engine_of_each_kind_of_loader(run_command, tmp_path):
    """An iterator that the program makes itself is torch's, and goes unnoticed."""
    (tmp_path / "engines.py").write_text(ENGINES)
    done = run_command(tmp_path, "run", "engines.py", QUICK)
    assert done.returncode == 0, done.stderr
    why = "with num_workers=0, the loop makes the batches"
    assert [line for line in done.stderr.splitlines() if line.startswith("cseq: ")] == [
        f"cseq: {TORCHS}: 2 iterators, cseq's",
        f"cseq: {TORCHS}: 2 iterators, torch's own, because {why}",
    ]


def told(kind):
    """Return how many iterators of a test's class existed, and why they were torch's."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return [(count, reason) for (loader, reason), count in made.items() if loader == name]


@pytest.mark.parametrize("also", [False, True])
def test_the_engine_of_a_loader_of_cseqs(also):
    """The log reports it once, whether torch's class is patched or not."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    class Kind(cseq.DataLoader[Any]):
        pass

    Kind.__qualname__ = f"Kind{also}"
    with installed() if also else contextlib.nullcontext():
        iter(Kind(Plain(2)))
        iter(Kind(Plain(2), **FORK))
        assert told(Kind) == [(2, None)]
        iter(Kind(IterableWrapper([1, 2]), batch_size=None, **FORK))
    assert told(Kind) == [(2, None), (1, "its data set is a datapipe")]


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


def test_what_accelerate_loses_is_said_with_what_keeps_it(caplog, monkeypatch):
    """The log says so once, but not if nothing is lost, or if other code reads the attributes."""
    there = {"__name__": "accelerate.data_loader"}
    exec(ANOTHER, there)
    elsewhere = {"__name__": "another"}
    exec(ANOTHER, elsewhere)
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
    monkeypatch.setattr(defaults, "rng", "batch")
    caplog.clear()
    there["another"](made)
    assert "loses on_error='skip'; before" in caplog.text
    monkeypatch.setattr(defaults, "on_error", "skip")
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
