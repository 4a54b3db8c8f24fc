"""The worker side of RETURNN's `MultiProcDataset`.

::

    pickle: the configuration first ──► SequenceProducer(…, number, N)
                                          │  begin, items  ▲
                                          ▼                │ ask: answer, order, finish
                                         tag, fraction, data ── trainer
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from returnn.config import SubProcCopyGlobalConfigPreInitFunc
from returnn.datasets.basic import init_dataset
from returnn.datasets.cached2 import CachedDataset2

from cseq.adapters.returnn.seeds import SequenceSeeds
from cseq.indexing import context
from cseq.processes.launcher.child import set_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cseq.adapters.returnn.seeds import Dataset

    Loaded = tuple[str, float | None, dict[str, NDArray[Any]]]

__all__ = ["CONFIGURATION", "OrderRequest", "SequenceProducer"]


class OrderRequest(NamedTuple):
    """The arguments and serial number of an `init_seq_order` call.

    The dataset is first divided into shards, and each shard is then divided among the workers.
    """

    serial: int
    epoch: int | None
    seq_list: list[str] | None
    seq_order: Sequence[int] | None
    num_shards: int
    shard_index: int


class _Configuration:
    """A pickle of RETURNN's global configuration.

    Its module ``__returnn_config__`` has no file, so a worker can import it only after unpickling
    the configuration.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (pickle.dumps(SubProcCopyGlobalConfigPreInitFunc()),)


def _restore(pickled: bytes) -> None:
    """Restore RETURNN's configuration in this process."""
    pickle.loads(pickled)()


CONFIGURATION = _Configuration()


