"""What the adapter uses of torch and torchdata."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
    from torch.utils.data.graph import traverse_dps
    from torch.utils.data.graph_settings import apply_sharding

    with warnings.catch_warnings():
        # Every process would print the deprecation warning again.
        warnings.filterwarnings("ignore", r"[\s#]*WARNING!\s+The 'datapipes'", UserWarning)
        from torchdata.dataloader2 import DataLoader2
        from torchdata.dataloader2.graph import (
            find_dps,
            list_dps,
            replace_dp,
            set_datapipes_seed,
            set_graph_random_seed,
        )
        from torchdata.dataloader2.graph.utils import _find_replicable_branches
        from torchdata.dataloader2.random import SeedGenerator
        from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
        from torchdata.dataloader2.utils import WorkerInfo
        from torchdata.dataloader2.utils.dispatch import (
            _DummyIterDataPipe,
            find_lca_round_robin_sharding_dp,
            find_non_dispatching_branches,
        )
        from torchdata.datapipes.iter import (
            IterDataPipe,
            PinMemory,
            Prefetcher,
        )
        from torchdata.datapipes.map import MapDataPipe
except ImportError as error:
    raise ImportError(
        "cseq.adapters.torchdata needs torch and torchdata 0.9, the last release with DataLoader2; "
        "install them with: pip install 'cseq-loader[torchdata]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    DataPipe: TypeAlias = Any  # an IterDataPipe or a MapDataPipe
    InitFn: TypeAlias = Callable[[DataPipe, Any], DataPipe]
    ResetFn: TypeAlias = Callable[[DataPipe, Any, Any], DataPipe]
    GraphFn: TypeAlias = Callable[[DataPipe], DataPipe]

__all__ = [
    "SHARDING_PRIORITIES",
    "CheckpointableReadingServiceInterface",
    "DataLoader2",
    "Epoch",
    "IterDataPipe",
    "MapDataPipe",
    "PinMemory",
    "Prefetcher",
    "SeedGenerator",
    "WorkerInfo",
    "_DummyIterDataPipe",
    "_find_replicable_branches",
    "apply_sharding",
    "find_dps",
    "find_lca_round_robin_sharding_dp",
    "find_non_dispatching_branches",
    "list_dps",
    "replace_dp",
    "set_datapipes_seed",
    "set_graph_random_seed",
    "torch",
    "traverse_dps",
]


class Epoch(NamedTuple):
    """The assignment of a process in an epoch; see `Streams.begin`."""

    number: int
    seeds: SeedGenerator
    reset_fn: GraphFn | None
