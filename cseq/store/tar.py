"""Shards in tar files. Members with the same key form a sample."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tarfile
from typing import TYPE_CHECKING, Any, TypeAlias

from cseq.store.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from cseq.order.base import Ints
    from cseq.store.objects import Object, Remote

__all__ = ["Tar"]

# A sample: its key, and a dict that maps each member's extension to an offset and a size.
Members: TypeAlias = "tuple[str, dict[str, tuple[int, int]]]"
# Size in bytes of the last field of a shard, which holds the length of the member list.
LENGTH = 8


class Tar(Shards):
    """A reader for tar files in which several members form a sample.

    Consecutive members belong to the same sample if their names match up to the first dot.
    ``[index]`` returns a dict with ``"__key__"`` and the bytes of each member under its lowercase
    extension. ``[indices]`` returns a list of dicts. The first run reads all shards to count their
    samples. See `Shards` for parameters.

    Examples
    --------
    >>> pictures = store.Tar("s3://bucket/train/", cache="/local/train")  # doctest: +SKIP
    >>> [*pictures[0]]  # doctest: +SKIP
    ['__key__', 'jpg', 'cls']
    """

    suffix = ".tar"

    async def survey(
        self, _remote: Remote, objects: list[Object], put: Callable[[int], Awaitable[None]]
    ) -> dict[str, Any]:
        """Fetch all shards to count their samples. Keep the shards that fit into the cache."""
        gate = asyncio.Semaphore(self.ahead)

        async def look(number: int) -> int:
            async with gate:
                await put(number)
                with open(f"{self.folder}/shards/{number}", "rb") as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return len(self.mapped(number, view)[1])

        counts = await asyncio.gather(*map(look, range(len(objects))))
        return {"rows": counts, "nbytes": self.nbytes.tolist()}

    def finish(self, _number: int, path: str) -> None:
        """Append the list of members to a shard's file."""
        try:
            with tarfile.open(path, "r:") as file:
                found = [(one.name, one.offset_data, one.size) for one in file if one.isreg()]
                end = file.offset
        except tarfile.TarError as error:
            raise ValueError(f"is not a tar file: {error}") from error
        samples: list[Members] = []
        for name, offset, size in found:
            folder, _, base = name.rpartition("/")
            stem, dot, rest = base.partition(".")
            if not stem or not dot:
                continue
            key = f"{folder}/{stem}" if folder else stem
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            members, extension = samples[-1][1], rest.lower()
            if extension in members:
                raise ValueError(f"has two members {key}.{extension}; give each sample its own key")
            members[extension] = offset, size
        data = json.dumps(samples).encode()
        with open(path, "r+b") as file_of_bytes:
            file_of_bytes.seek(end)
            if file_of_bytes.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise ValueError(f"has no valid tar header at byte {end}; the file may be damaged")
            file_of_bytes.seek(0, os.SEEK_END)
            file_of_bytes.write(data + len(data).to_bytes(LENGTH, "little"))

    def mapped(self, _number: int, view: mmap.mmap) -> tuple[mmap.mmap, list[Members]]:
        """Return the bytes of a shard and the members of its samples."""
        nbytes = int.from_bytes(view[-LENGTH:], "little")
        samples: list[Members] = json.loads(view[-LENGTH - nbytes : -LENGTH])
        return view, samples

    def gather(self, mapped: Mapping[int, Any], shards: Ints, rows: Ints) -> list[dict[str, Any]]:
        """Return the samples as dicts."""
        batch = []
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            view, samples = mapped[shard]
            key, members = samples[row]
            sample = {name: view[start : start + size] for name, (start, size) in members.items()}
            batch.append({"__key__": key, **sample})
        return batch
