"""Global generators: `random`, numpy.random and torch draw the same in any worker."""

# ruff: noqa: NPY002 - numpy's global generator is what this is about

import hashlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import reference
from interrupting import first_hits, interrupted
from kinds import INLINE, PROCESSES, QUICKEST, stream

import cseq
from cseq.indexing import context, seeding


class Drawing:
    """Draws from the modules already imported; the constructor draws `made`."""

    def __init__(self):
        self.made = random.random(), np.random.rand()

    def __getitem__(self, indices):
        # Each generator keeps the second of a pair of Gaussian numbers, so their number is odd.
        return (self.made, random.gauss(0, 1), np.random.randn(), np.random.randint(1 << 30),
                random.random())  # fmt: skip


def states():
    """Return the next draws of this process's generators."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), name, key.tobytes(), rest


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        pytest.param(kind, number, id=f"{kind.name}-{number}")
        for kind in PROCESSES
        # The number does not affect a start.
        for number in ([1, 2, 5] if kind is QUICKEST else [2])
    ],
)
def test_draws_whatever_the_workers(kind, num_workers):
    """Any number and kind of worker processes draw like test mode, in every epoch."""
    options = {"batch_size": 3, "epochs": 2}
    want = stream(INLINE, Drawing, 40, **options)
    assert stream(kind, Drawing, 40, num_workers=num_workers, **options) == want
    assert len({batch[1:] for batch in want}) == len(want) == 28


LAZY = """
import sys
import cseq
from cseq.processes.launcher import start_methods
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
"""


def test_modules_imported_by_a_batch(run_script):
    """In any process, a batch that imports numpy.random or torch draws as if it had them before."""
    pytest.importorskip("torch")
    done = run_script(LAZY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_test_mode_restores_after_an_exception():
    """It holds even after a batch, or a constructor, that raises."""

    class Raises:
        def __getitem__(self, indices):
            random.random()
            raise ValueError("x")

    class Unmade:
        def __init__(self):
            np.random.rand()
            raise LookupError("y")

        def __getitem__(self, indices):
            raise AssertionError

    for worker, error in ((Raises, ValueError), (Unmade, LookupError)):
        before = states()
        with INLINE.start(worker, 4) as m, pytest.raises(error):
            next(iter(m))
        assert states() == before


def test_test_mode_restores_after_a_signal_handler():
    """Generators are as without batches, even if a handler raises anywhere in seeding them."""
    np.random.seed(5)
    np.random.randn()
    random.seed(5)
    random.gauss(0, 1)
    before, bit_generator = states(), np.random.get_bit_generator()
    with INLINE.start(Drawing, 10**6, batch_size=4) as m:
        batches = iter(m)

        def step(countdown):
            # The batch may have been made when the handler raised.
            next(batches)
            with interrupted(countdown, "indexing/seeding.py") as struck:
                next(batches)
            assert states() == before
            assert np.random.get_bit_generator() is bit_generator
            return struck.is_set()

        assert first_hits(step) > 25
    assert states() == before


@pytest.mark.needs("fork")
def test_switched_off():
    """With seed_globals=False, test mode draws from the trainer's, a forked worker from copies."""
    m = cseq.MPSequence(
        Drawing, 6, num_workers=1, batch_size=3, out_type="null", seed=1, start_method="fork",
        seed_globals=False,
    )  # fmt: skip
    random.seed(7)
    np.random.seed(7)
    made, _, normal, integer, _ = want = Drawing()[None]
    np.random.seed(7)
    # Python seeds `random` again in a child.
    with m.start() as batches:
        got = next(iter(batches))
    assert (got[0][1], *got[2:4]) == (made[1], normal, integer)
    random.seed(7)
    with m.start_test() as batches:
        assert next(iter(batches)) == want


def test_threads_are_not_seeded():
    """Threads share the generators with the training loop, so they are not seeded."""
    random.seed(7)
    np.random.seed(7)
    before = states()
    with cseq.MTSequence(np.arange(10), 10, out_type="null").start() as batches:
        list(batches)
    assert states() == before


GOLDEN = Path(__file__).parents[1] / "golden" / "generator_states.json"
FILE = json.loads(GOLDEN.read_text(encoding="ascii"))


# The purposes of words: docs/inside/shuffle.md.
BATCH, MAKING = 4, 5


def sha256(words):
    """Return the hash of a twister's 624 words."""
    return hashlib.sha256(struct.pack("<624I", *words)).hexdigest()


