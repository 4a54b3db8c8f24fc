"""Base class for the part of a reader that the fetcher uses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from cseq.order.base import Ints
    from cseq.store.objects import Object, Place, Remote

__all__ = ["Reader"]


class Reader:
    """A reader's arguments and its index. By default, each object is a shard."""

    suffix = ""
    # Arguments that determine the contents of the cache.
    settings: tuple[str, ...] = ()
    # The size of each cached shard in bytes, possibly estimated.
    nbytes: Ints
    sizes: Ints
    facts: dict[str, Any]
    folder: str
    place: Place
    store: bytes | None
    limit: int
    ahead: int
    timeout: float | None
    is_kept: bool
    about: dict[str, Any]

    def load(self) -> None:
        """Read the index in the folder."""
        with open(f"{self.folder}/index", encoding="utf-8") as file:
            self.facts = json.load(file)
        self.sizes = np.array(self.facts["rows"], np.int64)
        self.nbytes = np.array(self.facts["nbytes"], np.int64)

    async def survey(
        self, remote: Remote, objects: list[Object], put: Callable[[int], Awaitable[None]]
    ) -> dict[str, Any]:
        """Return the index: ``rows`` and ``nbytes`` of all shards, and other data.

        `put` fetches a shard into the folder.
        """
        raise NotImplementedError

    def spans(self, objects: list[Object], number: int) -> Iterable[tuple[Object, int, int | None]]:
        """Return (object, start, stop) for each byte range of a shard."""
        return [(objects[number], 0, None)]

    def finish(self, number: int, path: str) -> None:
        """Convert a fetched file to the cache's format. This runs in a separate thread."""
