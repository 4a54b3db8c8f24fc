"""Tensors that converter processes export, with the CPU in the role of the device.

This module stands in for what `rehearsal` leaves out: a tensor lies in memory that goes with its
process (a memfd that is opened through its /proc), and /dev/shm has a file of reference counts, as
torch makes it. Workers must be started by fork, which inherits the patches.
"""

import os
import pickle
import secrets
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import rehearsal

from cseq.converter import cuda
from cseq.converter.export import Imports, opened
from cseq.encoding.codec import map_leaves
from cseq.encoding.pickling import dumps


class Receiver(Imports):
    """The trainer's end without slots: the converter's pickle stands for the cell."""

    def __init__(self, output):
        none = None
        ring = SimpleNamespace(capacity=0)
        super().__init__(none, ring, output, none)

    def unpack(self, packed):
        return self._fetch(packed, 0, 0, ())

    def drop(self, packed):
        with self._lane.active():
            self._open(packed)

    def _open(self, cell, *_):
        return pickle.loads(cell)


class Theirs:
    """Pickles as a call that opens memory of this process in another one."""

    def __init__(self, rebuild, *place):
        self.reduced = opened, (rebuild, place)

    def __reduce__(self):
        return self.reduced


def open_theirs(folder, pid, fd, dtype, shape):
    """Open the memory of another process; its owner learns that it was opened."""
    import torch

    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
        values = np.frombuffer(file.read(), dtype).reshape(shape).copy()
    # A second call raises here; see `open_once`.
    Path(folder, f"{pid}-{fd}").unlink()
    return torch.from_numpy(values)


def open_once(folder, pid, fd, *rest):
    """Open the memory, and record whether it was opened before."""
    if Path(f"/proc/{pid}/fd/{fd}").exists() and not Path(folder, f"{pid}-{fd}").exists():
        Path(folder, f"twice-{pid}-{fd}").touch()
    return open_theirs(folder, pid, fd, *rest)


class Exports:
    """The exports of all converter processes.

    Parameters
    ----------
    folder : Path
        Where each exported tensor has a file until it is opened.
    die_at : int
        The first process to make its batch of this number is killed before it is published; 0:
        none.
    tell_at : int
        After this many batches, or when it dies, a process sends its number to `heard`.
    """

    def __init__(self, folder, die_at=0, tell_at=0):
        self.folder = folder
        self.counts = folder.with_name("counts")
        self.counts.mkdir()
        self.die_at = die_at
        self.tell_at = tell_at
        self.made = 0
        self.owner = 0
        self.ear, self.mouth = os.pipe()

    def install(self, monkeypatch):
        """Make the converters of this process and its children export like this."""
        rehearsal.install(monkeypatch.setattr)
        monkeypatch.setattr(cuda, "pack", self.pack)

    def heard(self):
        """Wait for the next process that reports; return its number."""
        return int(os.read(self.ear, 16))

    def close(self):
        """Close the pipe, and remove the counts of processes that were killed."""
        for link in self.counts.iterdir():
            link.readlink().unlink(missing_ok=True)
        os.close(self.ear)
        os.close(self.mouth)

    def left(self):
        """Return the names of exported tensors that were never opened."""
        return sorted(os.listdir(self.folder))

    def pack(self, batch):
        """Stand in for `cseq.converter.export.pack`."""
        if self.owner != os.getpid():
            self.owner, self.made = os.getpid(), 0
            counts = Path(f"/dev/shm/torch_{os.getpid()}_{secrets.randbits(32)}_0")
            counts.touch()
            (self.counts / counts.name).symlink_to(counts)
        self.made += 1
        packed = dumps(map_leaves(self.export, batch))
        if self.made == self.tell_at:
            os.write(self.mouth, str(os.getpid()).encode().ljust(16))
        if self.made == self.die_at and not (self.folder.parent / "died").exists():
            (self.folder.parent / "died").touch()
            os.write(self.mouth, str(os.getpid()).encode().ljust(16))
            os.kill(os.getpid(), signal.SIGKILL)
        return packed

    def export(self, leaf):
        """Put a tensor into this process's memory."""
        import torch

        if not isinstance(leaf, torch.Tensor):
            return leaf
        fd = os.memfd_create("device")
        os.write(fd, leaf.numpy().tobytes())
        (self.folder / f"{os.getpid()}-{fd}").touch()
        place = (str(self.folder), os.getpid(), fd, str(leaf.numpy().dtype), tuple(leaf.shape))
        return Theirs(open_once, *place)
