"""Global generators: `random`, numpy.random and torch draw the same whoever makes a batch."""

# ruff: noqa: NPY002 - numpy's global generator is what this is about

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from indexers import Killing
from kinds import INLINE, PROCESSES, QUICKEST, Kind, stream

import cseq
from cseq import context, seeding
from cseq._core import derive

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunScript


class Drawing:
    """Draws from what is imported anyway; `made` is drawn by the constructor."""

    def __init__(self) -> None:
        self.made = random.random(), np.random.rand()

    def __getitem__(self, indices: Any) -> Any:
        # An odd number of Gaussian ones: each generator keeps the second of a pair.
        return (self.made, random.gauss(0, 1), np.random.randn(), np.random.randint(1 << 30),
                random.random())  # fmt: skip


class Dying(Killing):
    """Kills its worker at some indices, after it has drawn."""

    def __getitem__(self, indices: Any) -> Any:
        drawn = Drawing()[indices][1:]
        super().__getitem__(indices)
        return drawn


def states() -> tuple[Any, ...]:
    """Return what this process's generators would draw next."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), name, key.tobytes(), rest


# -- the same draws


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        pytest.param(kind, number, id=f"{kind.name}-{number}")
        for kind in PROCESSES
        for number in ([1, 2, 5] if kind is QUICKEST else [2])  # the number is nothing to a start
    ],
)
def test_draws_whatever_the_workers(kind: Kind, num_workers: int) -> None:
    """Any number and kind of worker processes draw what test mode draws, in every epoch."""
    options: dict[str, Any] = {"batch_size": 3, "epochs": 2}
    want = stream(INLINE, Drawing, 40, **options)
    assert stream(kind, Drawing, 40, num_workers=num_workers, **options) == want
    assert len({batch[1:] for batch in want}) == len(want) == 28


def test_seeds_differ() -> None:
    """Another seed, another rank: other draws."""
    drawn = []
    for options in ({"seed": 43}, {"seed": 42, "shard": (1, 2)}, {"seed": 42, "shard": (0, 2)}):
        drawn += [batch[1:] for batch in stream(INLINE, Drawing, 16, batch_size=2, **options)]
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.needs("POSIX")
def test_after_a_death(tmp_path: Path) -> None:
    """A batch that is made again draws the same again."""
    for name in ("want", "got"):
        (tmp_path / name).mkdir()
    kind = PROCESSES[0]
    for name in ("1", "17", "39"):
        (tmp_path / "want" / name).touch()  # nothing dies
    with kind.start(DyingIn(tmp_path / "want"), 40, batch_size=4) as m:
        want = list(m)
        assert m.stats().restarts == 0
    with kind.start(DyingIn(tmp_path / "got"), 40, batch_size=4) as m:
        assert list(m) == want
        assert m.stats().restarts > 0
    assert stream(INLINE, DyingIn(tmp_path / "want"), 40, batch_size=4) == want


class DyingIn:
    """Makes `Dying` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Dying:
        return Dying(self.folder, (1, 17, 39))


@pytest.mark.needs("worker processes")
def test_after_a_resume() -> None:
    """What is left of an epoch draws as it would have without the interruption."""
    want = stream(INLINE, Drawing, 40, batch_size=4)
    with PROCESSES[0].start(Drawing, 40, batch_size=4) as m:
        batches = iter(m)
        got = [next(batches) for _ in range(3)]
        state = m.state_dict()
    m = INLINE.make(Drawing, 40, batch_size=4)
    m.load_state_dict(state)
    with m.start_test() as batches:
        got += list(batches)
    assert got == want


