"""``cseq top``: shows statistics of running programs."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from cseq.observe.attached import Watcher
from cseq.observe.lines import overview

__all__ = ["top"]

# The escape sequence that clears the terminal.
CLEAR = "\x1b[H\x1b[J"


def top(pid: int | None, *, once: bool) -> int | str:
    """Show runs `once`, or every second until Ctrl-C. Return an exit status or an error message."""
    if not sys.platform.startswith("linux"):
        return "cseq top needs Linux: it reads the meters through /proc"
    if pid is not None and not os.path.isdir(f"/proc/{pid}"):
        return f"cseq top: there is no process {pid}"
    watcher = Watcher(pid)
    watcher.update()
    is_screen = sys.stdout.isatty()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if watcher.runs or not once:
                time.sleep(1.0)
                watcher.update()
            size = os.get_terminal_size() if is_screen else (120, 0)
            text = "\n".join(overview(watcher, *size))
            if once:
                print(text)  # noqa: T201
                return 0 if watcher.runs else 1
            print(f"{CLEAR}{text}" if is_screen else f"{text}\n", flush=True)  # noqa: T201
    return 0
