"""Waiting until something is so, and for threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0  # seconds


def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def together(*functions: Callable[[], None]) -> None:
    """Run functions at once, in threads of their own; raise the first exception of any of them."""
    raised: list[BaseException] = []
    line = threading.Barrier(len(functions))

    def guarded(function: Callable[[], None]) -> None:
        try:
            line.wait()
            function()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            raised.append(error)

    begun = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    if raised:
        raise raised[0]
