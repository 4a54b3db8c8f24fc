"""An occasional batch takes a hundred times as long. The batches after it wait."""

import time

import cseq


class Files:
    def __getitem__(self, indices):
        # Some samples are on another server.
        time.sleep(0.2 if indices[0] % 50 == 0 else 0.002)
        return indices


def train(buffer=10, batches=600):
    with cseq.MTSequence(
        Files, batches, batch_size=1, out_type="null", num_workers=8, buffer=buffer
    ).start() as loader:
        for _ in loader:
            time.sleep(0.006)
    return loader


AFTER = {"buffer": 48}


if __name__ == "__main__":
    print(train().advice())
