"""Summarizes faulthandler output in one line."""

from __future__ import annotations

import itertools
import os
import re
import sys
import sysconfig
from typing import NamedTuple

__all__ = ["location_in"]

MOST = 3
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Frame(NamedTuple):
    """A line of a stack trace."""

    path: str
    line: str
    function: str

    @property
    def imports(self) -> bool:
        """Whether the frame belongs to Python's import system."""
        return self.path.startswith("<frozen importlib")

    @property
    def is_ours(self) -> bool:
        """Whether the frame belongs to cseq or the command that starts a worker."""
        return self.path == "<string>" or _is_in(self.path, PACKAGE)

    @property
    def shown(self) -> str:
        """The frame as text, with a path relative to sys.path."""
        return f"{_from_package(self.path)}:{self.line} in {self.function}"


def location_in(stacks: str) -> str:
    """Describe where the main thread is, and which modules it is importing, if any.

    Parameters
    ----------
    stacks : str
        The output of faulthandler. The main thread is last.

    Returns
    -------
    str
        For example, ``is still importing data → torch (torch/__init__.py:12 in <module>)`` or
        ``is still in data.py:4 in __init__``.
    """
    last = re.split(r"^.*hread 0x.*$", stacks, flags=re.MULTILINE)[-1]
    frames = [Frame(*match.groups()) for match in FRAME.finditer(last)]
    theirs = [frame for frame in frames if not (frame.imports or frame.is_ours)]
    if not theirs:
        return f"is still in {frames[0].shown}" if frames else f"has no stack {stacks.strip()}"
    own = [frame for frame in theirs if not any(_is_in(frame.path, path) for path in LIBRARIES)]
    shown = ", ".join(dict.fromkeys(frame.shown for frame in [*theirs[:MOST], *own[:1]]))
    pairs = itertools.pairwise(frames)
    bodies = [inner.path for inner, outer in pairs if outer.imports and inner in theirs]
    names = dict.fromkeys(re.split(r"[/\\.]", _from_package(path))[0] for path in bodies[::-1])
    return f"is still importing {' → '.join(names)} ({shown})" if names else f"is still in {shown}"


def _is_in(path: str, folder: str | None) -> bool:
    return folder is not None and path.startswith(os.path.join(folder, ""))


def _from_package(path: str) -> str:
    """Return a path relative to `sys.path`, or the file name."""
    folders = [folder for folder in map(os.path.abspath, sys.path) if _is_in(path, folder)]
    return os.path.relpath(path, max(folders, key=len)) if folders else os.path.basename(path)
