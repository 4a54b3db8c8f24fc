"""A Grain MapDataset with cseq's workers."""

import grain
import numpy as np

import cseq


class Source:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"x": np.full(4, index, "float32"), "label": index % 10}


dataset = grain.MapDataset.source(Source()).seed(7).shuffle()
dataset = dataset.map(lambda sample: {**sample, "x": sample["x"] / 100})
worker = cseq.from_dataset(dataset)
manager = cseq.MPSequence(
    worker, batch_size=32, num_workers=2, shuffle=False, out_type="null"
)
with manager.start() as batches:
    pairs = zip(batches, dataset.batch(32))
    print([np.array_equal(ours["x"], grains["x"]) for ours, grains in pairs])