class SequenceProducer:
    """Produces sequences in a worker; see `cseq.stream.Producer`."""

    def __init__(
        self,
        # `CONFIGURATION` must be unpickled before the arguments that need it.
        _: object,
        plan: dict[str, Any],
        sharding_method: str,
        name: str,
        install: Callable[[], None] | None,
        number: int,
        num_workers: int,
    ) -> None:
        if install is not None:
            install()
        multiprocessing.current_process().name = f"{name} worker proc {number + 1}/{num_workers}"
        set_name(f"MPD worker {number}")
        self._plan = plan
        self._dedicated = sharding_method == "dedicated"
        self._number = number
        self._num_workers = num_workers
        # The dataset is created on first use, and again after `finish` has dropped it.
        self._dataset: Any = None
        # The prepared request's serial number, if any, and this epoch's data keys, once known.
        self._serial: int | None = None
        self._keys: list[str] | None = None
        batch_context = context.BatchContext(number, num_workers)
        context.enter(batch_context)
        self._seeds = SequenceSeeds(batch_context)
        self._shards = self._shards_of(plan["_num_shards"], plan["_shard_index"])

    def _shards_of(self, num_shards: int, shard_index: int) -> tuple[int, int]:
        """Return the number of shards and the index of this worker's shard."""
        if not self._dedicated:
            return num_shards, shard_index
        return num_shards * self._num_workers, shard_index * self._num_workers + self._number

    def _made(self) -> Dataset:
        if self._dataset is None:
            num_shards, shard_index = self._shards
            shards = {"_num_shards": num_shards, "_shard_index": shard_index}
            self._dataset = init_dataset({**self._plan, **shards})
            self._seeds.hook()
        dataset: Dataset = self._dataset
        return dataset

    def _prepare(self, request: OrderRequest) -> Dataset:
        shards = self._shards_of(request.num_shards, request.shard_index)
        changed, self._shards = shards != self._shards, shards
        dataset = self._made()
        if changed:
            dataset.set_sharding(num_shards=shards[0], shard_index=shards[1])
        self._serial = self._keys = None
        self._seeds.begin_epoch(dataset, request.epoch)
        dataset.init_seq_order(
            epoch=request.epoch, seq_list=request.seq_list, seq_order=request.seq_order
        )
        self._serial = request.serial
        return dataset

    # -- requests from the trainer --------------------------------------------------------------

    def answer(self, question: str) -> object:
        """Return a property of the dataset, or the NotImplementedError that it raised."""
        dataset = self._made()
        try:
            if question == "data_dtypes":
                return {key: dataset.get_data_dtype(key) for key in dataset.get_data_keys()}
            answer = getattr(dataset, question)
            answer = answer() if callable(answer) else answer
        except NotImplementedError as error:
            return _bare(error)
        return answer if answer is None or isinstance(answer, (int, float, dict)) else list(answer)

    def order(self, request: OrderRequest) -> Sequence[int] | NotImplementedError:
        """Return the epoch's order. With 'dedicated', it covers only this worker's shard."""
        prepared = self._dataset is not None and self._serial == request.serial
        dataset = self._made() if self._dedicated and prepared else self._prepare(request)
        try:
            return dataset.get_current_seq_order()
        except NotImplementedError as error:
            if self._dedicated:
                return _bare(error)
            raise NotImplementedError(
                f"{dataset} does not implement get_current_seq_order, so the order of its "
                "sequences is unknown; use sharding_method='dedicated'"
            ) from error

    def finish(self, free_resources: bool) -> None:  # noqa: FBT001 - `ask` passes by position
        """Finish an epoch. With `free_resources`, drop the dataset."""
        self._serial = None
        if self._dataset is not None:
            self._dataset.finish_epoch(free_resources=free_resources)
        if free_resources:
            self._dataset = None
            gc.collect()

    # -- an epoch -------------------------------------------------------------------------------

    def begin(self, request: OrderRequest) -> int | float | None:
        """Start an epoch. Return the number of sequences in this worker, or None if unknown."""
        return self._length(self._prepare(request))

    @staticmethod
    def _length(dataset: Dataset) -> int | float | None:
        """Return the number of sequences in the epoch, or None if unknown."""
        try:
            return dataset.num_seqs
        except NotImplementedError:
            return None

    def items(self, start: int) -> Iterator[Loaded]:
        """Yield this worker's sequences, starting with number `start`.

        A dataset of unknown length or a `PostprocessingDataset` must also load earlier sequences.
        """
        length = self._length(self._dataset)
        number = 0 if length is None or self._seeds.passed else start
        while self._load(number, length):
            if number >= start:
                yield self._loaded(number)
            number += 1

    def _load(self, number: int, length: float | None) -> bool:
        was_finished = self._serial is None
        if was_finished or (length is not None and number >= length):
            return False
        self._seeds.seed(number, self._position(number, known=length is not None))
        if length is None and not self._reaches(number):
            return False
        self._dataset.load_seqs(number, number + 1)
        return True

    def _reaches(self, number: int) -> bool:
        """Return True if a sequence exists in a dataset of unknown length."""
        dataset: Dataset = self._dataset
        if number == 0 and isinstance(self._dataset, CachedDataset2):
            # `is_less_than_num_seqs` would fail with "Not a single seq was loaded?".
            dataset.load_seqs(0, 1)
            return bool(dataset.added_data)
        return bool(dataset.is_less_than_num_seqs(number))

    def _position(self, number: int, *, known: bool) -> int:
        """Return a number that identifies a sequence in the epoch, regardless of the worker.

        With 'dedicated', positions depend on the number of workers, so prefer the corpus index.
        """
        num_shards, shard_index = self._shards
        if not self._dedicated:
            return (self._number + number * self._num_workers) * num_shards + shard_index
        if known and self._dataset.have_corpus_seq_idx():
            return int(self._dataset.get_corpus_seq_idx(number))
        return number * num_shards + shard_index

    def _loaded(self, number: int) -> Loaded:
        dataset: Dataset = self._dataset
        fraction = dataset.get_complete_frac(number, allow_only_lr_suitable=True)
        # Some datasets list their keys only after loading a sequence.
        if self._keys is None:
            self._keys = list(dataset.get_data_keys())
        data = {key: dataset.get_data(number, key) for key in self._keys}
        return dataset.get_tag(number), fraction, data


def _bare(error: NotImplementedError) -> NotImplementedError:
    """Return a picklable copy of an error, with its arguments as strings."""
    return type(error)(*map(str, error.args))
