"""Where objects lie: their URLs, and what the index knows of each."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

__all__ = ["Object", "Place", "changed", "located"]


class Object(NamedTuple):
    """An object as the index knows it."""

    name: str
    nbytes: int
    tag: str


class Place(NamedTuple):
    """Where objects lie.

    Attributes
    ----------
    root : str
        The URL of a folder; or a path in the user's store.
    names : tuple of str
        Objects in it; empty if `pattern` chooses them.
    pattern : str
    """

    root: str
    names: tuple[str, ...]
    pattern: str


def located(urls: Any, suffix: str, *, in_store: bool) -> Place:
    """Find the folder of objects, and their names or a pattern of these."""
    given = urls if isinstance(urls, (list, tuple)) else [urls]
    if not given or not all(isinstance(url, (str, os.PathLike)) for url in given):
        raise TypeError(f"urls={urls!r}: give a URL or a path, or a list of these")
    full = [_absolute(os.fspath(url), in_store=in_store) for url in given]
    if len(full) == 1:
        start = min((full[0].find(each) for each in "*?[" if each in full[0]), default=-1)
        if start >= 0:
            root = full[0][: full[0].rfind("/", 0, start) + 1]
            return Place(root, (), full[0][len(root) :])
        if not full[0].endswith(suffix):
            return Place(full[0].rstrip("/") + "/" if full[0] else "", (), f"*{suffix}")
    folders = [url.split("/")[:-1] for url in full]
    same = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    root = "".join(f"{parts[0]}/" for parts in same)
    if not in_store and "://" not in root.rstrip("/"):
        raise ValueError(f"urls={urls!r} are of several stores; make a reader for each")
    return Place(root, tuple(url[len(root) :] for url in full), "")


def _absolute(url: str, *, in_store: bool) -> str:
    if in_store:
        return url.lstrip("/")
    if "://" in url:
        return url
    path = os.path.abspath(url)
    return f"file://{path}/" if url.endswith("/") or os.path.isdir(path) else f"file://{path}"


def changed(named: str, before: Object, now: Object | None) -> str:
    """Say that a shard is another one than the index knows."""
    if now is None:
        what = "is gone"
    elif now.nbytes != before.nbytes:
        what = f"has {now.nbytes} bytes, and had {before.nbytes}"
    else:
        what = f"has the tag {now.tag}, and had {before.tag}"
    return (
        f"shard {named} has changed since its index was made: it {what}; if that is meant, give "
        "another cache=, or remove that folder"
    )