LAZY = """
import sys
import cseq
from cseq.launcher import start_methods

class Lazy:
    '''Imports what it draws from in its batches, and torch only in some of them.'''

    def __getitem__(self, indices):
        import random
        import numpy.random
        drawn = [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]
        if 3 in indices or 20 in indices:
            import torch
            drawn += [torch.rand(3).tolist(), torch.randn(1).item(), torch.randperm(9).tolist()]
        return drawn

def run(num_workers, method):
    m = cseq.MPSequence(Lazy, 24, num_workers=num_workers, batch_size=4, out_type="null", seed=3,
                        start_method=method)
    with m.start() if method else m.start_test() as batches:
        return [batch for _ in range(2) for batch in batches]

methods = start_methods()
assert "torch" not in sys.modules and "numpy.random" not in sys.modules
first = [run(1, method) for method in sorted({methods[0], methods[-1]})]
assert "torch" not in sys.modules and "numpy.random" not in sys.modules
inline = run(1, None)
assert "torch" in sys.modules
before = sys.modules["torch"].get_rng_state().tolist()
again = [run(1, None), run(2, methods[-1])]
assert before == sys.modules["torch"].get_rng_state().tolist()
print(all(other == inline for other in first + again))
print(not any(type(finder).__module__ == "cseq.seeding" for finder in sys.meta_path))
"""


