"""What other programs may know of a run: the last bytes of the file of its rings.

``cseq top`` opens that file through ``/proc/<pid>/fd`` and reads the meters in it; the
facts say where they are, and what they are of. They are written once, and read by nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FILE", "ROOM", "read", "write"]

FILE = "cseq-run"  # what `/proc` calls the file
ROOM = 4096  # bytes
MAGIC = b"cseq facts 1\n"
LONGEST = 200  # characters of a value


def write(fd: int, facts: Mapping[str, object]) -> None:
    """Write facts, numbers and lines of text, into a file that ends with room for them."""
    if not sys.platform.startswith("linux"):  # only /proc opens it
        return
    lines = (f"{name}={str(value)[:LONGEST]}".replace("\n", " ") for name, value in facts.items())
    text = MAGIC + "\n".join(lines).encode("utf-8", "replace") + b"\n\n"
    os.pwrite(fd, text, os.fstat(fd).st_size - ROOM)


def read(fd: int) -> dict[str, str]:
    """Return the facts in a file; none if there are none, or not yet."""
    text = os.pread(fd, ROOM, max(os.fstat(fd).st_size - ROOM, 0))
    if not text.startswith(MAGIC):
        return {}
    lines, ended, _ = text[len(MAGIC) :].partition(b"\n\n")
    found = {}
    for line in lines.decode("utf-8", "replace").split("\n") if ended else ():
        name, _, value = line.partition("=")
        found[name] = "".join(each if each.isprintable() else "?" for each in value)
    return found
