"""Descriptors of files that processes share: opened, sent and received.

Executed programs do not inherit them: every descriptor is opened close-on-exec, since another
thread may execute a program at any moment. On Windows, they are handles of sections, which `send`
duplicates into the other process.

Their numbers are above 2, even in a process that has closed its standard streams (a daemon): what a
library in C prints would get into shared memory or into a message. `Descriptor`, `receive` and
`lifted` see to this.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import stat
from array import array
from typing import TYPE_CHECKING, Any

from cseq._memory import Descriptor, lift, section

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["anonymous_file", "lifted", "own_offsets", "receive", "send", "sparse_file"]


def anonymous_file(name: str) -> tuple[Descriptor, bool]:
    """Open an empty file without a name, which is gone once its last descriptor is closed.

    Return its descriptor, and whether the file can be sealed (`fcntl.F_ADD_SEALS`). ``/proc`` shows
    `name`. A sandbox, or a kernel with vm.memfd_noexec=2, may refuse a memfd.

    Raises
    ------
    OSError
        The file cannot be opened: there are too many descriptors, for example.
    """
    if hasattr(os, "memfd_create"):
        try:
            return Descriptor(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
        except OSError as error:
            if error.errno == errno.EMFILE:
                text = f"{error.strerror}: each worker takes four here; raise ulimit -n"
                raise OSError(error.errno, text) from error
    # Its import is slow, and hardly ever needed.
    import tempfile

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return Descriptor(os.dup, file.fileno()), False


def sparse_file(nbytes: int, name: str = "cseq") -> Descriptor:
    """Open a sparse file of `nbytes` zeros, which use no memory yet; ``/proc`` shows `name`.

    Its size is sealed, so that no process can truncate it under a mapping, which would be a SIGBUS.
    A sandbox may refuse the seals; no process of ours truncates files.

    Raises
    ------
    OSError
        The file system cannot have a file of that size.
    """
    if os.name == "nt":
        return Descriptor(section, nbytes)
    file, sealable = anonymous_file(name)
    try:
        os.ftruncate(file.fd, nbytes)
    except OSError as error:
        text = f"no sparse file of {nbytes:,} bytes for shared memory: {error.strerror}"
        raise OSError(error.errno, f"{text}; is the size of files limited (ulimit -f)?") from error
    if sealable:
        import fcntl

        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals)
    return file


def lifted(sock: socket.socket) -> socket.socket:
    """Return a new socket above the standard streams: this one, or a copy; then this is closed."""
    if os.name == "nt" or sock.fileno() > 2:
        return sock
    return socket.socket(fileno=lift(sock.detach()))


def own_offsets() -> None:
    """Give a forked process an offset of its own in each file that it only reads.

    Forked processes share offsets: where one seeks, the next one reads. On Linux, a file can be
    opened again under the same number, even if it has no name. Files that are written keep the
    common offset, so logs stay whole, and so does a file that cannot be opened again.
    """
    if not os.path.isdir("/proc/self/fd"):
        return
    import fcntl

    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            is_read = flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(fd).st_mode)
            if fd > 2 and is_read:
                again = os.open(f"/proc/self/fd/{fd}", flags)
                try:
                    os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
                    os.dup2(again, fd, os.get_inheritable(fd))
                finally:
                    os.close(again)


def send(sock: socket.socket, data: bytes, fds: Sequence[int], process: int | None = None) -> None:
    """Send bytes with descriptors, for `receive` at the other end.

    On Windows, `process` is the handle of the process at the other end, which gets handles of its
    own. ConnectionError if that process is gone.
    """
    if process is None:
        socket.send_fds(sock, [data], fds)
        return
    winapi: Any = importlib.import_module("_winapi")
    ours, same = winapi.GetCurrentProcess(), winapi.DUPLICATE_SAME_ACCESS
    try:
        theirs = [winapi.DuplicateHandle(ours, fd, process, 0, False, same) for fd in fds]  # noqa: FBT003
    except PermissionError as error:
        raise BrokenPipeError(error.errno, error.strerror) from error
    sock.sendall(data + array("i", [len(theirs), *theirs]).tobytes())


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive at most `size` bytes, and the at most `most` descriptors that come with them.

    Without bytes, the other end is closed.
    """
    # Windows has no recvmsg.
    if not hasattr(sock, "recvmsg"):
        data = receive_exactly(sock, size)
        [count] = array("i", receive_exactly(sock, 4)) or [0]
        return data, array("i", receive_exactly(sock, 4 * count)).tolist()
    # Not `socket.recv_fds`, which drops the flags (CPython 3.11).
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    fds = array("i")
    data, parts, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), flags)
    for level, kind, content in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    # On macOS, this is as soon as possible.
    if not hasattr(socket, "MSG_CMSG_CLOEXEC"):
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003 - its own way
    return data, [lift(fd) for fd in fds]


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or none if the other end is closed before."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
