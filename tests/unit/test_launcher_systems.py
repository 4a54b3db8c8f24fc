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
from cseq.processes.launcher import make_launcher, start_methods

pytestmark = pytest.mark.needs("POSIX")


# --- choices that depend on the system -----------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "lacks", "methods"),
    [
        ("linux", [], ("forkserver", "spawn", "fork")),
        ("linux", ["send_fds"], ("spawn", "fork")),
        ("linux", ["fork", "send_fds"], ("spawn",)),
        ("darwin", [], ("spawn", "forkserver", "fork")),
        ("win32", ["fork"], ("spawn",)),
    ],
)
def test_start_methods_of_other_systems(
    monkeypatch: pytest.MonkeyPatch, platform: str, lacks: list[str], methods: tuple[str, ...]
) -> None:
    """A fork server where processes fork and send descriptors; on Windows, spawn alone."""
    monkeypatch.setattr(sys, "platform", platform)
    for name in lacks:
        monkeypatch.delattr(os if name == "fork" else socket, name)
    assert start_methods() == methods


def test_an_unknown_method_is_an_error_that_names_the_known() -> None:
    """`make_launcher` raises ValueError with the value and the choices."""
    with pytest.raises(ValueError, match=r"'magic'.*'spawn'"):
        make_launcher("magic", entry="entries:answer")


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
