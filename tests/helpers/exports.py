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
        super().__init__(None, SimpleNamespace(capacity=0), output, None)

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


def open_once(folder, pid, fd, dtype, shape):
    """Open the memory of another process, which learns of it; record whether it was open before."""
    import torch

    memory, mark = Path(f"/proc/{pid}/fd/{fd}"), Path(folder, f"{pid}-{fd}")
    if memory.exists() and not mark.exists():
        Path(folder, f"twice-{pid}-{fd}").touch()
    values = np.frombuffer(memory.read_bytes(), dtype).reshape(shape).copy()
    # A second call raises here.
    mark.unlink()
    return torch.from_numpy(values)


class Exports:
    """The exports of all converter processes.

    In `folder`, each exported tensor has a file until it is opened. The first process to make its
    batch number `die_at` is killed before it is published. After `tell_at` batches, or when it
    dies, a process sends its number to `heard`.
    """

    def __init__(self, folder, die_at=0, tell_at=0):
        self.folder, self.counts = folder, folder.with_name("counts")
        self.counts.mkdir()
        self.die_at, self.tell_at, self.made, self.owner = die_at, tell_at, 0, 0
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
        packed, died = dumps(map_leaves(self.export, batch)), self.folder.parent / "died"
        dies = self.made == self.die_at and not died.exists()
        if dies:
            died.touch()
        if dies or self.made == self.tell_at:
            os.write(self.mouth, str(os.getpid()).encode().ljust(16))
        if dies:
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
