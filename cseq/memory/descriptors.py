"""Opens, sends and receives descriptors of files that processes share.

All of them are close-on-exec, because another thread may start a program at any time. On Windows,
they are section handles, which `send` duplicates.

Descriptor numbers are above 2, even if a process has closed its standard streams, as daemons do.
Otherwise, a C library might print to shared memory.
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
    """Open an empty anonymous file. Return it, and whether it can be sealed.

    ``/proc`` shows `name`. A sandbox may reject memfds, and kernels with vm.memfd_noexec=2 do.
    """
    if hasattr(os, "memfd_create"):
        try:
            return Descriptor(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
        except OSError as error:
            if error.errno == errno.EMFILE:
                text = f"{error.strerror}: each worker needs four descriptors; raise ulimit -n"
                raise OSError(error.errno, text) from error
    # This import is slow and rarely needed.
    import tempfile

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return Descriptor(os.dup, file.fileno()), False


def sparse_file(nbytes: int, name: str = "cseq") -> Descriptor:
    """Open a sparse file of `nbytes` zeros.

    The size is sealed, because truncating a mapped file would cause a SIGBUS. A sandbox may reject
    the seals, but cseq never truncates files. Raises OSError if the file system does not support
    this size.
    """
    if os.name == "nt":
        return Descriptor(section, nbytes)
    file, sealable = anonymous_file(name)
    try:
        os.ftruncate(file.fd, nbytes)
    except OSError as error:
        text = f"could not create {nbytes:,} bytes of shared memory: {error.strerror}"
        raise OSError(error.errno, f"{text}; check the file size limit (ulimit -f)") from error
    if sealable:
        import fcntl

        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals)
    return file


def lifted(sock: socket.socket) -> socket.socket:
    """Return `sock`, or a copy with a descriptor above 2."""
    if os.name == "nt" or sock.fileno() > 2:
        return sock
    return socket.socket(fileno=lift(sock.detach()))


def own_offsets() -> None:
    """Give a forked process its own file offsets by reopening its read-only files.

    Otherwise, a seek in one process would affect reads in another. Writable files keep sharing
    their offset, so that logs are not garbled.
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
    """Send bytes and descriptors to the other end of a socket.

    On Windows, `process` is a handle to the receiver. Raises ConnectionError if it is gone.
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
    """Receive up to `size` bytes with up to `most` descriptors.

    If no bytes are returned, the other end was closed.
    """
    # Windows has no recvmsg.
    if not hasattr(sock, "recvmsg"):
        data = receive_exactly(sock, size)
        [count] = array("i", receive_exactly(sock, 4)) or [0]
        return data, array("i", receive_exactly(sock, 4 * count)).tolist()
    # `socket.recv_fds` ignores the flags in CPython 3.11.
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    fds = array("i")
    data, parts, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), flags)
    for level, kind, content in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    # macOS lacks this flag, so set close-on-exec as early as possible.
    if not hasattr(socket, "MSG_CMSG_CLOEXEC"):
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003 - its signature
    return data, [lift(fd) for fd in fds]


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes, or none if the other end closes first."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
