"""A file of JSON lines, read in random order."""

import json
import mmap

import numpy as np

import cseq

with open("records.jsonl", "w") as file:
    for number in range(100):
        print(json.dumps({"text": "word " * (number % 5), "label": number}), file=file)

# Find once where each line begins and where the last one ends.
with open("records.jsonl", "rb") as file:
    np.save("records.npy", np.cumsum([0] + [len(line) for line in file]))


class Records:
    def __init__(self):
        self.places = np.load("records.npy", mmap_mode="r")
        with open("records.jsonl", "rb") as file:
            self.lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self):
        return len(self.places) - 1

    def __getitem__(self, indices):
        starts, ends = self.places[indices], self.places[indices + 1]
        rows = [json.loads(self.lines[start:end]) for start, end in zip(starts, ends)]
        labels = np.array([row["label"] for row in rows])
        return {"text": [row["text"] for row in rows], "label": labels}

    def close(self):
        self.lines.close()


with cseq.MPSequence(
    Records, 100, out_type="cpu", dtype=None, seed=1
).start() as batches:
    labels = []
    for batch in batches:
        labels += batch["label"].tolist()
print(type(batch["text"]), batch["label"].dtype, sorted(labels) == list(range(100)))
