"""A change of a running manager's size, as 'auto' makes it, and at once."""


def resize(manager, num_workers=None, buffer=None):
    """Set the number of workers and the buffer, each at most its first value; None keeps it.

    Only the thread that takes the batches may call this.
    """
    batches = manager._run.pool.tickets
    size = batches.size
    with manager._run.lock.hold():
        batches.resize(
            size.num_workers if num_workers is None else num_workers,
            size.buffer if buffer is None else buffer,
        )
