"""A worker of RETURNN's `MultiProcDataset`: its dataset, and how it got there.

::

    Plan ── pickle: the configuration first ──► Maker(number, N) ──► Producer
                                                  │  begin, items      ▲
                                                  ▼                    │ ask: describe, answer, …
                                                 pack(sequence) ── trainer: unpack
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import struct
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from returnn.config import SubProcCopyGlobalConfigPreInitFunc
from returnn.datasets.basic import Dataset, init_dataset
from returnn.datasets.cached2 import CachedDataset2

from cseq import context
from cseq._core import derive
from cseq.importable import promise
from cseq.seeding import seed_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Maker", "Plan", "Producer", "Request", "unpack"]

PURPOSE_AUGMENTATION = 3  # docs/shuffle.md: 1 is the shuffle; 2 is `cseq.rng`
SMALL = 16384  # bytes of a sequence, up to which it goes as one array
NUMBERS = "biufc"  # kinds of data of which nothing but the bytes has to travel
HEAD = struct.Struct("<IId")  # bytes of the layout and of the tag, completed part of the epoch
PADDING = [bytes(-n % 16) for n in range(16)]  # to a multiple of 16 bytes
MOST_PARTS = 1000  # of a list in which datasets are looked for
COMM = "/proc/self/comm"

# The classes and functions of RETURNN's configuration are in a module that no file holds; a worker
# has it as soon as it has the configuration, and that is the first thing it gets (`_Restored`).
promise("__returnn_config__")


class Request(NamedTuple):
    """What a worker is asked to do in an epoch."""

    serial: int  # which call of `init_seq_order` it was
    epoch: int | None
    seq_list: list[str] | None
    seq_order: Sequence[int] | None
    num_shards: int  # of the dataset as a whole, before it is spread over workers
    shard_index: int


# ── on the way to a worker ─────────────────────────────────────────────────────────────────


class Plan(NamedTuple):
    """What a worker has to know."""

    dataset: dict[str, Any]
    sharding_method: str
    name: str
    install: Callable[[], None] | None  # to be called first


class _Restored:
    """Pickles as the configuration, which is restored where it is unpickled."""

    def __reduce__(self) -> Any:
        return _restore, (pickle.dumps(SubProcCopyGlobalConfigPreInitFunc()),)


def _restore(pickled: bytes) -> None:
    """Make RETURNN's configuration the one of this process, as RETURNN does in its own workers."""
    pickle.loads(pickled)()


