"""Indexers for the tests; worker processes can import them, and need only numpy for that.

The batch of each is a function of its indices (and of `cseq.rng`), so a test can say what a batch
must be, no matter who made it.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cseq

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


class Indices1:
    def __getitem__(self, indices):
        return indices


class Slow:
    """Returns its indices after a pause without computation."""

    def __init__(self, seconds=0.01):
        self.seconds = seconds

    def __getitem__(self, indices):
        time.sleep(self.seconds)
        return indices


class Units:
    """Returns its indices, unit by unit, and a number from the batch's own generator."""

    def __getitem__(self, indices):
        ends = np.cumsum(cseq.parts())[:-1]
        return np.split(indices, ends), int(cseq.rng().integers(1 << 60))


class Rows:
    """Features and labels, as a training set has them."""

    def __init__(self):
        self.images = np.arange(4 * 1000, dtype=np.uint8).reshape(1000, 2, 2)

    def __getitem__(self, indices):
        return self.images[indices % 1000], indices


class Augmented:
    """Rows with noise from the batch's own generator, and without a trace of who made them."""

    def __getitem__(self, indices):
        noise = cseq.rng().random((len(indices), 3))
        return {"index": indices, "noise": noise, "more": cseq.rng().integers(1 << 60)}


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Sample:
    data: Any
    name: str
    parts: Any = ()


def nested(indices):
    """Return one batch that has everything a batch can have."""
    data = indices.astype(np.float32)
    return {
        "pair": Pair(data[:, None] * np.ones(3, np.float32), indices),
        "sample": Sample(data + 1, "a", [Sample(np.zeros(0), "é"), None]),
        "list": [1, 2.5, True, None, "text", b"bytes", 1j, 1 << 80, (), [], {}],
        "scalars": {7: (np.float64(3.25), np.array(5), np.bool_(True))},
        "types": [
            data.astype(t)
            for t in ("?", "i1", "u2", "i4", "u8", "f2", "f8", "c16", "S3", "U3", "M8[s]")
        ],
        "layout": [np.asfortranarray(np.ones((3, 4))), np.arange(9)[::2], np.arange(3)[::-1]],
        "record": np.zeros(2, [("a", "i4"), ("b", "f8")]),
        "objects": np.array([{1: 2}, None], dtype=object),
        "blob": bytes(range(256)) * 40,
    }


class Labelled:
    """Images with an expanded mask, and labels."""

    def __getitem__(self, indices):
        images = np.ones((len(indices), 64, 64, 8), np.float32)
        mask = np.broadcast_to(np.arange(512, dtype=np.uint8), (len(indices), 8, 512))
        return images.transpose(0, 3, 1, 2), indices, mask


class Nested:
    def __getitem__(self, indices):
        return nested(indices)


class Large:
    """Batches that lie in shared memory and are leased there: 64 KiB for each index."""

    def __getitem__(self, indices):
        return np.repeat(indices, 8192).reshape(len(indices), 8192)


class InPlace:
    """Batches made in their final place."""

    def __getitem__(self, indices):
        whole = cseq.empty((len(indices), 5000), np.int64)
        whole[:] = indices[:, None]
        scalar = cseq.empty((), "i1")
        scalar[...] = 7
        view = whole[:, ::-2]
        return {"whole": whole, "part": whole[:1, 10:20], "none": cseq.empty(0), "twice": whole,
                "view": view, "scalar": scalar}  # fmt: skip


class Spoiler:
    """Changes the indices that it was given, as it may."""

    def __getitem__(self, indices):
        assert indices.dtype == np.int64
        assert indices.ndim == 1
        assert indices.flags.writeable
        batch = indices.copy()
        indices[:] = -1
        indices.sort()
        return batch


def here():
    """Return the ids of this process and this thread, as one text."""
    return f"{os.getpid()}-{threading.get_ident()}"


class Info:
    """Returns the `cseq.worker_info` of a batch and of the time when the indexer is made."""

    def __init__(self):
        self.made = cseq.worker_info()

    def __getitem__(self, indices):
        return indices, self.made, cseq.worker_info()


class Closing:
    """Returns where a batch is made, and where its indexer was.

    It leaves files in a folder: one when an indexer is made, and one when it is closed.
    """

    def __init__(self, folder):
        self.folder, self.maker = folder, here()
        self.note("made")

    def note(self, what):
        """Leave a file; a second one of that name is an error."""
        (self.folder / f"{what}-{here()}").open("x").close()

    def __getitem__(self, indices):
        return here(), self.maker

    def close(self):
        self.note("closed")


class Raising:
    """Raises, at one index, the exception that a function makes."""

    def __init__(self, make, at):
        self.make = make
        self.at = at

    def __getitem__(self, indices):
        if self.at in indices:
            raise self.make()
        return indices


class Lasting:
    """An object that is itself an indexer; it counts its calls."""

    def __init__(self, n):
        self.data = np.arange(n) * 3
        self.asked = 0
        self.closed = False

    def __getitem__(self, indices):
        self.asked += 1
        return self.data[indices]

    def close(self):
        self.closed = True


class Broken:
    def __init__(self):
        raise LookupError("no such data set")


class Quitting:
    def __init__(self):
        os._exit(7)


class NotAnIndexer:
    """Has no __getitem__."""
