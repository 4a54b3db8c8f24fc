"""Seeds the global generators of Python, numpy and torch for each batch.

As in `cseq.rng`, the seeds depend only on the seed, the epoch and the batch's position; see
`generator-states-v2` in docs/inside/shuffle.md. Therefore, an indexer's draws from these generators
depend neither on the process that makes the batch nor on earlier batches.

A generator is seeded only if its module has been imported. `sys.modules` is checked before and
after each batch. A batch that imported such a module is made again with the generator seeded, so
the batch is made like later ones.

Nothing is seeded in the trainer's threads, which share these generators with the training loop.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cseq._core import derive
from cseq.indexing.context import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.indexing.context import BatchContext

__all__ = ["Seeds", "call_here"]

T = TypeVar("T")

# Purpose numbers for deriving words from a seed; see docs/inside/shuffle.md.
PURPOSE_BATCH = 4
PURPOSE_MAKING = 5


class Generator(NamedTuple):
    """A generator's methods, and the index of its seed among the words derived for a batch.

    `lend`, which is called after `keep`, may replace the generator.
    """

    word: int
    seed: Callable[[int], object]
    keep: Callable[[], object]
    restore: Callable[[Any], object]
    lend: Callable[[], object] | None = None


def from_python(generator: Any) -> Generator:
    return Generator(0, generator.seed, generator.getstate, generator.setstate)


def from_numpy(random: Any) -> Generator:
    """Describe numpy.random's generator, whose seeds have 32 bits.

    `lend` installs another bit generator of the same class, because setting the trainer's state
    would cost as much as reading it. `restore` sets the state only if it holds the second of two
    Gaussian draws, which is stored outside the bit generator.
    """
    own: list[Any] = []

    def lend() -> None:
        kind = type(random.get_bit_generator())
        if not own or type(own[0]) is not kind:
            own[:] = [kind()]
        random.set_bit_generator(own[0])

    def restore(kept: tuple[Any, dict[str, Any]]) -> None:
        bit_generator, state = kept
        random.set_bit_generator(bit_generator)
        if state["has_gauss"]:
            random.set_state(state)

    return Generator(
        1,
        lambda word: random.seed(word >> 32),
        lambda: (random.get_bit_generator(), random.get_state(legacy=False)),
        restore,
        lend,
    )


def from_torch(generator: Any) -> Generator:
    return Generator(2, generator.manual_seed, generator.get_state, generator.set_state)


FINDERS: dict[str, Callable[[Any], Generator]] = {
    "random": from_python,
    "numpy.random": from_numpy,
    # torch.manual_seed also seeds every device, which takes 100 times as long.
    "torch": lambda torch: from_torch(torch.default_generator),
}


def _is_imported(name: str) -> bool:
    """Return True if a module's import has finished."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class Seeds:
    """Seeds the process's generators before each batch if their modules are imported.

    The context holds the current batch. If there is none, the indexer is being created.
    """

    def __init__(self, batch_context: BatchContext) -> None:
        self._context = batch_context
        self._missing = dict(FINDERS)
        self._present: list[Generator] = []
        self._epoch: tuple[int, int] | None = None
        self._key = 0
        self._is_lent = False
        self._kept: list[tuple[Callable[[Any], object], object]] = []

    def seed_present(self) -> None:
        """Seed the generators for the current batch or for an indexer that is being created."""
        ticket = self._context.ticket
        if ticket is None:
            self._seed(self._context.seed, 0, PURPOSE_MAKING)
            return
        epoch = ticket.seed, ticket.epoch
        if epoch != self._epoch:
            [self._key] = derive(*epoch, PURPOSE_BATCH, 1)
            self._epoch = epoch
        self._seed(self._key, ticket.start, PURPOSE_BATCH)

    def seed(self, key: int, start: int) -> None:
        """Seed the generators for the batch or sequence at this position in an epoch."""
        self._seed(key, start, PURPOSE_BATCH)

    def _seed(self, key: int, start: int, purpose: int) -> None:
        if self._missing:
            self.has_new()
        if self._is_lent:
            for generator in self._present[len(self._kept) :]:
                self._kept.append((generator.restore, generator.keep()))
                if generator.lend:
                    generator.lend()
        words = derive(key, start, purpose, 3)
        for word, seed, *_ in self._present:
            seed(words[word])

    def has_new(self) -> bool:
        """Find generators whose modules are newly imported. Return True if there are any."""
        if sys.modules.keys().isdisjoint(self._missing):
            return False
        new = [name for name in self._missing if _is_imported(name)]
        self._present += [self._missing[name](sys.modules[name]) for name in new]
        for name in new:
            del self._missing[name]
        return bool(new)

    def lend(self) -> None:
        """From now on, save the state of each trainer generator before seeding it."""
        self._is_lent = True

    def restore(self) -> None:
        """Restore the trainer's generators. Call this again after an interruption."""
        self._is_lent = False
        while self._kept:
            restore, state = self._kept[-1]
            restore(state)
            self._kept.pop()


def call_here(
    function: Callable[[], T], batch_context: BatchContext, seeds: Seeds | None = None
) -> T:
    """Call a function that makes a batch or creates an indexer on the trainer's own thread.

    During the call, the thread has a worker's context, and `seeds` may seed the trainer's
    generators. The generators are restored even if a signal handler raises early in `restore`.
    """
    outer = here.batch_context
    try:
        here.batch_context = batch_context
        if seeds is not None:
            seeds.lend()
        return function()
    finally:
        here.batch_context = outer
        if seeds is not None:
            try:
                seeds.restore()
            except BaseException:
                seeds.restore()
                raise
