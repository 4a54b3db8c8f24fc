"""cseq's loaders with threads, except where a test says how processes are started."""

from __future__ import annotations

from typing import Any, TypeVar

import cseq.adapters.torch

T_co = TypeVar("T_co", covariant=True)


class DataLoader(cseq.adapters.torch.DataLoader[T_co]):
    def __init__(self, *args: Any, **options: Any) -> None:
        method = "thread" if options.get("multiprocessing_context") is None else None
        super().__init__(*args, worker_method=method, **options)


class StatefulDataLoader(DataLoader[T_co]):
    snapshot_every_n_steps = 1
