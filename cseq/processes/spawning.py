"""Pickles multiprocessing objects for workers not forked from the trainer.

Locks, events and queues pass their descriptors to the current `Popen`, so cseq installs its own
`Popen` while pickling. Workers reopen the descriptors.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import stat
import sys
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.encoding.pickling import import_torch, reduce_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from cseq.encoding.pickling import Reduced, Reducers
__all__ = ["Reopened", "spawning"]

# Typeshed lacks the attributes used below.
CONTEXT: Any = context
PICKLER: Any = reduction.ForkingPickler


class Reopened(NamedTuple):
    """A descriptor in the trainer that every worker can reopen."""

    pid: int
    fd: int
    mode: int
    device: int
    inode: int

    def detach(self) -> int:
        """Open the descriptor in this process."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", self.mode | os.O_CLOEXEC)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            os.close(fd)
            raise OSError(f"descriptor {self.fd} of process {self.pid} now refers to another file")
        return fd


class Workers:
    """A `Popen` that stands in for all of a manager's workers."""

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        """Return the descriptor. Raise RuntimeError if workers cannot open it."""
        if not os.path.exists(f"/proc/{os.getpid()}/fd/{fd}"):
            raise RuntimeError(f"other processes cannot open descriptor {fd} on this system")
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise RuntimeError(f"descriptor {fd} is a socket, which other processes cannot open")
        return fd

    @staticmethod
    def DupFd(fd: int) -> Reopened:  # noqa: N802
        """Return an object that reopens a descriptor in a worker."""
        import fcntl

        status = os.fstat(fd)
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        return Reopened(os.getpid(), fd, mode, status.st_dev, status.st_ino)


@contextlib.contextmanager
def spawning() -> Iterator[Reducers]:
    """Yield `reducers` for `dump` that handle multiprocessing objects (none on Windows)."""
    if os.name == "nt":
        yield {}
        return
    before = CONTEXT.get_spawning_popen()
    CONTEXT.set_spawning_popen(Workers)
    try:
        yield _reducers()
    finally:
        CONTEXT.set_spawning_popen(before)


def _reducers() -> Reducers:
    storage: type | None = getattr(sys.modules.get("torch"), "UntypedStorage", None)
    shared: Reducers = {} if storage is None else {storage: _reduce_storage}
    own: Reducers = PICKLER._extra_reducers
    return shared | {
        cls: reduce
        for cls, reduce in own.items()
        if cls not in copyreg.dispatch_table
        and reduce.__module__.startswith("multiprocessing.")
        and reduce.__module__ != "multiprocessing.reduction"
    }


def _reduce_storage(storage: torch.UntypedStorage) -> Reduced:
    """Reduce a torch storage. Workers share it if it is in shared memory."""
    strategy: str = sys.modules["torch"].multiprocessing.get_sharing_strategy()
    is_file = storage.device.type == "cpu" and storage.is_shared() and storage.nbytes()
    if not is_file or strategy != "file_descriptor":
        return reduce_storage(storage)
    handed: tuple[int, int] = storage._share_fd_cpu_()
    return _shared_storage, (Workers.DupFd(handed[0]), handed[1])


def _shared_storage(descriptor: Reopened, nbytes: int) -> object:
    fd = descriptor.detach()
    try:
        return import_torch().UntypedStorage._new_shared_fd_cpu(fd, nbytes)
    finally:
        os.close(fd)
