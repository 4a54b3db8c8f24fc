"""Seeds the global generators of Python, numpy and torch for each batch.

The seeds depend only on the seed, the epoch and the position of the batch, as with `cseq.rng`. See
`generator-states-v2` in docs/inside/shuffle.md.

Only generators of imported modules are seeded. A batch that imports such a module is made again.

Worker threads do not seed the generators, because they share them with the training loop.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cseq._core import derive
from cseq._work import has_imported
from cseq.indexing.context import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.indexing.context import BatchContext

__all__ = ["Seeds", "call_here"]

T = TypeVar("T")

# Values for the `purpose` argument of `derive`; see docs/inside/shuffle.md.
PURPOSE_BATCH = 4
PURPOSE_MAKING = 5


class Generator(NamedTuple):
    """The methods of a global generator, and the index of the random word that seeds it.

    `lend` is called after `keep`, and may replace the generator.
    """

    word: int
    seed: Callable[[int], object]
    keep: Callable[[], object]
    restore: Callable[[Any], object]
    lend: Callable[[], object] | None = None


def from_python(generator: Any) -> Generator:
    return Generator(0, generator.seed, generator.getstate, generator.setstate)


def from_numpy(random: Any) -> Generator:
    """Describe the generator of numpy.random, whose seeds have 32 bits.

    `lend` installs another bit generator, because restoring a state would be slow. `restore` sets
    the state only if it contains a cached Gaussian number.
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
    # torch.manual_seed also seeds all devices and takes 100 times as long.
    "torch": lambda torch: from_torch(torch.default_generator),
}


def _is_imported(name: str) -> bool:
    """Return True if a module has been imported completely."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class Seeds:
    """Seeds the generators of imported modules before each batch.

    Attributes
    ----------
    missing : dict
        Maps modules that have not been imported yet to functions that describe their generators.
    present : list
        The generators of imported modules.
    """

    def __init__(self, batch_context: BatchContext) -> None:
        self._context = batch_context
        self.missing = dict(FINDERS)
        self.present: list[Generator] = []
        self._epoch: tuple[int, int] | None = None
        self._key = 0
        self._is_lent = False
        self._kept: list[tuple[Callable[[Any], object], object]] = []

    def seed_present(self) -> None:
        """Seed the generators for the current batch or a new indexer."""
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
        """Seed the generators for a position in an epoch."""
        self._seed(key, start, PURPOSE_BATCH)

    def _seed(self, key: int, start: int, purpose: int) -> None:
        if self.missing:
            self.has_new()
        if self._is_lent:
            for generator in self.present[len(self._kept) :]:
                self._kept.append((generator.restore, generator.keep()))
                if generator.lend:
                    generator.lend()
        words = derive(key, start, purpose, 3)
        for word, seed, *_ in self.present:
            seed(words[word])

    def has_new(self) -> bool:
        """Find generators of newly imported modules. Return True if there are any."""
        if not has_imported(self.missing):
            return False
        new = [name for name in self.missing if _is_imported(name)]
        self.present += [self.missing[name](sys.modules[name]) for name in new]
        for name in new:
            del self.missing[name]
        return bool(new)

    def lend(self) -> None:
        """From now until `restore` is called, save generator states before seeding."""
        self._is_lent = True

    def restore(self) -> None:
        """Restore the trainer's generators. If this is interrupted, call it again."""
        self._is_lent = False
        while self._kept:
            restore, state = self._kept[-1]
            restore(state)
            self._kept.pop()


def call_here(
    function: Callable[[], T], batch_context: BatchContext, seeds: Seeds | None = None
) -> T:
    """Call a function in the trainer's thread, in the context of a worker.

    The trainer's generators are restored even if a signal handler interrupts `restore` once.
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
