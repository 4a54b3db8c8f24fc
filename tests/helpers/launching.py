"""Launchers with a worker that answers questions."""

import contextlib
import time

import pytest

from cseq.processes.launcher import make_launcher, start_methods

# Only a failing test waits this long.
PATIENCE = 60.0

# The workers' code, which evaluates what it is asked. Workers import it by name, so it is a file.
ENTRIES = """
import os, signal, socket, sys, threading

def answer(sock, local=None):
    import atexit, multiprocessing, subprocess
    while question := sock.recv(1 << 16):
        sock.sendall(repr(eval(question)).encode())

def talk(sock):
    while True:
        sock.sendall(b"blah" * 1000)

def ready(sock):
    streams = [os.fstat(fd) for fd in (0, 1, 2)]  # they are there, whatever the trainer closed
    sock.sendall(b"!" if sock.fileno() > 2 else b"?")
    sock.recv(1)
"""


@pytest.fixture(autouse=True)
def entries(tmp_path, monkeypatch):
    """Put the module of entries where workers find it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "entries.py").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture(params=start_methods())
def method(request):
    """Return each start method of this system."""
    return str(request.param)


@pytest.fixture
def make(method):
    """Return a function that makes a launcher of this method, closed after the test."""
    with closing() as make_any:
        yield lambda **options: make_any(method, **options)


@pytest.fixture
def served():
    """Return a function that makes a launcher with a fork server, closed after the test."""
    if "forkserver" not in start_methods():
        pytest.skip("this system has no fork server")
    with closing() as make_any:
        yield lambda **options: make_any("forkserver", **options)


@contextlib.contextmanager
def closing():
    """Close the launchers that are made."""
    made = []

    def make_any(method, entry="entries:answer", **options):
        made.append(make_launcher(method, entry=entry, **options))
        return made[-1]

    yield make_any
    closed = [one.close(time.monotonic() + PATIENCE) for one in made]
    assert all(closed), "something did not end"


def ask(child, question):
    """Make a worker evaluate an expression."""
    child.sock.settimeout(PATIENCE)
    child.sock.sendall(question.encode())
    answer = child.sock.recv(1 << 16).decode()
    assert answer, f"process {child.pid} has ended instead of answering {question!r}"
    return eval(answer)


def end_of(child):
    """Wait for a worker to end; return its exit code."""
    code = child.status(PATIENCE)
    assert child.gone
    return code


linux = pytest.mark.needs("Linux")
