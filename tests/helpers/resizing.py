"""Change the size of a running manager, as 'auto' does, and at once: no result depends on it."""

__all__ = ["resize"]


def resize(manager, num_workers=None, buffer=None):
    """Set how many workers it has, and its buffer: at most what it was made with. None: as it is.

    For the thread that takes its batches.
    """
    batches = manager._run.pool.tickets
    size = batches.size
    with manager._run.lock.hold():
        batches.resize(
            size.num_workers if num_workers is None else num_workers,
            size.buffer if buffer is None else buffer,
        )
