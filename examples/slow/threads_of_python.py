"""Threads that run Python code, which only one thread can do at a time."""

import time

import cseq


class Parsed:
    def __getitem__(self, indices):
        return sum(int(char) for char in "31415926" * 12000) + indices


def train(kind=cseq.MTSequence, batches=300):
    with kind(
        Parsed, 4 * batches, batch_size=4, out_type="null", num_workers=2
    ).start() as loader:
        for _ in loader:
            time.sleep(0.002)
    return loader


AFTER = {"kind": cseq.MPSequence}


if __name__ == "__main__":
    print(train().advice())
