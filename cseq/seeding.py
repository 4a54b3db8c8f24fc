"""Global generators, seeded for each batch: Python's, numpy's and torch's.

They are seeded from the key of `cseq.rng` (seed, epoch, position of the batch), so what an indexer
draws from them depends neither on the process that makes the batch nor on the batches before.
Only generators whose modules are imported are seeded. A module that is imported while a batch is
made is seeded at the end of its import (`Watch`), so that the first batch of a worker draws the
same as any later one would.

Threads of the trainer share these generators with the training loop; nothing is seeded there.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq._core import derive
from cseq.context import PURPOSE_BATCH, PURPOSE_MAKING
from cseq.threads import is_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from cseq.context import BatchContext

__all__ = ["Imported", "Seeds"]


class Generator(NamedTuple):
    """One of the generators: the names of its methods, and how it is seeded.

    Attributes
    ----------
    name : str
        The module that has it, or whose functions are its methods.
    word : int
        Which of the batch's words is its seed.
    """

    name: str
    word: int
    methods: tuple[str, str, str]  # that seed the generator, return its state, and set its state
    attribute: str = ""  # of the module; empty: the module itself
    bits: int = 64  # of the word that the seed can have

    def seed(self, words: Sequence[int]) -> None:
        """Seed the generator with its word of these."""
        self._method(0)(words[self.word] % (1 << self.bits))

    def save(self) -> Any:
        """Return its state."""
        return self._method(1)()

    def restore(self, state: Any) -> None:
        """Set its state."""
        self._method(2)(state)

    def _method(self, number: int) -> Any:
        module = sys.modules[self.name]
        home = getattr(module, self.attribute) if self.attribute else module
        return getattr(home, self.methods[number])


GENERATORS = (
    Generator("random", 0, ("seed", "getstate", "setstate")),
    Generator("numpy.random", 1, ("seed", "get_state", "set_state"), bits=32),
    # Not torch.manual_seed, which also seeds every device: 100 times as long.
    Generator("torch", 2, ("manual_seed", "get_state", "set_state"), attribute="default_generator"),
)


class Imported:
    """The generators whose modules are imported; looks for new ones each time it seeds."""

    def __init__(self) -> None:
        self._loaded: list[Generator] = []
        self._missing: tuple[Generator, ...] = GENERATORS

    def seed(self, words: Sequence[int]) -> None:
        """Seed them with three words of 64 bits."""
        for generator in self._missing:
            if generator.name in sys.modules:
                self._look()
                break
        for generator in self._loaded:
            generator.seed(words)

    def _look(self) -> None:
        """Find the modules whose import is over."""
        self._loaded = [each for each in GENERATORS if is_imported(each.name)]
        self._missing = tuple(each for each in GENERATORS if each not in self._loaded)


class Seeds:
    """Seeds the process's generators for one batch after another.

    Parameters
    ----------
    batch_context : BatchContext
        Has the seed and the present batch; without a batch, the indexer is being made.
    is_making : callable, optional
        In test mode: whether the indexer works now. Otherwise the generators are the training
        loop's, and `begin` saves them. None: this process is a worker.

    Attributes
    ----------
    loaded : list of Generator
        Those whose modules are imported; always the same list object.
    saved : list of tuple
        What `restore` restores: generators, and their states.
    """

    def __init__(
        self, batch_context: BatchContext, is_making: Callable[[], bool] | None = None
    ) -> None:
        self._batch_context = batch_context
        self._is_making = is_making
        self._epoch = -1
        self._key = 0  # of the epoch
        self._building = False
        self.saved: list[tuple[Generator, Any]] = []
        self._watch: Watch | None = None
        self.loaded: list[Generator] = []

    def open(self) -> None:
        """Find the imported generators, seed them if this is a worker, and watch for the others."""
        self.loaded[:] = [each for each in GENERATORS if is_imported(each.name)]
        missing = {each.name: each for each in GENERATORS if each not in self.loaded}
        if missing and self._watch is None:
            self._watch = Watch(missing, self._arrived)
            sys.meta_path.insert(0, self._watch)
        if self._is_making is None:
            self.seed()

    def close(self) -> None:
        """Stop watching."""
        watch, self._watch = self._watch, None
        if watch in sys.meta_path:
            sys.meta_path.remove(watch)

    def seed(self) -> None:
        """Seed the imported generators for the present batch."""
        words = self._words()
        for generator in self.loaded:
            generator.seed(words)

    def begin(self) -> None:
        """Save the states of the trainer's generators, and seed them."""
        self._building = self._batch_context.ticket is None
        self.saved = [(generator, generator.save()) for generator in self.loaded]
        self.seed()

    def restore(self) -> None:
        """Restore the states of the trainer's generators."""
        self._building = False
        try:
            self._restore()
        except BaseException:  # a signal handler has raised in the middle
            self._restore()
            raise
        self.saved = []

    def _restore(self) -> None:
        for generator, state in self.saved:
            generator.restore(state)

    def _words(self) -> tuple[int, ...]:
        """Return the words of the present batch, or those of an indexer that is being made."""
        ticket = self._batch_context.ticket
        if ticket is None:
            return derive(self._batch_context.seed, 0, PURPOSE_MAKING, len(GENERATORS))
        if ticket.epoch != self._epoch:
            [self._key] = derive(self._batch_context.seed, ticket.epoch, PURPOSE_BATCH, 1)
            self._epoch = ticket.epoch
        return derive(self._key, ticket.start, PURPOSE_BATCH, len(GENERATORS))

    def _arrived(self, generator: Generator) -> None:
        """Add a generator whose module was just imported, and seed it if a batch is being made."""
        if self._is_making is None:
            generator.seed(self._words())
        elif self._building or self._is_making():
            self.saved.append((generator, generator.save()))
            generator.seed(self._words())
        self.loaded.append(generator)  # from now on `seed` includes it


class Watch:
    """A finder that reports the import of some modules, and leaves the import itself alone.

    Parameters
    ----------
    wanted : dict of str to Generator
        By the name of the module.
    arrived : callable
        Called with the generator at the end of its module's import.
    """

    def __init__(self, wanted: dict[str, Generator], arrived: Callable[[Generator], None]) -> None:
        self._wanted = wanted
        self._arrived = arrived
        self._asking: set[tuple[int, str]] = set()  # threads, and the module that each looks for

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module by the other finders; its loader reports the end of the import.

        A search need not be followed by an import (``importlib.util.find_spec``), so the name is
        wanted until its module was executed.
        """
        asker = threading.get_ident(), name
        if name not in self._wanted or asker in self._asking:  # another finder may ask this one
            return None
        self._asking.add(asker)
        try:
            spec = self._spec(name, path, target)
        finally:
            self._asking.remove(asker)
        if spec is not None and spec.loader is not None:
            spec.loader = ReportingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the finders that are no `Watch`: each of these would ask all others, in turn."""
        for finder in sys.meta_path:
            if not isinstance(finder, Watch) and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def executed(self, name: str) -> None:
        """Report that a module was imported, the first time."""
        generator = self._wanted.pop(name, None)
        if generator is not None:
            self._arrived(generator)


class ReportingLoader:
    """The loader of one module; it reports the end of the import to each `Watch`."""

    def __init__(self, loader: Any, watch: Watch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy whose attributes are not set yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which sees its own loader."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for watch in [self._watch, *sys.meta_path]:  # the first one that was asked has found it
            if isinstance(watch, Watch):
                watch.executed(module.__name__)
