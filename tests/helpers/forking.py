"""Code that runs in a process which a test forks."""

import os


def in_child(act):
    """Fork, and return what `act` returns in the child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
