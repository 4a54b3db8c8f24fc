"""``cseq top``: what the loaders of running programs do, live."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from cseq.observe.attached import Watcher
from cseq.observe.lines import overview, worker_stacks

__all__ = ["top"]


def top(pid: int | None, *, plain: bool, once: bool, dump: bool) -> int | str:
    """Show the runs of a process, or all; return the exit status, or why there is nothing to show.

    Parameters
    ----------
    pid : int or None
        None: all processes.
    plain : bool
        Lines of text, once a second, not a screen.
    once, dump : bool
        The same, once; the stacks of all workers.
    """
    if not sys.platform.startswith("linux"):
        return "cseq top needs Linux: it reads the meters through /proc"
    if pid is not None and not os.path.isdir(f"/proc/{pid}"):
        return f"cseq top: there is no process {pid}"
    watcher = Watcher(pid)
    watcher.update()
    if dump:
        for text in worker_stacks(watcher.runs):
            print(text, end="", flush=True)  # noqa: T201
        return 0 if watcher.runs else overview(watcher, 120)[0]
    if once or not sys.stdout.isatty():
        plain = True
    if not plain:
        try:
            from cseq.observe.screen import Screen
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("textual", "rich"):
                raise
            print("a screen needs textual: pip install 'cseq-loader[top]'", file=sys.stderr)  # noqa: T201
        else:
            Screen(watcher).run()
            return 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if watcher.runs or not once:
                time.sleep(1.0)
                watcher.update()
            size = os.get_terminal_size() if sys.stdout.isatty() else (120, 0)
            print("\n".join(overview(watcher, *size)), flush=True)  # noqa: T201
            if once:
                return 0 if watcher.runs else 1
            print()  # noqa: T201
    return 0