class Maker:
    """Makes a worker's producer; of its pickle, the configuration is read before the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> Any:
        return _make, (_Restored(), tuple(self._plan))

    def __call__(self, number: int, num_workers: int) -> Producer:
        if self._plan.install is not None:
            self._plan.install()
        _name_process(f"{self._plan.name} worker proc {number + 1}/{num_workers}", number)
        return Producer(self._plan, number, num_workers)


def _make(_: None, plan: tuple[Any, ...]) -> Maker:
    """Make the maker again."""
    return Maker(Plan(*plan))


def _name_process(name: str, number: int) -> None:
    """Name this process for Python and, where that is done by a file, for the system."""
    multiprocessing.current_process().name = name
    if os.path.exists(COMM):
        with open(COMM, "w", encoding="utf-8") as file:
            file.write(f"MPD worker {number}")


# ── in a worker ────────────────────────────────────────────────────────────────────────────


class Producer:
    """A worker: a dataset, and its place in it."""

    def __init__(self, plan: Plan, number: int, num_workers: int) -> None:
        self._plan = plan
        self._number = number
        self._num_workers = num_workers
        self._dedicated = plan.sharding_method == "dedicated"
        self._dataset: Any = None  # made when it is needed, and again after `finish`
        self._serial: int | None = None  # of the request that the dataset was prepared for
        self._keys: list[str] | None = None  # of its data, in this epoch
        self._desk = context.Desk(number, num_workers, 0)
        context.enter(self._desk)
        self._dice = _Dice(self._desk)
        self._shards = self._shards_of(plan.dataset["_num_shards"], plan.dataset["_shard_index"])

    def _shards_of(self, num_shards: int, shard_index: int) -> tuple[int, int]:
        """Return the number of shards, and which one this worker is."""
        if not self._dedicated:
            return num_shards, shard_index
        return num_shards * self._num_workers, shard_index * self._num_workers + self._number

    def _made(self) -> Any:
        """Return the dataset; make it first if need be."""
        if self._dataset is None:
            num_shards, shard_index = self._shards
            plan: dict[str, Any] = self._dice.wrapped(self._plan.dataset)
            plan |= {"_num_shards": num_shards, "_shard_index": shard_index}
            self._dataset = init_dataset(plan)
            self._dice.find(self._dataset)
        return self._dataset

    def _prepare(self, request: Request) -> Any:
        """Bring the dataset to the beginning of an epoch."""
        shards = self._shards_of(request.num_shards, request.shard_index)
        changed, self._shards = shards != self._shards, shards
        dataset = self._made()
        if changed:
            dataset.set_sharding(num_shards=shards[0], shard_index=shards[1])
        self._serial = self._keys = None
        self._dice.turn(dataset, request.epoch)
        dataset.init_seq_order(
            epoch=request.epoch, seq_list=request.seq_list, seq_order=request.seq_order
        )
        self._serial = request.serial
        return dataset

    # -- what the trainer asks ------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Answer what every dataset knows as soon as it is made."""
        dataset = self._made()
        return {
            "num_inputs": dataset.num_inputs,
            "num_outputs": dataset.num_outputs,
            "labels": dataset.labels,
            "supports_sharding": dataset.supports_sharding(),
        }

    def answer(self, question: str) -> Any:
        """Answer a question that not every dataset can answer."""
        dataset = self._made()
        try:
            if question == "data_dtypes":
                return {key: dataset.get_data_dtype(key) for key in dataset.get_data_keys()}
            if question.startswith(("have_", "supports_")):
                return getattr(dataset, question)()
            found = getattr(dataset, f"get_{question}")()
            return found if isinstance(found, (int, float)) else list(found)
        except NotImplementedError as error:
            return _bare(error)

    def order(self, request: Request) -> Any:
        """Answer in which order the sequences of an epoch come, all workers' together."""
        dataset = self._prepare(request)
        try:
            return dataset.get_current_seq_order()
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{dataset} does not say in which order its sequences come "
                "(get_current_seq_order); use sharding_method='dedicated'"
            ) from error

    def shard_order(self, request: Request) -> Any:
        """Answer in which order the sequences of this worker come."""
        prepared = self._dataset is not None and self._serial == request.serial
        dataset = self._dataset if prepared else self._prepare(request)
        try:
            return dataset.get_current_seq_order()
        except NotImplementedError as error:
            return _bare(error)

    def finish(self, free_resources: bool) -> None:  # noqa: FBT001 - `ask` passes by position
        """End an epoch."""
        self._serial = None
        if self._dataset is not None:
            self._dataset.finish_epoch(free_resources=free_resources)
        if free_resources:
            self._dataset = None
            self._dice = _Dice(self._desk)
            gc.collect()

    # -- an epoch -------------------------------------------------------------------------------

    def begin(self, request: Request) -> int | float | None:
        """Begin an epoch; the answer is how many sequences this worker has, if it knows."""
        return self._length(self._prepare(request))

    @staticmethod
    def _length(dataset: Any) -> int | float | None:
        """Return the number of sequences in the epoch, where it is known before the last one."""
        try:
            length: int | float = dataset.num_seqs
        except NotImplementedError:
            return None
        return length

    def items(self, start: int) -> Iterator[Any]:
        """Load one sequence after another.

        A dataset that knows its length can begin anywhere. One that is a stream goes through what
        is not wanted as well; so does a `PostprocessingDataset`, in any case.
        """
        length = self._length(self._dataset)
        number = 0 if length is None or self._dice.in_order else start
        while self._load(number, length):
            if number >= start:
                yield self._loaded(number)
            number += 1

    def _load(self, number: int, length: float | None) -> bool:
        """Load a sequence, if there is one of this number."""
        if self._serial is None:  # the epoch was finished
            return False
        if length is not None and number >= length:
            return False
        self._dice.roll(number, self._place(number, known=length is not None))
        if length is None and not self._reaches(number):
            return False
        self._dataset.load_seqs(number, number + 1)
        return True

    def _reaches(self, number: int) -> bool:
        """Whether a dataset that does not know its length has a sequence of this number."""
        dataset = self._dataset
        if number == 0 and isinstance(dataset, CachedDataset2):
            dataset.load_seqs(0, 1)  # the question would be refused: "Not a single seq was loaded?"
            return bool(dataset.added_data)
        return bool(dataset.is_less_than_num_seqs(number))

    def _place(self, number: int, *, known: bool) -> int:
        """Return what identifies a sequence among those of the epoch, whichever worker loads it.

        Its place in the epoch where that does not depend on the number of workers, else its number
        in the corpus, if there is one.
        """
        num_shards, shard_index = self._shards
        if not self._dedicated:
            return (self._number + number * self._num_workers) * num_shards + shard_index
        if known and self._dataset.have_corpus_seq_idx():
            return int(self._dataset.get_corpus_seq_idx(number))
        return number * num_shards + shard_index

    def _loaded(self, number: int) -> Any:
        """Return a loaded sequence: tag, completed part of the epoch, data; packed if small."""
        dataset = self._dataset
        fraction = dataset.get_complete_frac(number, allow_only_lr_suitable=True)
        if self._keys is None:  # not every dataset knows them before it has loaded something
            self._keys = list(dataset.get_data_keys())
        data = {key: dataset.get_data(number, key) for key in self._keys}
        return pack(dataset.get_tag(number), fraction, data)


