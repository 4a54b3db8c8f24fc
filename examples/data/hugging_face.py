"""A Hugging Face data set of texts, padded."""

import datasets
import numpy as np

import cseq

datasets.disable_progress_bars()
tokens = [list(range(1, 2 + number % 5)) for number in range(100)]
texts = {"tokens": tokens, "label": range(100)}
datasets.Dataset.from_dict(texts).save_to_disk("texts")


class Texts:
    def __init__(self):
        self.rows = datasets.load_from_disk("texts").with_format("numpy")

    def __getitem__(self, indices):
        rows = self.rows[indices]
        lengths = [len(one) for one in rows["tokens"]]
        tokens = np.zeros((len(indices), max(lengths)), np.int64)
        for row, one, length in zip(tokens, rows["tokens"], lengths):
            row[:length] = one
        return {"tokens": tokens, "label": rows["label"]}


with cseq.MPSequence(Texts, 100, out_type="cpu", dtype=None, seed=1).start() as batches:
    labels = []
    for batch in batches:
        labels += batch["label"].tolist()
print(batch["tokens"].dtype, sorted(labels) == list(range(100)))
