"""What a launcher does on other systems."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from launching import PATIENCE, entries

from cseq.processes import launcher
from cseq.processes.launcher import make_launcher, processes, start_methods, waiting
from cseq.processes.launcher.waiting import hung_up

pytestmark = pytest.mark.needs("POSIX")


# --- choices that depend on the system -----------------------------------------------------------


@pytest.mark.parametrize(("flags", "ended"), [(0x8000, True), (0x8001, True), (1, False)])
def test_hung_up_by_kqueue(monkeypatch: pytest.MonkeyPatch, flags: int, ended: bool) -> None:
    """On macOS the end of a connection is an event's flag, which data before it do not hide."""
    asked = []

    class Queue:
        def control(self, events: list[Any], most: int, seconds: float) -> list[Any]:
            asked.append((*events, most, seconds))
            return [SimpleNamespace(flags=flags)]

        def close(self) -> None:
            asked.append("closed")

    fake = {"KQ_EV_ADD": 1, "KQ_EV_CLEAR": 32, "KQ_EV_EOF": 0x8000, "KQ_FILTER_READ": -1}
    system = SimpleNamespace(kqueue=Queue, kevent=lambda *event: event, **fake)
    monkeypatch.setattr("cseq.processes.launcher.waiting.select", system)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert hung_up(ours) is ended
        assert asked == [((ours.fileno(), -1, 33), 1, 0), "closed"]


def test_start_methods_of_other_systems() -> None:
    """A fork server where processes fork and send descriptors; on Windows, spawn alone."""
    assert start_methods("linux", ["fork", "send_fds"])[0] == "forkserver"
    assert start_methods("linux", ["fork"]) == ("spawn", "fork")
    assert start_methods("linux", []) == ("spawn",)
    assert start_methods("darwin", ["fork", "send_fds"]) == ("spawn", "forkserver", "fork")
    assert start_methods("win32", ["send_fds"]) == ("spawn",)


def test_an_unknown_method_is_an_error_that_names_the_known() -> None:
    """`make_launcher` raises ValueError with the value and the choices."""
    with pytest.raises(ValueError, match=r"'magic'.*'spawn'"):
        make_launcher("magic", entry="entries:answer")


def test_windows_hands_over_sockets_by_process_number() -> None:
    """There, a socket is shared with a process, which gets no Ctrl-C of the trainer's console."""
    assert processes.means_of("nt").shares
    assert processes.means_of("nt").flags & 0x200
    assert processes.means_of("posix") == (False, 0, {})


def test_a_socket_that_cannot_be_handed_over_is_the_end_of_the_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows shares no socket with a process that has failed to start: it ended, as any other."""

    class Socket:
        def share(self, pid: int) -> bytes:
            raise OSError("the process has ended")

    means = processes.means_of("posix")._replace(shares=True)
    monkeypatch.setattr(processes, "means_of", lambda _: means)
    start = processes.describe_start("worker", "entries:answer", number=0)
    assert processes.spawn(*cast("Any", (None, Socket())), start, "cseq-w0").status(60.0) == 0


def test_windows_workers_of_a_program_without_streams_write_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of pythonw; otherwise, they have the trainer's streams."""
    assert processes.means_of("nt").streams == {}
    monkeypatch.setattr(sys, "__stdout__", None)
    assert processes.means_of("nt").streams == {"stdout": subprocess.DEVNULL}


def test_windows_virtual_environments_start_the_real_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A venv's python.exe would start another process, whose number nobody knows."""
    monkeypatch.setattr(sys, "_base_executable", "C:/Python/python.exe", raising=False)
    monkeypatch.setattr(sys, "executable", "C:/venv/python.exe")
    monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
    executable, environment = processes.executable_of("nt")
    assert executable == "C:/Python/python.exe"
    assert environment is not None
    assert environment["__PYVENV_LAUNCHER__"] == "C:/venv/python.exe"


def test_a_frozen_program_is_not_started_as_if_it_were_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spawning needs an interpreter: a frozen application without one is an OSError."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(OSError, match="set_executable"):
        make_launcher("spawn", entry="entries:answer").launch(0)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-250, "was killed by signal 250"),
        (0xC0000005, "crashed: access violation (0xC0000005)"),
        (0xE0000001, "crashed: exception (0xE0000001)"),
        (0xFFFFFFFF, "exited with code -1"),
        (None, "ended (its exit code is not known)"),
    ],
)
def test_the_end_of_a_process_in_words(code: int | None, text: str) -> None:
    """`describe_exit` gives the words for a message."""
    assert launcher.describe_exit(code) == text
