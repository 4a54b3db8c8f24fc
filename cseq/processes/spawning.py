"""Objects of multiprocessing, pickled for workers that are not forked.

A lock, an event, a value or a queue is pickled only for a child that multiprocessing itself starts:
it asks the child's `Popen`, which is known to the thread meanwhile, to take descriptors there.
Here another `Popen` is known meanwhile, whose descriptors the workers open by themselves. So they
do with the file of a tensor in shared memory.
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

__all__ = ["Reopened", "spawning"]

CONTEXT: Any = context  # what follows is public only by name
PICKLER: Any = reduction.ForkingPickler


class Reopened(NamedTuple):
    """A descriptor of the trainer, for a worker: also one that is started later, for a dead one."""

    pid: int
    fd: int
    mode: int
    device: int
    inode: int

    def detach(self) -> int:
        """Open what it stands for, in this process."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", self.mode | os.O_CLOEXEC)
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            os.close(fd)
            raise OSError(f"descriptor {self.fd} of process {self.pid} is another one by now")
        return fd


class Workers:
    """Stands for the `Popen` of all workers of a manager."""

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        """Return a descriptor, if workers can open it."""
        if not os.path.exists(f"/proc/{os.getpid()}/fd/{fd}"):
            raise RuntimeError(f"descriptor {fd} cannot be opened by other processes here")
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise RuntimeError(f"descriptor {fd} is a socket, which other processes cannot open")
        return fd

    @staticmethod
    def DupFd(fd: int) -> Reopened:  # noqa: N802 - as multiprocessing names it
        """Say where a descriptor is found."""
        import fcntl

        found = os.fstat(fd)
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        return Reopened(os.getpid(), fd, mode, found.st_dev, found.st_ino)


@contextlib.contextmanager
def spawning() -> Iterator[dict[type, Any]]:
    """In this context, give `dump` its `reducers` for multiprocessing's objects.

    There are none for Windows, where these are handles.
    """
    if os.name == "nt":
        yield {}
        return
    before = CONTEXT.get_spawning_popen()  # of this thread
    CONTEXT.set_spawning_popen(Workers)
    try:
        yield _reducers()
    finally:
        CONTEXT.set_spawning_popen(before)


def _reducers() -> dict[type, Any]:
    """Return how multiprocessing pickles what pickle cannot do itself, by type."""
    storage = getattr(sys.modules.get("torch"), "UntypedStorage", None)
    shared = {} if storage is None else {storage: _reduce_storage}
    return shared | {
        cls: reduce
        for cls, reduce in PICKLER._extra_reducers.items()
        if cls not in copyreg.dispatch_table
        and reduce.__module__.startswith("multiprocessing.")
        and reduce.__module__ != "multiprocessing.reduction"
    }


def _reduce_storage(storage: Any) -> Any:
    """Reduce a storage of torch: one in shared memory is the same memory in the workers."""
    strategy = sys.modules["torch"].multiprocessing.get_sharing_strategy()
    is_file = storage.device.type == "cpu" and storage.is_shared() and storage.nbytes()
    if not is_file or strategy != "file_descriptor":
        return reduce_storage(storage)
    fd, nbytes = storage._share_fd_cpu_()
    return _shared_storage, (Workers.DupFd(fd), nbytes)


def _shared_storage(descriptor: Reopened, nbytes: int) -> Any:
    """Map the memory of a storage in shared memory."""
    fd = descriptor.detach()
    try:
        return import_torch().UntypedStorage._new_shared_fd_cpu(fd, nbytes)
    finally:
        os.close(fd)
