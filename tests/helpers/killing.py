"""How a test kills a process, and the exit code that follows, on every system."""

import contextlib
import errno
import importlib
import os
import select
import time

from cseq.processes.launcher import describe_exit
from cseq.processes.launcher.base import KILL, KILLED
from cseq.runs import await_closings

__all__ = ["CODE", "KILLED", "WORDS", "await_closings", "is_alive", "kill", "kill_agent"]


# The exit code of a process that `kill` has ended; on Windows it is the signal's number.
CODE = KILL if os.name == "nt" else -KILL
WORDS = describe_exit(CODE)

PATIENCE = 60.0
# What `os.kill` reports for a process that has ended. On Windows that is a wrong argument, or,
# while a handle of the process is open, a process without access.
GONE = (errno.EINVAL, errno.EACCES) if os.name == "nt" else (errno.ESRCH,)

# The access right that Windows requires to wait for a process.
SYNCHRONIZE = 0x100000


def kill(pid):
    """Kill a process, perhaps this one, unless it has already ended."""
    try:
        os.kill(pid, KILL)
    except OSError as error:
        if error.errno not in GONE:
            raise


def kill_agent(fleet, agent, number=KILL):
    """Send a signal to a worker process of Ray; without a signal, end it as ``ray.kill`` does.

    Return its id, on its node; Ray starts it again.
    """
    import ray

    handle = fleet.handles[agent]
    pid = ray.get(fleet.ask(handle))[0]
    if number is None:
        ray.kill(handle, no_restart=False)
    else:
        handle.__ray_call__.remote(lambda _: os.kill(os.getpid(), number))
    return pid


def await_death(pid):
    """Wait until a process is gone; its supervisor reaps it."""
    assert _ended(pid), f"process {pid} still runs"


def is_alive(pid):
    """Return whether a process is running."""
    return not _ended(pid, 0.0)


def _ended(pid, patience=PATIENCE):
    """Wait for the end of a process with the system's means; return whether it came."""
    if os.name == "nt":
        winapi = importlib.import_module("_winapi")
        try:
            handle = winapi.OpenProcess(SYNCHRONIZE, False, pid)
        except OSError:
            # The process is gone.
            return True
        try:
            waited = winapi.WaitForSingleObject(handle, int(patience * 1000))
        finally:
            winapi.CloseHandle(handle)
        return waited == winapi.WAIT_OBJECT_0
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(pid)
            try:
                return bool(select.select([descriptor], [], [], patience)[0])
            finally:
                os.close(descriptor)
        deadline = time.monotonic() + patience
        while True:
            os.kill(pid, 0)
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    return True
