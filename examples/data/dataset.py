"""A Dataset with one sample per index."""

import torch
from torch.utils.data import Dataset

import cseq


class Squares(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {
            "x": torch.tensor([index, index**2]),
            "name": f"number {index}",
            "label": index % 2,
        }


worker = cseq.from_dataset(Squares())
with cseq.MPSequence(worker, batch_size=50, out_type="cpu", seed=1).start() as batches:
    numbers = []
    for batch in batches:
        print(
            batch["x"].shape,
            batch["label"].dtype,
            batch["name"][0] == f"number {batch['x'][0, 0]}",
        )
        numbers += batch["x"][:, 0].tolist()
print(sorted(numbers) == list(range(100)))
