"""The CPU in the part of a CUDA device: the whole path to the device, where there is none.

Workers must be started by fork, which takes along what is changed here.
"""

import contextlib
from collections import deque

from cseq.converter import cuda, export, lane, output, page_locks


class Passed:
    """The event of a lane whose copies are synchronous."""

    def query(self):
        """Return whether the copies are done: always."""
        return True

    def synchronize(self):
        """Wait for nothing."""


class CpuLane(lane.Lane):
    """A lane of which every copy is synchronous."""

    pins = False

    def __init__(self, device="cpu"):
        assert device == "cpu"
        self._read = deque()

    def active(self):
        """Be active anyway."""
        return contextlib.nullcontext()

    def can_fetch(self, tensor):
        """Fetch all."""
        return True

    def send(self, tensor):
        """Copy at once."""
        return tensor.clone()

    def record(self, read):
        """Keep what was read until the event is passed."""
        event = self.event()
        if read:
            self._read.append((event, read))
        return event

    def event(self):
        """Make an event that is passed."""
        return Passed()

    def join(self, event, tensors):
        """Wait for nothing."""

    def collect(self):
        """Keep nothing."""


class Locks:
    """Page-locks nothing."""

    def __init__(self, device):
        self.register = self.unregister = lambda memory: True
        self.close = lambda: None


def rehearse(asked):
    """Return an output that takes the CUDA path to the CPU."""
    return asked._replace(kind="cuda", device="cpu", function=None)


def install(put=setattr, make=CpuLane):
    """Rehearse, here and in processes that are forked from now on; `make` makes the lanes."""
    put(output, "resolve", rehearse)
    put(cuda, "Lane", make)
    put(export, "Lane", make)
    put(page_locks, "PageLocks", Locks)


@contextlib.contextmanager
def on(made):
    """Rehearse with one lane."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        install(patch.setattr, lambda _: made)
        yield
