"""The control groups of this process, which limit a container (Linux)."""

from __future__ import annotations

from os.path import join  # pathlib is slow to import, and every start waits for it
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["ROOT", "Folder", "fields", "groups", "lines", "number"]

Folder: TypeAlias = "str | os.PathLike[str]"

ROOT = "/"  # where ``proc`` and ``sys`` are


def groups(root: Folder, controller: str, name: str, old: str) -> Iterator[tuple[str, str]]:
    """List this process's control groups and all above them, each with a file of a controller.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    controller : str
        ``'memory'``, ``'cpu'`` or the like.
    name, old : str
        The file's name, and its name in version 1 of control groups.

    Yields
    ------
    (str, str)
        The folder, which may not exist in a container, and the file's name in it.
    """
    for line in lines(join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(join(root, "sys/fs/cgroup"), path, name)
        elif controller in controllers.split(","):
            yield from _upwards(join(root, "sys/fs/cgroup", controller), path, old)


def _upwards(top: str, path: str, name: str) -> Iterator[tuple[str, str]]:
    """List a control group and all above it; in a container, only some may exist."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield join(top, *parts[:depth]), name


def lines(path: str) -> list[str]:
    """Read a file's lines; none if there is no such file."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def number(path: str) -> int | None:
    """Read a file with a number in it; None if there is none, or another word ('max')."""
    text = "".join(lines(path)).strip()
    return int(text) if text.isdigit() else None


def fields(path: str) -> dict[str, int]:
    """Read a file of lines with a name and a number."""
    words = [line.split() for line in lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
