"""The objects of a store, by obstore: listed, and read until they are whole.

Only the process that fetches uses this module's `Remote`: obstore hangs in a forked process whose
parent has used it.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cseq.store.place import Object, changed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cseq.store.place import Place

__all__ = ["Remote"]

# To get one more byte of an object.
ATTEMPTS = 6
# Seconds before the second of them, doubled each time.
PAUSE = 0.1
# Bytes.
CHUNK = 1 << 20


class Remote:
    """The objects of a place.

    Parameters
    ----------
    place : Place
    store : obstore's store, or None
        The user's, or None if one is made of the URL.
    timeout : float
        Seconds without a byte after which a request is made again.

    Attributes
    ----------
    retried : int
        Requests that were made again here; obstore makes failed ones again itself.
    """

    def __init__(self, place: Place, store: Any, timeout: float) -> None:
        self.place, self.timeout, self.retried = place, timeout, 0
        self._obstore: Any = importlib.import_module("obstore")
        self._folder = place.root if store is not None else ""
        self._store = self._made() if store is None else store
        errors = importlib.import_module("obstore.exceptions")
        self._errors = errors.BaseError, OSError
        # A body that ends early.
        self._cut = errors.GenericError, ConnectionError

    def _made(self) -> Any:
        stores: Any = importlib.import_module("obstore.store")
        root = self.place.root
        if root.startswith("file://"):
            return stores.LocalStore(unquote(root.removeprefix("file://")))
        # Of a whole body.
        options: dict[str, Any] = {"timeout": "1day"}
        if root.startswith("http://"):
            options["allow_http"] = True
        return stores.from_url(root.rstrip("/"), client_options=options)

    def describe(self, shard: Object) -> str:
        """Name an object for a message, with its store."""
        inside = "" if "://" in self.place.root else f" of {self._store!r}"
        return f"{self.place.root}{shard.name}{inside}"

    async def list(self) -> list[Object]:
        """Return the objects, in the order of their names, or as they were given."""
        if self.place.names:
            gate = asyncio.Semaphore(32)

            async def look(name: str) -> Object:
                async with gate:
                    return self._object(
                        name, await self._obstore.head_async(self._store, self._folder + name)
                    )

            return list(await asyncio.gather(*map(look, self.place.names)))
        try:
            found = await self._obstore.list(self._store, self._folder or None).collect_async()
        except self._errors as error:
            if self.place.root.startswith("http"):
                raise ValueError(
                    f"urls={self.place.root!r} lists nothing ({_first_line(error)}); give "
                    "a list of the URLs of all shards"
                ) from error
            raise
        objects = [self._object(each["path"][len(self._folder) :], each) for each in found]
        chosen = [each for each in objects if fnmatch.fnmatchcase(each.name, self.place.pattern)]
        if not chosen:
            raise ValueError(
                f"urls={self.place.root + self.place.pattern!r}: none of the {len(objects)} "
                "objects there is such a shard"
            )
        return sorted(chosen)

    @staticmethod
    def _object(name: str, meta: Any) -> Object:
        return Object(name, meta["size"], str(meta["e_tag"] or meta["last_modified"]))

    async def read(
        self, shard: Object, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[Any]:
        """Read bytes of an object, in buffers. What is cut off or stalls goes on where it was.

        Raises
        ------
        ValueError
            The object has changed.
        OSError
            It cannot be read.
        """
        end = shard.nbytes if stop is None else stop
        at, failed = start, 0
        while at < end:
            began, cause = at, "the connection was closed"
            try:
                chunks = aiter(await asyncio.wait_for(self._get(shard, at, end), self.timeout))
                while at < end:
                    chunk = await asyncio.wait_for(anext(chunks, b""), self.timeout)
                    if not chunk:
                        break
                    yield chunk
                    at += len(chunk)
            except asyncio.TimeoutError:
                cause = f"nothing for {self.timeout:g} s"
            except self._cut as error:
                cause = _first_line(error)
            if at < end:
                failed = 1 if at > began else failed + 1
                if failed == ATTEMPTS:
                    came = f"{at - start} of {end - start} bytes came, then {cause}"
                    raise OSError(f"shard {self.describe(shard)} cannot be fetched: {came}")
                self.retried += 1
                await asyncio.sleep(PAUSE * 2**failed)

    async def _get(self, shard: Object, at: int, end: int) -> Any:
        """Ask for bytes of an object; return the stream of its buffers."""
        options = {} if (at, end) == (0, shard.nbytes) else {"range": (at, end)}
        path, named = self._folder + shard.name, self.describe(shard)
        try:
            result = await self._obstore.get_async(self._store, path, options=options)
        except FileNotFoundError:
            raise ValueError(changed(named, shard, None)) from None
        # Obstore has tried several times.
        except self._errors as error:
            raise OSError(f"shard {named} cannot be fetched: {_first_line(error)}") from None
        there = self._object(shard.name, result.meta)
        if there != shard:
            raise ValueError(changed(named, shard, there))
        return result.stream(min_chunk_size=CHUNK)


def _first_line(error: BaseException) -> str:
    # Obstore adds pages of its insides.
    return str(error).partition("\n")[0].strip()
