"""What is to be known of a format of shards, to fetch and to read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from cseq.order.base import Ints
    from cseq.store.place import Object, Place

__all__ = ["Fetching", "Format", "Spec"]


class Fetching(Protocol):
    """What a format asks the process that fetches for."""

    objects: list[Object]
    shards: str

    def read(self, shard: Object, start: int = 0, stop: int | None = None) -> AsyncIterator[Any]:
        """Read bytes of an object, in buffers."""

    def describe(self, shard: Object) -> str:
        """Name an object for a message, with its store."""

    async def put(self, number: int) -> int:
        """Fetch a shard into the folder; return its bytes."""


class Format:
    """A format; the base class has a shard for each object, which is kept as it is.

    Attributes
    ----------
    suffix : str
        Of the names of objects.
    rows, nbytes : array of int
        Samples of each shard, and the bytes that it takes (roughly, where `is_exact` is False).
    facts : dict
        What the index has.
    """

    suffix = ""
    is_exact = True
    rows: Ints
    nbytes: Ints
    facts: dict[str, Any]

    def about(self) -> dict[str, Any]:
        """Return what a folder's shards depend on, as JSON values."""
        return {"kind": type(self).__name__}

    async def survey(self, fetcher: Fetching) -> dict[str, Any]:
        """Return what the index has: ``rows`` and ``nbytes`` of each shard, and more."""
        raise NotImplementedError

    def load(self, folder: str) -> None:
        """Read the index of a folder."""
        with open(f"{folder}/index", encoding="utf-8") as file:
            self.facts = json.load(file)
        self.rows = np.array(self.facts["rows"], np.int64)
        self.nbytes = np.array(self.facts["nbytes"], np.int64)

    async def chunks(self, fetcher: Fetching, number: int) -> AsyncIterator[Any]:
        """Give what a shard's file is to have."""
        async for chunk in fetcher.read(fetcher.objects[number]):
            yield chunk

    def gather(self, files: Mapping[int, int], shards: Ints, rows: Ints) -> Any:
        """Return the batch of some rows of shards, whose files are open."""
        raise NotImplementedError

    def pick(self, batch: Any, number: int) -> Any:
        """Return one sample of a batch."""
        raise NotImplementedError


class Spec(NamedTuple):
    """What the process that fetches needs to know."""

    folder: str
    place: Place
    format: Format
    store: Any
    limit: int
    ahead: int
    timeout: float
    is_kept: bool
