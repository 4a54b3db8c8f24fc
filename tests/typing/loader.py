"""A user's script with torch's DataLoader, changed to cseq's: see `user.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader as Torchs
from torch.utils.data import Dataset
from typing_extensions import assert_type

import cseq
from cseq import DataLoader, StatefulDataLoader

if TYPE_CHECKING:
    from torch import Tensor

    Sample = tuple[Tensor, int]


class Squares(Dataset["Sample"]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return torch.tensor(index * index), index


def collate(samples: list[Sample]) -> Tensor:
    """Leave out the numbers."""
    return torch.stack([square for square, _ in samples])


def train(loader: Torchs[Sample]) -> None:
    """Take either library's loader."""


loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2, collate_fn=collate)
assert_type(loader, DataLoader["Sample"])
train(loader)
train(DataLoader(Squares(), 4, True, rng="batch", on_error="skip"))
train(StatefulDataLoader(Squares(), snapshot_every_n_steps=3, persistent_workers=False))
for batch in cseq.DataLoader(Squares(), sampler=[3, 1], multiprocessing_context="spawn"):
    assert_type(batch, Any)
state: dict[str, Any] = loader.state_dict()
loader.load_state_dict(state)
left_out: list[int] = [one.batch for one in loader.skipped]

DataLoader()  # refused
DataLoader(Squares(), 4, shufle=True)  # refused
DataLoader(Squares(), num_workers="2")  # refused
DataLoader(Squares(), rng="sample")  # refused
DataLoader(Squares(), on_error="ignore")  # refused
