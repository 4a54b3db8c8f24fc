"""Compressed files, read from the beginning, with a state."""

import gzip
import json

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cseq import StatefulDataLoader

paths = [f"{shard}.jsonl.gz" for shard in range(4)]
for shard, path in enumerate(paths):
    with gzip.open(path, "wt") as file:
        for number in range(shard, 100, 4):
            print(json.dumps({"number": number}), file=file)


class Lines(IterableDataset):
    def __init__(self, paths):
        self.paths = paths
        # The number of the file, and the number of bytes that were read.
        self.place = 0, 0

    def __iter__(self):
        # This works in cseq's workers, too.
        worker = get_worker_info()
        mine = self.paths[worker.id :: worker.num_workers] if worker else self.paths
        first, done = self.place
        for number in range(first, len(mine)):
            with gzip.open(mine[number], "rb") as file:
                file.seek(done)
                done = 0
                while line := file.readline():
                    self.place = number, file.tell()
                    yield torch.tensor(json.loads(line)["number"])
        self.place = 0, 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def loader():
    return StatefulDataLoader(Lines(paths), batch_size=10, num_workers=2)


whole = torch.cat(list(loader())).tolist()
first = loader()
batches = iter(first)
taken = [next(batches) for _ in range(3)]
second = loader()
second.load_state_dict(first.state_dict())
print(sorted(whole) == list(range(100)), torch.cat([*taken, *second]).tolist() == whole)
