"""A RETURNN dataset that costs nothing, in its own module because it needs RETURNN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from returnn.datasets.basic import Dataset

if TYPE_CHECKING:
    from collections.abc import Sequence


class InMemory(Dataset):
    """The same array under every number, in random order."""

    def __init__(self, length: int, shape: tuple[int, int], **options: Any) -> None:
        super().__init__(seq_ordering="random", **options)
        self.array = np.zeros(shape, np.float32)
        self.length = length
        self.num_inputs = shape[1]
        self.num_outputs = {"data": (shape[1], 2)}
        self.order: Sequence[int] = range(length)

    def init_seq_order(
        self, epoch: int | None = None, seq_list: Any = None, seq_order: Any = None
    ) -> bool:
        super().init_seq_order(epoch, seq_list, seq_order)
        if seq_order is None:
            seq_order = self.get_seq_order_for_epoch(epoch, self.length)
        self.order = seq_order
        return True

    @property
    def num_seqs(self) -> int:
        return len(self.order)

    def get_current_seq_order(self) -> Sequence[int]:
        return self.order

    def load_seqs(self, start: int, end: int) -> None:
        """Do nothing: all sequences are in memory."""

    def get_data_keys(self) -> list[str]:
        return ["data"]

    def get_target_list(self) -> list[str]:
        return []

    def get_data(self, number: int, key: str) -> Any:  # noqa: ARG002 - there is one
        return self.array

    def get_tag(self, number: int) -> str:
        return f"seq-{self.order[number]}"

    def get_data_dtype(self, key: str) -> str:  # noqa: ARG002
        return "float32"

    def get_total_num_seqs(self, *, fast: bool = False) -> int:  # noqa: ARG002
        return self.length
