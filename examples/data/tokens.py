"""Random windows of tokens, and a resume."""

import numpy as np

import cseq

np.arange(100_000, dtype="uint16").tofile("tokens.bin")


class Windows:
    def __init__(self, path, length):
        self.tokens = np.memmap(path, dtype="uint16", mode="r")
        self.steps = np.arange(length + 1)

    def __getitem__(self, indices):
        last = len(self.tokens) - len(self.steps)
        starts = cseq.rng().integers(last + 1, size=len(indices))
        windows = self.tokens[starts[:, None] + self.steps].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def manager():
    windows = Windows("tokens.bin", 512)
    options = {"batch_size": 64, "shuffle": False, "seed": 1}
    return cseq.MTSequence(windows, 64 * 5, out_type="cpu", dtype=None, **options)


with manager().start() as batches:
    whole = [inputs for inputs, targets in batches]
with (first := manager()).start() as batches:
    next(iter(batches))
    state = first.state_dict()
second = manager()
second.load_state_dict(state)
with second.start() as batches:
    rest = [inputs for inputs, targets in batches]
print(len(whole), whole[0].shape, len(rest))
print(all(bool((a == b).all()) for a, b in zip(whole[1:], rest)))
