"""An object with `__getitem__` and `__len__`, without torch."""

import numpy as np

import cseq


class Squares:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"image": np.full((3, 4), index, "float32"), "label": index * index}


worker = cseq.from_dataset(Squares())
manager = cseq.MPSequence(worker, batch_size=32, out_type="cpu")
with manager.start() as batches:
    for batch in batches:
        pass
print(len(batches), batch["image"].shape, batch["label"].dtype)