class _Dice:
    """The generators that augmentation draws from, seeded anew for each sequence.

    RETURNN seeds them, if at all, once an epoch and alike in every worker.
    """

    def __init__(self, desk: context.Desk) -> None:
        self._desk = desk  # of `cseq.rng`
        self._epoch = 0
        self._key = 0  # of the epoch
        self._words: tuple[int, ...] = (0, 0, 0, 0)  # of the sequence
        self._found: list[Callable[[int], object]] = []  # set the seeds of the dataset's own
        self._handed: list[Any] = []  # generators that the user's functions were given this epoch
        self.in_order = False  # whether there are functions that want all sequences, in order

    def wrapped(self, plan: Any) -> Any:
        """Copy a dataset's plan so that the user's functions in it come by here."""
        if type(plan) is not dict:
            return plan
        copy = {key: self.wrapped(value) for key, value in plan.items()}
        kind = copy.get("class")
        if getattr(kind, "__name__", kind) == "PostprocessingDataset" and not copy.get(
            "num_workers"
        ):
            for key in ("map_seq", "map_seq_stream"):
                if copy.get(key) is not None:
                    copy[key] = _Rolled(copy[key], self)
                    self.in_order = True
        return copy

    def find(self, dataset: Any) -> None:
        """Find generators in a dataset and in those within it."""
        for inner in _datasets_in(dataset):
            audio = getattr(inner, "_audio_random", None)
            if isinstance(audio, np.random.RandomState):
                self._found.append(audio.seed)
            for name in ("targets", "orth_vocab", "bpe"):
                seed = getattr(vars(inner).get(name), "set_random_seed", None)
                if seed is not None:
                    self._found.append(seed)

    def turn(self, dataset: Any, epoch: int | None) -> None:
        """Turn to an epoch."""
        fixed = dataset.fixed_random_seed
        seed, epoch = (dataset.random_seed_offset, epoch or 0) if fixed is None else (fixed, 0)
        [self._key] = derive(seed % 2**64, epoch, PURPOSE_AUGMENTATION, 1)
        self._epoch = epoch
        self._handed = []
        self._desk.seed = self._key
        self._desk.rise()

    def roll(self, number: int, place: int) -> None:
        """Turn to a sequence: the worker's `number`-th."""
        self._desk.sit(_Place(self._epoch, number, place))
        self._words = derive(self._key, place, PURPOSE_AUGMENTATION, 4)
        seed_imported(self._words)
        for seed in self._found:
            seed(self._words[3] % 2**32)
        for generator in self._handed:
            generator.seed(self._words[3] % 2**32)

    def hand(self, generator: Any) -> None:
        """Take note of a generator that is handed to the user."""
        if not any(generator is known for known in self._handed):
            self._handed.append(generator)
            generator.seed(self._words[3] % 2**32)


class _Place(NamedTuple):
    """Which sequence is in hand, as `cseq.rng` and `cseq.worker_info` ask."""

    epoch: int
    batch: int
    start: int


