"""Waiting for a condition, and for threads."""

import threading
import time

PATIENCE = 60.0


def until(condition):
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def together(*functions):
    """Run functions at once, each in a thread of its own; raise the first exception."""
    raised = []
    line = threading.Barrier(len(functions))

    def guarded(function):
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
