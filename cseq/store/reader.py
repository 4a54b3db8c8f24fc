"""What the process that fetches knows of a reader."""

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
    """A reader: its arguments, and what is known of its shards.

    By default, each object is a shard, and is kept as it is.
    """

    # What the names of objects end with.
    suffix = ""
    # The arguments that what is in the cache depends on.
    settings: tuple[str, ...] = ()
    # The bytes that each shard takes in the cache, or about as many.
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
        """Read the index of the folder."""
        with open(f"{self.folder}/index", encoding="utf-8") as file:
            self.facts = json.load(file)
        self.sizes = np.array(self.facts["rows"], np.int64)
        self.nbytes = np.array(self.facts["nbytes"], np.int64)

    async def survey(
        self, remote: Remote, objects: list[Object], put: Callable[[int], Awaitable[None]]
    ) -> dict[str, Any]:
        """Return what the index has: ``rows`` and ``nbytes`` of each shard, and more.

        `put` fetches a shard into the folder.
        """
        raise NotImplementedError

    def spans(self, objects: list[Object], number: int) -> Iterable[tuple[Object, int, int | None]]:
        """Return what a shard is made of: objects, and where in them its bytes begin and end."""
        return [(objects[number], 0, None)]

    def finish(self, number: int, path: str) -> None:
        """Change a shard's file to what is kept, on a thread."""
