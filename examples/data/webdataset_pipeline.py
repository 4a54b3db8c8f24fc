"""A WebDataset pipeline with cseq's workers, and a resume."""

import numpy as np
import webdataset as wds

import cseq

with wds.ShardWriter("shard-%06d.tar", maxcount=20, verbose=0) as shards:
    for number in range(60):
        image = np.full((4, 4), number, "uint8")
        shards.write({"__key__": f"{number:06}", "npy": image, "cls": number % 10})


def loader():
    dataset = wds.WebDataset("shard-{000000..000002}.tar", shardshuffle=3, seed=7)
    dataset = dataset.shuffle(30, seed=7).decode().to_tuple("npy", "cls")
    return cseq.DataLoader(dataset, batch_size=8, num_workers=2)


whole = [labels.tolist() for images, labels in loader()]
batches = iter(first := loader())
taken = [next(batches)[1].tolist() for _ in range(3)]
second = loader()
second.load_state_dict(first.state_dict())
print(taken + [labels.tolist() for images, labels in second] == whole)
