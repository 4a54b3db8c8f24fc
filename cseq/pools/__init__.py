"""The pools, which run the stages.

``base``     the feed over rings, and the Python that it calls
``inline``   the calling thread, batch by batch: this is test mode
``thread``   threads of this process
``process``  worker processes
``stream``   worker processes, each with items of its own
``tuning``   how many workers, how large a buffer: what 'auto' takes
``remake``   a batch of any epoch once more, in the calling thread
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.arguments import Job
    from cseq.pools.base import BatchPool

__all__ = ["pool_of"]


def pool_of(kind: str) -> Callable[[Job], BatchPool]:
    """Return the class of pools of a kind: 'inline', 'thread' or 'process'."""
    if kind == "inline":
        from cseq.pools.inline import InlinePool

        return InlinePool
    if kind == "thread":
        from cseq.pools.thread import ThreadPool

        return ThreadPool
    from cseq.pools.process import ProcessPool

    return ProcessPool
