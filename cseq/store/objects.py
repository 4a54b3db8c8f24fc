"""Lists and reads objects in a store.

Only the fetcher uses `Remote`, because obstore hangs in a forked process if the parent has used it.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib
import os
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Object", "Place", "Remote", "changed", "located"]

# Maximum number of concurrent requests for headers.
AT_ONCE = 32
# Minimum chunk size in bytes.
CHUNK = 1 << 20


class Object(NamedTuple):
    """An object in a store."""

    name: str
    nbytes: int
    tag: str


class Place(NamedTuple):
    """A folder in a store, and either a list of object names or a pattern for them."""

    root: str
    names: list[str]
    pattern: str


def located(urls: Any, suffix: str, *, in_store: bool) -> Place:
    """Split URLs into a folder and either names or a pattern."""
    given = urls if isinstance(urls, (list, tuple)) else [urls]
    if not given or not all(isinstance(url, (str, os.PathLike)) for url in given):
        raise TypeError(f"urls={urls!r} is not a URL or path; pass one, or a list of them")
    full = [_absolute(os.fspath(url), in_store=in_store) for url in given]
    if len(full) == 1:
        start = min((full[0].find(sign) for sign in "*?[" if sign in full[0]), default=-1)
        if start >= 0:
            root = full[0][: full[0].rfind("/", 0, start) + 1]
            return Place(root, [], full[0][len(root) :])
        if not full[0].endswith(suffix):
            return Place(full[0].rstrip("/") + "/" if full[0] else "", [], f"*{suffix}")
    same = os.path.commonprefix(full)  # noqa: RUF071
    root = same[: same.rfind("/") + 1]
    if not in_store and "://" not in root.rstrip("/"):
        raise ValueError(f"urls={urls!r} belong to several stores; make a reader for each")
    return Place(root, [url[len(root) :] for url in full], "")


def _absolute(url: str, *, in_store: bool) -> str:
    if in_store:
        return url.lstrip("/")
    if "://" in url:
        return url
    path = os.path.abspath(url)
    return f"file://{path}/" if url.endswith("/") or os.path.isdir(path) else f"file://{path}"


def changed(named: str, before: Object, now: Object | None) -> ValueError:
    """Return an error for a shard that differs from the index."""
    if now is None:
        what = "no longer exists"
    elif now.nbytes != before.nbytes:
        what = f"now has {now.nbytes} bytes instead of {before.nbytes}"
    else:
        what = f"now has the tag {now.tag} instead of {before.tag}"
    return ValueError(
        f"shard {named} has changed since its index was made: it {what}. If the change is "
        "intended, pass a different cache= or delete that folder"
    )


class Remote:
    """Lists and reads the objects in a store.

    Parameters
    ----------
    place : Place
    store : bytes or None
        The user's pickled store, or None to create one from the URL.
    timeout : float or None
        The time in seconds that obstore waits for data before it retries a request.
    """

    def __init__(self, place: Place, store: bytes | None, timeout: float | None) -> None:
        self.place, self._timeout = place, timeout
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._obstore: Any = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions").BaseError, OSError
        self._folder = place.root if store is not None else ""
        # Reading a whole shard may take a long time.
        patience: dict[str, Any] = {"timeout": "1day"}
        if timeout is not None:
            patience["read_timeout"] = timedelta(seconds=timeout)
        if store is None:
            self._store = self._made(patience)
            return
        given = pickle.loads(store)
        args, options = given.__getnewargs_ex__()
        if type(given).__name__ not in ("LocalStore", "MemoryStore"):
            options["client_options"] = patience | (options.get("client_options") or {})
        self._store = type(given).__new__(type(given), *args, **options)

    def _made(self, patience: dict[str, Any]) -> Any:
        stores: Any = importlib.import_module("obstore.store")
        root = self.place.root
        if root.startswith("file://"):
            return stores.LocalStore(unquote(root.removeprefix("file://")))
        options = patience | ({"allow_http": True} if root.startswith("http://") else {})
        return stores.from_url(root.rstrip("/"), client_options=options)

    def describe(self, shard: Object) -> str:
        """Describe an object for error messages."""
        inside = "" if "://" in self.place.root else f" of {self._store!r}"
        return f"{self.place.root}{shard.name}{inside}"

    async def list(self) -> list[Object]:
        """Return the objects, in the user's order or sorted by name."""

        async def look(name: str) -> Object:
            async with self._gate:
                head = await self._obstore.head_async(self._store, self._folder + name)
                return _object(name, head)

        if self.place.names:
            return [*await asyncio.gather(*map(look, self.place.names))]
        try:
            found = await self._obstore.list(self._store, self._folder or None).collect_async()
        except self._errors as error:
            if self.place.root.startswith("http"):
                raise ValueError(
                    f"urls={self.place.root!r} cannot be listed ({_first_line(error)}); pass a "
                    "list of all shard URLs"
                ) from error
            raise
        objects = [_object(meta["path"][len(self._folder) :], meta) for meta in found]
        chosen = [one for one in objects if fnmatch.fnmatchcase(one.name, self.place.pattern)]
        if not chosen:
            raise ValueError(
                f"urls={self.place.root + self.place.pattern!r} matches none of the "
                f"{len(objects)} objects there; correct the URL or pattern"
            )
        return sorted(chosen)

    async def look(self, shard: Object, start: int, stop: int) -> bytes:
        """Read a byte range, with at most `AT_ONCE` concurrent requests."""
        async with self._gate:
            return b"".join([bytes(chunk) async for chunk in self.read(shard, start, stop)])

    async def read(
        self, shard: Object, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[Any]:
        """Read a byte range of an object, and yield it in chunks.

        Raises
        ------
        ValueError
            If the object has changed.
        OSError
            If the object cannot be read.
        """
        stop, came = shard.nbytes if stop is None else stop, 0
        options = {} if (start, stop) == (0, shard.nbytes) else {"range": (start, stop)}
        path, named = self._folder + shard.name, self.describe(shard)
        cause = "the connection was closed"
        try:
            result = await self._obstore.get_async(self._store, path, options=options)
            there = _object(shard.name, result.meta)
            if there != shard:
                raise changed(named, shard, there)
            async for chunk in result.stream(min_chunk_size=CHUNK):
                yield chunk
                came += len(chunk)
        except FileNotFoundError:
            raise changed(named, shard, None) from None
        except self._errors as error:
            stalled = self._timeout is not None and "kind: Timeout" in str(error)
            cause = f"none for {self._timeout:g} s" if stalled else _first_line(error)
        if came < stop - start:
            raise OSError(
                f"shard {named} could not be fetched: {came} of {stop - start} bytes arrived, then "
                f"{cause}"
            )


def _object(name: str, meta: Any) -> Object:
    return Object(name, meta["size"], str(meta["e_tag"] or meta["last_modified"]))


def _first_line(error: BaseException) -> str:
    # Omit the internal details that follow in obstore's messages.
    return str(error).partition("\n")[0].strip()
