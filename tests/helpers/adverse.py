"""Workers that fail in every way, and the stream that they should still give."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import numpy as np
from killing import kill
from kinds import QUICKEST

import cseq

# Seconds after which an operation that should end counts as hung.
GUARD = 60.0
SAMPLES, BATCH = 400, 8


class Squares:
    """Indices and their squares, large enough to be leased, and the id of the maker's process."""

    def __getitem__(self, indices):
        wide = np.repeat(indices[:, None] ** 2, 1100, axis=1)
        return {"indices": indices, "squares": wide, "draw": cseq.rng().random(4)}


class Fatal(Squares):
    """Fails fatally once, at the first batch that holds `victim`, and leaves a mark."""

    def __init__(self, folder, deed, victims):
        self.folder, self.deed, self.victims = Path(folder), deed, list(victims)

    def __getitem__(self, indices):
        for victim in self.victims:
            mark = self.folder / str(victim)
            if victim in indices and not mark.exists():
                mark.touch()
                self.deed()
        return super().__getitem__(indices)


def kill_myself():
    """Die as the out-of-memory killer makes a process die."""
    kill(os.getpid())


def crash():
    """Die as a C extension dies that follows a wild pointer."""
    if os.name == "nt":
        kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
        # The thread starts at a function at byte 8.
        kernel.CreateThread(None, 0, ctypes.c_void_p(8), None, 0, None)
        hang()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    """End the process without a word to anybody."""
    os._exit(3)


def hang():
    """Never return."""
    while True:
        threading.Event().wait(1000)


def manager(worker=Squares, **options):
    """Make a manager of processes that start in the quickest way."""
    defaults = {"out_type": "null", "seed": 11, "num_workers": 3}
    options = {"start_method": QUICKEST.start_method} | defaults | options
    return cseq.MPSequence(worker, SAMPLES, batch_size=BATCH, **options)


def digest(batches):
    """Reduce batches to what can be compared bit for bit."""
    return [tuple(np.asarray(b[name]).tobytes() for name in sorted(b)) for b in batches]


def reference(epochs=1):
    """Return what test mode gives."""
    with manager().start_test() as m:
        return [d for _ in range(epochs) for d in digest(m)]


def converted():
    """Return what test mode gives on the CPU."""
    with manager(out_type="cuda", num_converters=1).start_test("cpu") as m:
        return digest(m)
