"""Global generators, set for each batch: Python's, numpy's and torch's.

Their states are a function of the key of `cseq.rng` (seed, epoch, position of the batch):
`generator-states-v1` of docs/inside/shuffle.md. So what an indexer draws from them depends neither
on the process that makes the batch nor on the batches before. They are written into the generators'
memory (`_work`). The address of numpy's is public. For Python's, and for the Gaussian number that
numpy keeps, this module looks for the place, once, in an object of its own whose state it knows:
by all its bytes. Where that fails (another interpreter, no GIL), the generators' methods set the
same states.

Only generators whose modules are imported are set. `sys.modules` is looked at after each batch, and
before it in the trainer, whose loop imports modules meanwhile. Where a batch has imported such a
module, or a thread beside it, and it was drawn from, the indexer is asked for the batch once more:
so the first batch that draws does so as any later one would.

Threads of the trainer share these generators with the training loop; nothing is set there.
"""

from __future__ import annotations

import functools
import struct
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from cseq import _work
from cseq._memory import HAS_GIL
from cseq.indexing.context import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.indexing.context import BatchContext

__all__ = ["Seeds", "call_here"]

T = TypeVar("T")

STATE = struct.Struct("=i624I")  # a position, and the words of a Mersenne Twister
GAUSS = struct.Struct("@id")  # whether a number is kept, and that number


# -- where the generators are


def find_python() -> _work.PythonGenerator:
    """Find the generator of `random`."""
    instance = sys.modules["random"].random.__self__
    place = _place_in_python() if type(instance) is sys.modules["random"].Random else None
    if place is None:
        return _work.PythonGenerator(instance)
    return _work.PythonGenerator(instance, id(instance) + place + 4, id(instance) + place)


def find_numpy() -> Any:
    """Find the generator of numpy.random."""
    random = sys.modules["numpy.random"]
    bit_generator = random.get_bit_generator()
    found = random, random.get_bit_generator, bit_generator
    if type(bit_generator) is not random.MT19937:  # its `seed` is to be called, as for any change
        return _work.NumpyGenerator(random, random.get_bit_generator, random.MT19937(0))
    place = _place_in_numpy()
    if place is None:
        return _work.NumpyGenerator(*found)
    key, gauss = bit_generator.ctypes.state_address, id(random.mtrand._rand) + place
    return _work.NumpyGenerator(*found, key, key + 624 * 4, gauss, gauss + GAUSS.size - 8)


def find_torch() -> _work.TorchGenerator:
    """Find the generator of torch for the CPU."""
    # Not torch.manual_seed, which also seeds every device: 100 times as long.
    return _work.TorchGenerator(sys.modules["torch"].default_generator)


FINDERS: dict[str, Callable[[], Any]] = {
    "random": find_python,
    "numpy.random": find_numpy,
    "torch": find_torch,
}


def _memory_of(instance: object) -> bytes:
    """Return the memory of an object; nothing where it cannot be read, or must not be written."""
    if sys.implementation.name != "cpython" or not HAS_GIL:
        return b""
    try:
        import ctypes
    except ImportError:  # an interpreter that was built without it
        return b""
    memory: bytes = ctypes.string_at(id(instance), type(instance).__basicsize__)
    return memory


@functools.cache
def _place_in_python() -> int | None:
    """Return at which byte of a `random.Random` its position lies, and then its words, or None."""
    probe = sys.modules["random"].Random(1)
    version, state, _ = probe.getstate()
    probe.setstate((version, (*state[:-1], 123), None))
    place = _memory_of(probe).find(STATE.pack(123, *state[:-1]))
    return None if place < 0 else place


@functools.cache
def _place_in_numpy() -> int | None:
    """Return at which byte of a RandomState its `GAUSS` lies; None: not there, or not usable."""
    random = sys.modules["numpy.random"]
    bit_generator = random.MT19937(1)
    probe = random.RandomState(bit_generator)
    _, key, *_ = probe.get_state()
    probe.set_state(("MT19937", key, 5, 1, 0.123456789))
    place = _memory_of(probe).find(GAUSS.pack(1, 0.123456789))
    if place < 0:
        return None
    import ctypes

    state = ctypes.string_at(bit_generator.ctypes.state_address, 2500)
    return place if state == key.tobytes() + struct.pack("=i", 5) else None


# -- seeding them


def _is_imported(name: str) -> bool:
    """Whether a module's import is finished."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class Seeds(_work.BatchSeeds):
    """Seeds the process's generators before each batch, if their modules are imported.

    Parameters
    ----------
    batch_context : BatchContext
        Has the present batch; without a batch, the indexer is being made.
    """

    def __init__(self, *_: object) -> None:
        self.missing.update(FINDERS)

    def have(self, generators: tuple[Any, Any]) -> None:
        """Seed a thread's own instead: a `random.Random`, and a generator of torch."""
        own, torchs = generators
        self.missing.clear()
        self.present.extend([_work.PythonGenerator(own), _work.TorchGenerator(torchs)])

    def look(self) -> list[Any]:
        """Find the modules whose import is over; return their generators."""
        found = [name for name in self.missing if _is_imported(name)]
        arrived = [self.missing.pop(name)() for name in found]
        self.present.extend(arrived)
        return arrived

    def has_drawn(self) -> bool:
        """Find new generators; whether one of them was drawn from since its module was imported."""
        return not all(generator.is_fresh() for generator in self.look())


def call_here(
    function: Callable[[], T], batch_context: BatchContext, seeds: Seeds | None = None
) -> T:
    """Call what makes a batch, or an indexer, on the trainer's own thread.

    It has the context of a worker meanwhile, and may set the trainer's generators by `seeds`: their
    states are restored, also if a signal handler raises.
    """
    left = here.batch_context
    try:
        here.batch_context = batch_context
        if seeds is not None:
            seeds.lend()
        return function()
    finally:
        here.batch_context = left
        if seeds is not None:
            try:
                seeds.restore()
            except BaseException:  # a signal handler has raised, perhaps before anything was done
                seeds.restore()
                raise
