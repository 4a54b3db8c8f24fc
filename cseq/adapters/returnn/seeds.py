"""Seeds random generators for each sequence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from numpy.random import RandomState

from cseq._core import derive
from cseq.indexing.context import PURPOSE_ITEM, Numbers
from cseq.indexing.seeding import Seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cseq.indexing.context import BatchContext

    class Dataset(Protocol):
        """The part of RETURNN's dataset API used here."""

        num_seqs: int
        added_data: list[object]
        fixed_random_seed: int | None
        random_seed_offset: int

        def set_sharding(self, *, num_shards: int, shard_index: int) -> object: ...
        def init_seq_order(self, **order: object) -> object: ...
        def get_current_seq_order(self) -> Sequence[int]: ...
        def finish_epoch(self, *, free_resources: bool) -> object: ...
        def load_seqs(self, start: int, stop: int) -> object: ...
        def is_less_than_num_seqs(self, number: int) -> bool: ...
        def have_corpus_seq_idx(self) -> bool: ...
        def get_corpus_seq_idx(self, number: int) -> int: ...
        def get_complete_frac(self, number: int, **options: bool) -> float | None: ...
        def get_data_keys(self) -> list[str]: ...
        def get_data_dtype(self, key: str) -> str: ...
        def get_data(self, number: int, key: str) -> NDArray[Any]: ...
        def get_tag(self, number: int) -> str: ...


__all__ = ["SequenceSeeds"]


class SequenceSeeds:
    """Reseeds the random generators before each sequence.

    RETURNN itself seeds them at most once per epoch, and identically in all workers.
    """

    def __init__(self, batch_context: BatchContext) -> None:
        self._batch_context = batch_context
        self._seeds = Seeds(batch_context)
        self._epoch = self._key = 0
        # Generators that `PostprocessingDataset` has created in this epoch.
        self.passed: list[RandomState] = []

    def hook(self) -> None:
        """Patch RETURNN to record the generators that `PostprocessingDataset` creates."""
        module: Any = sys.modules.get("returnn.datasets.postprocessing")
        if module is not None:
            module.RandomState = self._made

    def _made(self, seed: int) -> RandomState:
        self.passed.append(RandomState(seed))
        return self.passed[-1]

    def begin_epoch(self, dataset: Dataset, epoch: int | None) -> None:
        """Drop the previous epoch's generators and derive this epoch's seed."""
        fixed = dataset.fixed_random_seed
        seed, epoch = (dataset.random_seed_offset, epoch or 0) if fixed is None else (fixed, 0)
        [self._key] = derive(seed % 2**64, epoch, PURPOSE_ITEM, 1)
        self._epoch = epoch
        self.passed = []
        self._batch_context.clear_ticket()

    def seed(self, number: int, position: int) -> None:
        """Seed all generators for sequence `number` of this worker, at `position` in the epoch."""
        self._batch_context.set_ticket(Numbers(self._key, self._epoch, number, position))
        self._seeds.seed(self._key, position)
        if self.passed:
            [word] = derive(self._key, position, PURPOSE_ITEM, 1)
            for generator in self.passed:
                generator.seed(word % 2**32)
