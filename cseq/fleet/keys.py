"""Keys in tickets: what names a batch of a loader, on its way to an agent.

=================  =========================  =====================================
a key              indices of its ticket      `cseq.parts` of them, in the indexer
=================  =========================  =====================================
a list of ints     these                      ones
an int             it                         `ONE`
any other          a pickle, padded           its size in bytes, which is above 1
=================  =========================  =====================================
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.encoding.pickling import dumps

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["read", "write"]

ONE = 0


def write(key: Any, number: int, most: int) -> NDArray[np.int64]:
    """Return the indices of a key that is no list of ints, and after them the size.

    Raises
    ------
    TypeError, ValueError
        The key cannot be pickled, or has more than `most` words.
    """
    if type(key) is int and -(2**63) <= key < 2**63:
        return np.array([key, ONE])
    try:
        data = dumps(key)
    except Exception as error:
        raise TypeError(
            f"key {number} of the sampler, {key!r}, cannot be pickled for a fleet: {error}"
        ) from error
    words = np.zeros(-(-len(data) // 8) + 1, np.int64)
    if len(words) > most:
        length = f" of {len(key)}" if hasattr(key, "__len__") else ""
        raise ValueError(
            f"key {number} of the sampler{length} takes {8 * len(words)} bytes, and the fleet has "
            f"batch_size={most}: 8 bytes for each; make it with a larger batch_size"
        )
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    words[-1] = len(data)
    return words


def read(indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> Any:
    """Return the key of a ticket, from its indices and `cseq.parts`."""
    if sizes[0] == 1:
        return indices.tolist()
    if sizes[0] == ONE:
        return int(indices[0])
    return pickle.loads(indices.tobytes())  # what comes after its end is not read
