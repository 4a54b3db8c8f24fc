"""The fork server, its death and its replacement."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import pids

from cseq.processes.launcher import server

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RunScript

    from cseq.processes.launcher import Launcher
from launching import PATIENCE, ask, end_of, entries, linux, make, method, served

pytestmark = pytest.mark.needs("POSIX")


# --- fork server ---------------------------------------------------------------------------------


def is_server(pid: int) -> bool:
    """Whether a process is a fork server that this one has started."""
    with contextlib.suppress(OSError):  # it is gone
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return int(parent) == os.getpid() and words.endswith(b"cseq-server\0")
    return False


def server_pid() -> int:
    """Find the fork server of this process."""
    (found,) = filter(is_server, pids())
    return found


def kill_server() -> int:
    """Kill the fork server, and wait until it is dead; the launcher reaps it."""
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@linux
def test_a_dead_fork_server_is_replaced(served: Callable[..., Launcher]) -> None:
    """Workers live on when their server is killed, and `launch` starts another server."""
    one = served()
    before = one.launch(0)
    ask(before, "0")
    old = kill_server()
    assert ask(before, "'alive'") == "alive"
    after = one.launch(1)
    assert ask(after, "'alive'") == "alive"
    assert server_pid() != old
    after.kill()
    assert end_of(after) == -signal.SIGKILL
    before.sock.close()
    after.sock.close()


@linux
@pytest.mark.parametrize("pidfds", [True, False])
def test_a_worker_whose_server_is_dead_can_be_killed_but_not_asked_how_it_ended(
    served: Callable[..., Launcher], entries: Path, *, pidfds: bool
) -> None:
    """Its `status` is None; `gone` says that it has ended: at once, or by its socket."""
    (entries / "no_pidfds.py").write_text(
        "import os\nfrom entries import answer\nif hasattr(os, 'pidfd_open'): del os.pidfd_open"
    )
    one = served(entry="entries:answer" if pidfds else "no_pidfds:answer")
    child = one.launch(0)
    ask(child, "0")
    kill_server()
    assert child.status(0) is None
    assert not child.gone
    if pidfds and hasattr(os, "pidfd_open"):
        child.kill()
    else:
        child.sock.shutdown(socket.SHUT_WR)
    assert child.sock.recv(1) == b""
    assert child.status(PATIENCE) is None
    assert child.gone
    assert child.ended.wait(0)
    assert child.code is None
    child.sock.close()


@linux
def test_a_server_killed_before_it_is_asked_is_replaced(served: Callable[..., Launcher]) -> None:
    """`prepare` starts the server; that it died meanwhile is not noticed by who launches."""
    one = served()
    one.prepare()
    kill_server()
    child = one.launch(0)
    assert ask(child, "3") == 3
    child.sock.close()


def test_a_server_that_cannot_start_is_an_error(
    served: Callable[..., Launcher], entries: Path
) -> None:
    """`launch` raises OSError with the server's exit code when it dies again and again."""
    (entries / "fatal.py").write_text("import os\nos._exit(23)")
    with pytest.raises(OSError, match="exited with code 23"):
        served(entry="fatal:answer").launch(0)


def test_a_server_that_does_not_get_ready_is_a_timeout(
    served: Callable[..., Launcher], entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`launch` raises TimeoutError; closing the launcher ends the server nevertheless."""
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served(entry="endless:answer")
    monkeypatch.setattr(server, "START", 0.01)
    with pytest.raises(TimeoutError, match="in time"):
        one.launch(0)
    assert one.close(time.monotonic())


def test_a_fork_that_fails_is_an_error(served: Callable[..., Launcher], entries: Path) -> None:
    """`launch` raises the OSError of the server's fork, and the server lives on."""
    (entries / "full.py").write_text(
        "import errno\nfrom cseq.processes.launcher import child\nfrom entries import answer\n"
        "fork = child.fork\n"
        "def fail():\n    child.fork = fork\n    raise OSError(errno.EAGAIN, 'full')\n"
        "child.fork = fail"
    )
    one = served(entry="full:answer")
    with pytest.raises(BlockingIOError, match="no worker process"):
        one.launch(0)
    child = one.launch(1)
    assert ask(child, "1") == 1
    child.sock.close()


@linux
def test_a_server_that_was_killed_does_not_blame_what_it_was_to_import(
    served: Callable[..., Launcher], entries: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one imports the module."""
    (entries / "innocent.py").write_text("import os\npid = os.getpid()")
    one = served()
    one.prepare()
    kill_server()
    one.preload(["innocent"])
    child = one.launch(0)
    assert ask(child, "sys.modules['innocent'].pid") == server_pid()
    assert not caplog.text
    child.sock.close()


def test_no_server_is_started_any_more_once_it_is_cancelled(
    served: Callable[..., Launcher], entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the one that imports something is ended: `preload` returns, `launch` raises."""
    starts: list[int] = []
    start = server.ForkServer.start

    def count(self: server.ForkServer, *args: Any) -> None:
        starts.append(1)
        start(self, *args)

    monkeypatch.setattr(server.ForkServer, "start", count)
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served()
    importing = threading.Thread(target=one.preload, args=(["endless"],))
    importing.start()
    while not one.importing:
        importing.join(0.001)
    one.cancel()
    importing.join(PATIENCE)
    assert not importing.is_alive()
    with pytest.raises(InterruptedError):
        one.launch(0)
    assert len(starts) == 1


@linux
def test_preloaded_modules_are_there_and_missing_ones_are_logged(
    served: Callable[..., Launcher], entries: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker finds what its server has imported; what cannot be imported is left out."""
    (entries / "useful.py").write_text("import os\npid = os.getpid()")
    one = served()
    one.preload(["useful", "no_such_module"])
    child = one.launch(0)
    assert ask(child, "sys.modules['useful'].pid") == server_pid()
    assert "no_such_module" in caplog.text
    child.sock.close()


def test_without_pidfds_workers_are_ended_and_reaped_too(
    make: Callable[..., Launcher], entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older systems have no pidfds: `kill`, `status` and `gone` work all the same."""
    (entries / "no_pidfds.py").write_text(
        "import os\nfrom entries import answer\nif hasattr(os, 'pidfd_open'): del os.pidfd_open"
    )
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    one = make(entry="no_pidfds:answer")
    child = one.launch(0)
    ask(child, "0")
    assert child.status(0.01) is None
    assert not child.gone
    child.kill()
    assert end_of(child) == -signal.SIGKILL
    child.sock.close()
    monkeypatch.undo()
