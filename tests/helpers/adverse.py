"""Workers that adversity befalls, and the stream that there should be nevertheless."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import numpy as np
from killing import kill
from kinds import QUICKEST

import cseq

GUARD = 60.0  # seconds after which something that should end is taken to hang
SAMPLES, BATCH = 400, 8


class Squares:
    """Indices and their squares, large enough to be leased, with the maker's process id."""

    def __getitem__(self, indices):
        wide = np.repeat(indices[:, None] ** 2, 1100, axis=1)
        return {"indices": indices, "squares": wide, "draw": cseq.rng().random(4)}


class Fatal(Squares):
    """Does something fatal once, at the first batch that holds `victim`, and marks that it did."""

    def __init__(self, folder, deed, victims):
        self.folder = Path(folder)
        self.deed = deed
        self.victims = list(victims)

    def __getitem__(self, indices):
        for victim in self.victims:
            mark = self.folder / str(victim)
            if victim in indices and not mark.exists():
                mark.touch()
                self.deed()
        return super().__getitem__(indices)


def kill_myself():
    """Die as by the out-of-memory killer."""
    kill(os.getpid())


def crash():
    """Die as a C extension does that follows a wild pointer."""
    if os.name == "nt":
        kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
        kernel.CreateThread(None, 0, ctypes.c_void_p(8), None, 0, None)  # a function at byte 8
        hang()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    """End the process behind everybody's back."""
    os._exit(3)


def hang():
    """Never come back."""
    while True:
        threading.Event().wait(1000)


def manager(worker=Squares, **options):
    """Make a manager of processes, started in the quickest way."""
    options = {"out_type": "null", "seed": 11, "num_workers": 3} | options
    options = {"start_method": QUICKEST.start_method} | options
    return cseq.MPSequence(worker, SAMPLES, batch_size=BATCH, **options)


def digest(batches):
    """Reduce batches to what can be compared bit for bit."""
    return [tuple(np.asarray(b[name]).tobytes() for name in sorted(b)) for b in batches]


def reference(epochs=1):
    """What test mode gives."""
    with manager().start_test() as m:
        return [d for _ in range(epochs) for d in digest(m)]


def converted():
    """What test mode gives on the CPU."""
    with manager(out_type="cuda", num_converters=1).start_test("cpu") as m:
        return digest(m)
