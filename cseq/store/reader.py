"""The part of a shard reader that the fetcher uses."""

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
    """A reader's arguments, along with metadata about its shards.

    By default, each object is a shard and is stored unchanged.
    """

    # The suffix of object names.
    suffix = ""
    # The arguments that determine the cache contents.
    settings: tuple[str, ...] = ()
    # The exact or estimated size of each cached shard in bytes.
    nbytes: Ints
    sizes: Ints
    facts: dict[str, Any]
    folder: str
    place: Place
    store: bytes | None
    limit: int
    ahead: int
    timeout: float
    is_kept: bool
    about: dict[str, Any]

    def load(self) -> None:
        """Read the folder's index."""
        with open(f"{self.folder}/index", encoding="utf-8") as file:
            self.facts = json.load(file)
        self.sizes = np.array(self.facts["rows"], np.int64)
        self.nbytes = np.array(self.facts["nbytes"], np.int64)

    async def survey(
        self, remote: Remote, objects: list[Object], put: Callable[[int], Awaitable[None]]
    ) -> dict[str, Any]:
        """Return the index data: each shard's ``rows`` and ``nbytes``, plus reader-specific data.

        `put` fetches a shard into the folder.
        """
        raise NotImplementedError

    def spans(self, objects: list[Object], number: int) -> Iterable[tuple[Object, int, int | None]]:
        """Return the byte ranges that make up a shard as (object, start, stop) tuples."""
        return [(objects[number], 0, None)]

    def finish(self, number: int, path: str) -> None:
        """Convert a fetched file to the cached format. This method runs in a thread."""
