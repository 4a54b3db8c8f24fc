"""Makes Linux look like macOS to every Python process that has this folder on its path.

Linux's own features are gone from the standard library, `/proc`, `/sys` and `/dev/shm` do not
exist, `select` has no epoll, and `sys.platform` is 'darwin'. `tests/c/darwin.h` does the same for
the core. `make check-darwin` runs the tests in this way.

It shows needless use of Linux. It cannot show what macOS does differently.
"""

import builtins
import errno
import importlib
import io
import os
import sys
import sysconfig
import types

GONE = {
    "os posix": """memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fallocate
        posix_fadvise eventfd pipe2 splice copy_file_range O_TMPFILE getrandom getxattr setxattr
        listxattr removexattr MFD_CLOEXEC MFD_ALLOW_SEALING P_PIDFD O_PATH waitid""",
    "socket _socket": "MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED",
    "signal _signal": "SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGCLD",
    "select": "epoll",
}
HIDDEN = ("/proc", "/sys", "/dev/shm")
LOOKING = ("listdir", "stat", "lstat", "open", "readlink", "scandir", "unlink", "access")


def hiding(function):
    """Return a function of a path that does not find what macOS lacks."""

    def found(path=".", *args, **options):
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if any(name == hidden or name.startswith(f"{hidden}/") for hidden in HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return function(path, *args, **options)

    return found


def change_everything():
    """Make the changes."""
    for modules, names in GONE.items():
        for module in modules.split():
            for name in names.split():
                vars(importlib.import_module(module)).pop(name, None)
    for name in LOOKING:
        real = getattr(os, name)
        seen = hiding(real)
        setattr(os, name, seen)
        for can in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if real in can:
                can.add(seen)
    builtins.open = io.open = hiding(io.open)
    # urllib imports this module on macOS.
    proxies = types.ModuleType("_scproxy")
    vars(proxies).update(_get_proxy_settings=dict, _get_proxies=dict)
    sys.modules["_scproxy"] = proxies
    # It searches for them once, by the platform.
    sysconfig.get_config_vars()
    sys.platform = "darwin"


change_everything()