@pytest.mark.parametrize(
    "record", FILE["states"], ids=lambda one: f"{one['seed']}-{one['epoch']}-{one['start']}"
)
def test_golden_states(record):
    """The states of a batch, and of the making of an indexer, never change."""
    torch = pytest.importorskip("torch")
    seed, epoch, start = record["seed"], record["epoch"], record["start"]
    batch_context = context.BatchContext(0, 1, seed)
    if start is not None:
        batch_context.set_ticket(context.Numbers(seed, epoch, 3, start))
    seeds = seeding.Seeds(batch_context)
    # The second of a pair of Gaussian numbers is dropped, as their number is odd.
    np.random.randn()
    random.gauss(0, 1)
    before, torchs = states(), torch.get_rng_state()
    seeds.lend()
    seeds.seed_present()
    try:
        _, (*words, position), gauss = random.getstate()
        kind, key, *rest = np.random.get_state()
        drawn = torch.get_rng_state()
    finally:
        seeds.restore()
    assert states() == before
    assert torch.get_rng_state().equal(torchs)
    assert (position, gauss, kind, rest) == (624, None, "MT19937", [624, 0, 0.0])
    assert {"random": sha256(words), "numpy.random": sha256(key)} == record["sha256"]
    assert drawn.equal(torch.Generator().manual_seed(record["torch"]).get_state())


@pytest.mark.parametrize("record", FILE["states"][::4])
def test_the_page_defines_the_golden_states(record):
    """Public calls with three words from seed, epoch and place give these states."""
    seed, start = record["seed"], record["start"]
    place = (seed, 0, MAKING)
    if start is not None:
        [key] = reference.derive(seed, record["epoch"], BATCH, 1)
        place = (key, start, BATCH)
    own, numpys, torchs = reference.derive(*place, 3)
    _, key, *_ = np.random.RandomState(numpys >> 32).get_state(legacy=True)
    words = random.Random(own).getstate()[1][:624]
    assert {"random": sha256(words), "numpy.random": sha256(key)} == record["sha256"]
    assert torchs == record["torch"]


def test_a_bit_generator_of_the_users():
    """`numpy.random` keeps a bit generator that the user has set; it gets the same word."""
    np.random.seed(4)
    before, kept = np.random.get_bit_generator(), states()
    seeds = seeding.Seeds(context.BatchContext(0, 1))
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        left = repr(np.random.get_state(legacy=False))
        seeds.lend()
        seeds.seed(3, 5)
        got = np.random.rand(3).tolist()
        np.random.seed(reference.derive(3, 5, BATCH, 2)[1] >> 32)
        assert np.random.rand(3).tolist() == got
        seeds.restore()
        assert repr(np.random.get_state(legacy=False)) == left
    finally:
        np.random.set_bit_generator(before)
    assert states() == kept


AGAIN = """
import sys
import cseq
from cseq.processes.launcher import start_methods
class Counting:
    '''Imports a module in a batch, or when it is made, and draws from it, or does not.'''
    def __init__(self, when, draws, fails):
        self.when, self.draws, self.fails = when, draws, fails
        self.calls = self.closed = 0
        self.made = self.drawn() if when == "made" else 0.0
    def drawn(self):
        import numpy.random
        return numpy.random.rand() if self.draws else 0.0
    def __getitem__(self, indices):
        self.calls += 1
        first = float(cseq.rng().random())
        drawn = 0.0 if self.when == "made" else self.drawn()
        if self.fails and self.calls == 1:
            raise ValueError("the first call")
        return self.calls, first, drawn, self.made
class Importing:
    def __reduce__(self):
        import numpy.random
        return int, (0,)
class Sending:
    '''The first batch imports a module while it is sent; the others draw from it.'''
    def __init__(self):
        self.calls = 0
    def __getitem__(self, indices):
        self.calls += 1
        if self.calls == 1:
            return self.calls, Importing()
        return self.calls, sys.modules["numpy.random"].rand()
def run(method, *how):
    from functools import partial
    worker = partial(Counting, *how) if how else Sending
    m = cseq.MPSequence(worker, 8, num_workers=1, batch_size=2, out_type="null", seed=3,
                        start_method=method)
    with m.start() if method else m.start_test() as batches:
        return [batch for batch in batches]
assert "numpy.random" not in sys.modules
method = start_methods()[0]
got = {}
drew = ("batch", True, False)
for how in [drew, ("batch", False, False), ("batch", True, True), ("made", True, False)]:
    got[how] = run(method, *how)
    print(*how, [batch[0] for batch in got[how]])
sent = run(method)
assert "numpy.random" not in sys.modules
print([batch[0] for batch in run(None, *drew)])
assert "numpy.random" in sys.modules
plain = run(None, *drew)
print([batch[0] for batch in plain])
failed = got["batch", True, True]
print([b[1:3] for b in got[drew]] == [b[1:3] for b in failed] == [b[1:3] for b in plain])
print(run(None, "made", True, False) == got["made", True, False])
print([batch[0] for batch in sent], [b[1] for b in sent][1:] == [b[1] for b in run(None)][1:])
"""


def test_a_batch_is_made_once_more_if_it_imports_what_it_may_draw_from(run_script):
    """It is repeated once, even after a failure, with a new `cseq.rng`; so is a constructor."""
    done = run_script(AGAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "batch True False [2, 3, 4, 5]",
        "batch False False [2, 3, 4, 5]",
        "batch True True [2, 3, 4, 5]",
        "made True False [1, 2, 3, 4]",
        "[2, 3, 4, 5]",
        "[1, 2, 3, 4]",
        "True",
        "True",
        "[1, 2, 3, 4] True",
    ]