def test_modules_imported_by_a_batch(run_script: RunScript) -> None:
    """A batch that imports numpy.random or torch draws as if they had been there before.

    In workers that have imported them and in those that have not, also in test mode in a trainer
    that has not: its own generators are as they were after their import.
    """
    pytest.importorskip("torch")
    done = run_script(LAZY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue\n"


TORCH = """
import random
import numpy as np
import torch
import cseq
from cseq.launcher import start_methods

class Noise:
    def __getitem__(self, indices):
        return [random.random(), np.random.randn(), torch.randn(2).tolist(), torch.rand(1).item()]

def run(num_workers, method=None):
    m = cseq.MPSequence(Noise, 30, num_workers=num_workers or 1, batch_size=4, out_type="null",
                        seed=3, start_method=method)
    with m.start() if num_workers else m.start_test() as batches:
        return [batch for _ in range(2) for batch in batches]

def states():
    return str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

np.random.seed(1)
np.random.randn()  # one of a pair is kept for later
before = states()
want = run(0)
print(before == states())
first, quickest = start_methods()[0], start_methods()[-1]
kinds = [(1, quickest), (5, quickest), (2, first), (1, "spawn")]
if quickest == "spawn":  # each worker imports torch anew
    kinds = [(2, "spawn")]
print(all(run(*kind) == want for kind in kinds))
print(before == states())
"""


def test_torch(run_prepared: RunScript) -> None:
    """The CPU generator of torch, too; the trainer's own are left as they were."""
    pytest.importorskip("torch")
    done = run_prepared(TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue\nTrue\n"


# -- what is left alone


def test_test_mode_restores() -> None:
    """The trainer's generators are between two batches what they would be without them."""
    np.random.seed(5)
    np.random.randn()
    random.seed(5)
    random.gauss(0, 1)
    before = states()
    with INLINE.start(Drawing, 12, batch_size=4) as m:
        batches = iter(m)
        for _ in range(3):
            next(batches)
            assert states() == before
    assert states() == before


def test_test_mode_restores_after_an_exception() -> None:
    """Also after a batch, or a constructor, that raises."""

    class Raises:
        def __getitem__(self, indices: Any) -> Any:
            random.random()
            raise ValueError("x")

    class Unmade:
        def __init__(self) -> None:
            np.random.rand()
            raise LookupError("y")

        def __getitem__(self, indices: Any) -> Any:
            raise AssertionError

    for worker, error in ((Raises, ValueError), (Unmade, LookupError)):
        before = states()
        with INLINE.start(worker, 4) as m, pytest.raises(error):
            next(iter(m))
        assert states() == before


@pytest.mark.needs("fork")
def test_switched_off() -> None:
    """With seed_globals=False, test mode draws from the trainer's, a forked worker from copies."""
    m = cseq.MPSequence(
        Drawing, 6, num_workers=1, batch_size=3, out_type="null", seed=1, start_method="fork",
        seed_globals=False,
    )  # fmt: skip
    random.seed(7)
    np.random.seed(7)
    made, _, normal, integer, _ = want = Drawing()[None]
    np.random.seed(7)
    with m.start() as batches:  # Python seeds `random` anew in a child
        got = next(iter(batches))
    assert (got[0][1], *got[2:4]) == (made[1], normal, integer)
    random.seed(7)
    with m.start_test() as batches:
        assert next(iter(batches)) == want


def test_threads_are_not_seeded() -> None:
    """Threads share the generators with the training loop: nothing seeds them there."""
    random.seed(7)
    np.random.seed(7)
    before = states()
    with cseq.MTSequence(np.arange(10), 10, out_type="null").start() as batches:
        list(batches)
    assert states() == before


@pytest.mark.parametrize("value", [1, None, "no"])
def test_a_wrong_argument(value: Any) -> None:
    """`seed_globals` is True or False."""
    with pytest.raises(TypeError, match="seed_globals"):
        cseq.MPSequence(np.arange(3), 3, seed_globals=value)


# -- the seeds themselves


class Ticket:
    epoch, batch, start = 2, 3, 12


def test_the_seeds_are_those_of_the_documentation() -> None:
    """docs/inside/shuffle.md says how to compute them."""
    batch_context = context.BatchContext(0, 1, 9)
    batch_context.set(Ticket())
    seeds = seeding.Seeds(batch_context)
    before = states()
    try:
        seeds.open()
        got = random.random(), np.random.rand()
        [key] = derive(9, 2, 4, 1)
        words = derive(key, 12, 4, 3)
        random.seed(words[0])
        np.random.seed(words[1] % 2**32)
        assert got == (random.random(), np.random.rand())
        seeds.close()
        seeding.Imported().seed(words)
        assert got == (random.random(), np.random.rand())
    finally:
        seeds.close()
        random.setstate(before[0])


def test_an_import_that_fails_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that cannot be imported at first is seeded once it can be."""
    arrived: list[Any] = []
    generator: Any = type("Generator", (), {"name": "cseq_seeding_late"})()
    watch = seeding.Watch({"cseq_seeding_late": generator}, arrived.append)
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        __import__("cseq_seeding_late")
    file = tmp_path / "cseq_seeding_late.py"
    file.write_text("raise OSError('not yet')\n")
    with pytest.raises(OSError, match="not yet"):
        __import__("cseq_seeding_late")
    assert arrived == []
    file.write_text("import sys\nseen = __loader__, __spec__.loader\n")
    sys.path_importer_cache.clear()
    found = importlib.util.find_spec("cseq_seeding_late")  # a search is no import
    assert found is not None
    assert found.loader.get_filename("cseq_seeding_late") == str(file)  # type: ignore[union-attr]
    assert arrived == []
    module = __import__("cseq_seeding_late")
    assert arrived == [generator]
    assert module.seen[0] is module.seen[1] is module.__loader__
    assert type(module.__loader__).__module__ != "cseq.seeding"
    del sys.modules["cseq_seeding_late"]


def test_many_managers_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other finders are asked once for each of them; all are told of an import."""
    (tmp_path / "cseq_seeding_found.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked: list[str] = []

    class Asked:
        """Counts what it is asked."""

        def find_spec(self, name: str, *_: Any) -> None:
            asked.append(name)

    missing, found = "cseq_seeding_missing", "cseq_seeding_found"
    generators: dict[str, Any] = {missing: object(), found: object()}
    arrived: list[Any] = []
    watches = [seeding.Watch(dict(generators), arrived.append) for _ in range(6)]
    monkeypatch.setattr(sys, "meta_path", [*watches, Asked(), *sys.meta_path])
    assert importlib.util.find_spec(missing) is None
    assert len(asked) == 7
    importlib.import_module(found)
    assert arrived == [generators[found]] * 6
    del sys.modules[found]
