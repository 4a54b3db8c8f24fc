"""A process that watches who makes names in /dev/shm, since the maker may end with the test.

A file stores its owner, not the process that made it, and other programs of the same user, such as
other pytest processes, make names, too.
"""

import ctypes
import os
import re
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
IN_CREATE, IN_MOVED_TO = 0x100, 0x80
# inotify's event: watch, mask, cookie, length of the name that follows.
EVENT = struct.Struct("iIII")
NUMBER = re.compile(r"(?<![0-9a-zA-Z])\d+(?![0-9a-zA-Z])")
# Semaphores, and the files of CUDA's driver for each process that uses it.
UNCOUNTED = ("sem.", "cuda.shm.")
ANSWERS = {"True": True, "False": False, "None": None}


class Witness:
    """A process that watches the names made in a folder.

    `mark` is an environment variable of the processes that this one starts.
    """

    def __init__(self, folder, mark):
        command = [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid()), mark]
        pipe = subprocess.PIPE
        # A test may find its own processes by their variables, so the witness has none of these.
        needed = {name: os.environ[name] for name in {"LD_LIBRARY_PATH"} & os.environ.keys()}
        self._process = subprocess.Popen(command, env=needed, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def saw_us(self, name):
        """Return whether this process or one it started made a name; None if no maker was seen."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self):
        return ANSWERS[self._process.stdout.readline().strip()]

    def close(self):
        self._process.communicate()


def descends(pid, ancestor, mark):
    """Return whether a process is another one, descends from it, or has its variable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        parent = int(stat.rpartition(")")[2].split()[1])
        if ancestor in (pid, parent) or (parent > 1 and descends(parent, ancestor, mark)):
            return True
        return f"{mark}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        # It is gone, or another user's.
        return False


def is_of(path, ancestor, mark):
    """Return whether a file is of a process that descends from another one; None if unknown.

    A file is of the process whose number is in its name, or else of those that have it open.
    """
    for number in NUMBER.findall(path.name):
        if os.path.exists(f"/proc/{number}"):
            return descends(int(number), ancestor, mark)
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal()]
    return any(has(pid, path) for pid in pids if descends(pid, ancestor, mark)) or None


def has(pid, path):
    """Return whether a process has a file mapped or open."""
    try:
        if f" {path}\n" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        files = os.listdir(f"/proc/{pid}/fd")
        return any(os.readlink(f"/proc/{pid}/fd/{file}") == str(path) for file in files)
    except OSError:
        # It is gone, or another user's.
        return False


def names_of(events):
    """Return the names made since the last call."""
    try:
        data = os.read(events, 1 << 16)
    except BlockingIOError:
        return []
    names, at = [], 0
    while at < len(data):
        *_, length = EVENT.unpack_from(data, at)
        at += EVENT.size + length
        names.append(os.fsdecode(data[at - length : at].rstrip(b"\0")))
    return names


def main(folder, ancestor, mark):
    """Watch, and answer questions, until no more come."""
    libc = ctypes.CDLL(None)
    # Processes that the tests forked may hold the pipe open, so its end alone is not enough.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    libc.inotify_add_watch(events, os.fsencode(folder), IN_CREATE | IN_MOVED_TO)
    seen = {}
    print(None, flush=True)
    while True:
        # Without inotify, whose instances are limited for each user, no maker is seen.
        ready, _, _ = select.select([0] if events < 0 else [0, events], [], [])
        for name in names_of(events) if events >= 0 else []:
            # Nobody asks for a name that is gone. To look through all processes for each would take
            # longer than the tests that make many.
            if not name.startswith(UNCOUNTED) and os.path.exists(folder / name):
                seen[name] = is_of(folder / name, ancestor, mark)
        if 0 in ready:
            name = os.read(0, 4096).decode().strip()
            if not name:
                return
            print(seen.get(name), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
