"""The CPU in the role of a CUDA device: the whole path to the device, on machines without one.

Workers must be started by fork, which inherits the patches.
"""

import contextlib
from collections import deque

from cseq.converter import cuda, export, lane, output, page_locks


class Passed:
    """The event of a lane whose copies are synchronous."""

    def query(self):
        return True

    def synchronize(self):
        """Wait for nothing."""


class CpuLane(lane.Lane):
    """A lane whose copies are all synchronous."""

    pins = False

    def __init__(self, device="cpu"):
        assert device == "cpu"
        self._read = deque()

    def active(self):
        return contextlib.nullcontext()

    def can_fetch(self, tensor):
        return True

    def send(self, tensor):
        return tensor.clone()

    def record(self, read):
        """Keep the tensors that were read until the event has passed."""
        event = self.event()
        if read:
            self._read.append((event, read))
        return event

    def event(self):
        return Passed()

    def join(self, event, tensors):
        """Wait for nothing."""

    def collect(self):
        """Keep nothing."""


class Locks:
    """Locks no pages."""

    def __init__(self, device):
        self.register = self.unregister = lambda memory: True
        self.close = lambda: None


def rehearse(asked):
    """Return an output that sends batches along the CUDA path to the CPU."""
    return asked._replace(kind="cuda", device="cpu", function=None)


def install(put=setattr, make=CpuLane):
    """Rehearse here and in processes forked from now on; `make` makes the lanes."""
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