class _Rolled:
    """A function of the user's whose generator is seeded for each sequence."""

    def __init__(self, function: Callable[..., Any], dice: _Dice) -> None:
        self._function = function
        self._dice = dice
        self.preserves_num_seqs = getattr(function, "preserves_num_seqs", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("rng"), np.random.RandomState):
            self._dice.hand(kwargs["rng"])
        return self._function(*args, **kwargs)


def _datasets_in(dataset: Any) -> Iterator[Any]:
    """Find a dataset and all that it holds, itself or in lists and dictionaries."""
    seen, left = set(), [dataset]
    while left:
        inner = left.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        for value in vars(inner).values():
            parts: Iterable[Any] = value.values() if isinstance(value, dict) else [value]
            if isinstance(value, (list, tuple)):
                parts = value
            left += (part for part in islice(parts, MOST_PARTS) if isinstance(part, Dataset))


# ── small sequences, as one array each ─────────────────────────────────────────────────────
#
#     head │ layout: keys, types, dimensions │ shapes │ tag │ data, data, …   each from 16 bytes on
#
# The layout is a pickle, made and read once for all sequences that have it.

Layout = tuple[struct.Struct, list[tuple[str, np.dtype[Any], int]]]

_packed_layouts: dict[tuple[Any, ...], tuple[bytes, struct.Struct]] = {}
_read_layouts: dict[bytes, Layout] = {}


def pack(tag: str, fraction: float | None, data: dict[str, Any]) -> Any:
    """Put a small sequence into one piece of bytes; leave a large or an unusual one as it is."""
    known: list[Any] = []
    shape: tuple[int, ...] = ()
    nbytes = 0
    for key, array in data.items():
        if type(array) is not np.ndarray or array.dtype.kind not in NUMBERS:
            return tag, fraction, data
        nbytes += array.nbytes
        known += key, array.dtype, array.ndim
        shape += array.shape
    if nbytes > SMALL:
        return tag, fraction, data
    layout, shapes = _packed_layouts.get(tuple(known)) or _pack_layout(tuple(known))
    name = tag.encode("utf-8", "surrogatepass")
    head = HEAD.pack(len(layout), len(name), np.nan if fraction is None else fraction)
    parts = [head, layout, shapes.pack(*shape), name]
    parts.append(PADDING[(HEAD.size + len(layout) + shapes.size + len(name)) % 16])
    for array in data.values():
        parts += array.tobytes(), PADDING[array.nbytes % 16]
    return bytearray().join(parts)


def _pack_layout(known: tuple[Any, ...]) -> tuple[bytes, struct.Struct]:
    """Describe keys, types and dimensions."""
    entries = [known[at : at + 3] for at in range(0, len(known), 3)]
    pickled = pickle.dumps(entries)
    layout = _packed_layouts[known] = pickled, _shapes(entries)
    return layout


def _shapes(entries: Sequence[tuple[str, np.dtype[Any], int]]) -> struct.Struct:
    """Say how the shapes of all data are written."""
    return struct.Struct(f"<{sum(ndim for _, _, ndim in entries)}q")


def unpack(item: Any) -> tuple[str, float | None, dict[str, Any]]:
    """Return what was given to `pack`; the arrays can be written to."""
    if type(item) is tuple:
        return item
    of_layout, of_name, fraction = HEAD.unpack_from(item)
    at = HEAD.size + of_layout
    layout = bytes(item[HEAD.size : at])
    shapes, entries = _read_layouts.get(layout) or _read_layout(layout)
    shape = shapes.unpack_from(item, at)
    at += shapes.size
    tag = item[at : at + of_name].decode("utf-8", "surrogatepass")
    at += of_name
    data, used = {}, 0
    for key, dtype, ndim in entries:
        at += -at % 16
        array = data[key] = np.ndarray(shape[used : used + ndim], dtype, item, at)
        at += array.nbytes
        used += ndim
    return tag, None if fraction != fraction else fraction, data


def _read_layout(layout: bytes) -> Layout:
    """Read what `_pack_layout` has written."""
    entries = pickle.loads(layout)
    read = _read_layouts[layout] = _shapes(entries), entries
    return read


def _bare(error: NotImplementedError) -> NotImplementedError:
    """Return an error to be raised elsewhere, without what it drags along."""
    return type(error)(*map(str, error.args))
