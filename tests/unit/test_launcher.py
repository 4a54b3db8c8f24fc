"""Worker processes start, answer, end and are reaped alike with every start method."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from checkout import import_path
from forking import in_child
from interrupting import first_hits, interrupted
from killing import await_death
from launching import PATIENCE, ask, end_of, entries, linux, make, method

from cseq.processes import launcher
from cseq.processes.launcher import forks

pytestmark = pytest.mark.needs("POSIX")


@pytest.fixture
def launch(make):
    """Return a function that launches a worker; its socket is closed after the test."""
    one = make()
    with contextlib.ExitStack() as stack:

        def launch_one(number=0):
            child = one.launch(number)
            child.sock.settimeout(PATIENCE)
            stack.callback(child.sock.close)
            return child

        yield launch_one


def test_what_a_worker_has_of_the_trainer(launch, monkeypatch):
    """They are ``sys.path``, ``sys.argv`` and the signal mask; garbage is collected."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "7"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = launch()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    blocked = ask(child, "[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]")
    assert set(blocked) == set(map(int, before))
    assert ask(child, "sys.argv") == ["train.py", "--epochs", "7"]
    assert ask(child, "sys.path") == sys.path
    # The collector was off during the imports.
    assert ask(child, "__import__('gc').isenabled()") is True


def test_the_current_folder_and_that_of_cseq(launch, tmp_path, monkeypatch):
    """No file in the current folder stands in for a module; cseq is always found."""
    for name in ("struct", "socket", "numpy", "cseq"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    assert ask(launch(), "os.getcwd()") == str(tmp_path)
    home = str(Path(launcher.__file__).parents[3])
    monkeypatch.setattr(sys, "path", [p for p in sys.path if os.path.abspath(p) != home])
    file = ask(launch(), "sys.modules['cseq.processes.launcher'].__file__")
    assert file == launcher.__file__


def test_a_working_directory_that_is_gone(launch, tmp_path, monkeypatch):
    """Workers start in a deleted folder, even if ``sys.path`` leads to it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    folder.rmdir()
    assert ask(launch(), "sys.path")[0] == ""


def test_standard_input_is_empty(launch):
    """A worker's standard input is at its end, for the descriptor and the object."""
    reader, writer = os.pipe()
    os.write(writer, b"typed for the trainer")
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        child = launch()
    finally:
        os.dup2(before, 0)
        for fd in (before, reader, writer):
            os.close(fd)
    assert ask(child, "os.read(0, 10)") == b""
    assert ask(child, "sys.stdin.read()") == ""
    assert ask(child, "os.path.samestat(os.fstat(0), os.stat(os.devnull))") is True


@linux
def test_the_trainers_descriptors_stay_with_the_trainer(launch):
    """A worker holds no socket of a worker launched earlier."""
    others = [launch(number) for number in range(3)]
    for other in others:
        ask(other, "0")
    child = launch(3)
    paths = [f"/proc/self/fd/{fd}" for fd in (0, 1, 2)]
    inherited = {os.readlink(path) for path in paths if os.path.islink(path)}
    links = (
        "[os.readlink('/proc/self/fd/%s' % fd) for fd in os.listdir('/proc/self/fd')"
        " if os.path.islink('/proc/self/fd/%s' % fd)]"
    )
    first, sockets = (
        [link for link in {*ask(each, links)} - inherited if link.startswith("socket:")]
        for each in (others[0], child)
    )
    assert len(sockets) == len(first) <= 2
    assert ask(child, "os.readlink('/proc/self/fd/%d' % sock.fileno())") in sockets


@pytest.mark.parametrize("sent", [b"", b"unread"])
def test_a_worker_that_finds_the_trainer_gone_is_silent(make, capfd, sent):
    """A broken pipe, or a connection reset, ends a worker normally when its socket is closed."""
    one = make(entry="entries:talk")
    child = one.launch(0)
    child.sock.sendall(sent)
    child.sock.close()
    assert end_of(child) == 0
    assert capfd.readouterr().err == ""


# What a worker does, its exit code, and what it prints.
ENDS = [
    ("1 / 0", 1, "ZeroDivisionError"),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    # A broken connection that is not to the trainer is an error like any other.
    ("socket.socket().connect(('127.0.0.1', 1))", 1, "ConnectionRefusedError"),
    ("sys.exit()", 0, ""),
    ("sys.exit(3)", 3, ""),
    ("sys.exit('out of paper')", 1, "out of paper"),
    ("os._exit(77)", 77, ""),
    ("os.kill(os.getpid(), signal.SIGALRM)", -14, ""),
]


def test_exit_codes(launch, capfd, method):
    """`status` is the exit code, or minus the signal's number; the socket ends."""
    # Spawned workers cost most and are reaped like forked ones, so three ways are enough there.
    for number, (question, code, told) in enumerate(ENDS[: 3 if method == "spawn" else None]):
        child = launch(number)
        ask(child, "0")
        child.sock.sendall(question.encode())
        assert child.sock.recv(1) == b"", question
        assert end_of(child) == code, question
        printed = capfd.readouterr().err
        assert told in printed
        assert bool(told) == bool(printed)


def test_nobody_is_killed_in_place_of_a_worker_that_is_gone(launch, monkeypatch):
    """`kill` does nothing once the process is gone, since its number may be another one's."""
    child, shot = launch(), []
    child.kill()
    end_of(child)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *args: shot.append(args))
        child.kill()
    assert not shot
    assert child.status(0) == -signal.SIGKILL


def test_closing_ends_what_is_left(make):
    """`close` kills and reaps the remaining workers, and may be called again."""
    one = make()
    workers = [one.launch(number) for number in range(3)]
    for child in workers:
        ask(child, "0")
    assert one.close(time.monotonic() + PATIENCE)
    assert one.close(time.monotonic())
    for child in workers:
        assert child.status(0) == -signal.SIGKILL
        child.sock.close()


@linux
def test_many_launches_leave_nothing_behind(make, method):
    """After many launches there is no new descriptor, and no zombie."""
    one = make(entry="entries:ready")

    def come_and_go(number):
        child = one.launch(number)
        child.sock.close()
        end_of(child)

    come_and_go(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(3 if method == "spawn" else 20):
        come_and_go(number)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with contextlib.suppress(ChildProcessError):
        assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def test_what_a_worker_has_registered_to_run_at_its_end_runs(launch, tmp_path):
    """A worker's own ``atexit`` functions run, even if one of its threads does not end."""
    child, mark = launch(), tmp_path / "mark"
    ask(child, f"atexit.register(open, {str(mark)!r}, 'w') and 0")
    ask(child, "threading.Thread(target=signal.pause).start() or 0")
    child.sock.shutdown(socket.SHUT_WR)
    assert end_of(child) == 0
    assert mark.exists()


def test_what_a_worker_forks_can_be_terminated(launch):
    """A process that a worker forks has the default handlers of the shielded signals."""
    child = launch()
    fork = (
        "[pipe := os.pipe(), pid := os.fork() or [os.write(pipe[1], repr((signal.getsignal("
        "signal.SIGTERM), signal.getsignal(signal.SIGINT))).encode()), os._exit(0)],"
        " os.read(pipe[0], 999).decode(), os.waitpid(pid, 0)][2]"
    )
    handlers = ask(child, fork)
    assert "SIG_DFL" in handlers
    assert "default_int_handler" in handlers


def test_the_end_of_a_worker_is_seen_though_a_process_it_forked_lives(launch):
    """A process that a worker forks does not hold the worker's socket open."""
    child = launch()
    fork = "[pipe := os.pipe(), pid := os.fork() or [os.close(pipe[1]), os.read(pipe[0], 1)]][1]"
    grandchild = ask(child, fork)
    child.kill()
    assert child.sock.recv(1) == b""
    assert end_of(child) == -signal.SIGKILL
    await_death(grandchild)


@linux
def test_what_a_worker_has_started_is_killed_with_it(launch):
    """Its children and their children are killed; a signal reaches the worker only."""
    child = launch()
    fork = (
        "[pipe := os.pipe(), pid := os.fork() or [own := os.fork() or [os.close(pipe[1]), "
        "signal.pause()], os.write(pipe[1], b'%d' % own), signal.pause()],"
        " int(os.read(pipe[0], 99))][1:]"
    )
    started = ask(child, fork)
    child.send_signal(signal.SIGUSR1)
    assert ask(child, "'alive'") == "alive"
    child.kill()
    assert end_of(child) == -signal.SIGKILL
    for pid in started:
        await_death(pid)


def test_a_process_that_the_user_forks_does_not_end_the_trainers_workers(launch):
    """In a forked process, `kill` does nothing."""
    child = launch()
    ask(child, "0")
    assert in_child(lambda: child.kill() is None)
    assert ask(child, "'alive'") == "alive"


STORM = """
import os, signal, sys, threading, time
from cseq.processes.launcher import make_launcher

os.setpgid(0, 0)
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
over = threading.Event()

def storm():
    while not over.wait(0.001):
        os.killpg(0, signal.SIGINT)
        os.killpg(0, signal.SIGTERM)

thread = threading.Thread(target=storm)
thread.start()
launcher = make_launcher(sys.argv[1], entry="entries:ready")
children = [launcher.launch(number) for number in range(4)]
answers = [child.sock.recv(1) for child in children]
over.set()
thread.join()
for child in children:
    child.sock.close()
codes = [child.status(60) for child in children]
print(answers, codes, launcher.close(time.monotonic() + 60), len(heard) > 0)
"""


def test_ctrl_c_while_workers_start_does_nothing_to_them(run_script, entries, method):
    """Signals to the process group, even from before the launch, stop nothing and print nothing."""
    done = run_script(STORM, method, PYTHONPATH=python_path(entries))
    assert done.stderr == ""
    assert done.stdout == f"{[b'!'] * 4} {[0] * 4} True True\n"


def python_path(folder):
    """Return a PYTHONPATH with a folder and the tested cseq."""
    return os.pathsep.join([str(folder), import_path()])


@pytest.mark.needs("fork")
class TestFork:
    """Properties of a mere copy of the trainer."""

    @pytest.fixture
    def method(self):
        return "fork"

    def test_an_object_is_handed_over_as_it_is(self, make):
        """`local` reaches the worker without being pickled."""
        one, lock = make(), threading.Lock()
        one.local = lock
        child = one.launch(0)
        assert ask(child, "local.acquire()") is True
        assert not lock.locked()
        child.sock.close()

    def test_the_trainers_handlers_stay_in_the_trainer(self, launch, tmp_path):
        """Neither the trainer's signal handlers nor its ``atexit`` functions run in a worker."""
        import atexit

        mark = tmp_path / "mark"
        old = signal.signal(signal.SIGALRM, lambda *_: mark.touch())
        atexit.register(mark.touch)
        try:
            child = launch()
            assert ask(child, "signal.getsignal(signal.SIGALRM) == signal.SIG_DFL") is True
            child.sock.shutdown(socket.SHUT_WR)
            assert end_of(child) == 0
        finally:
            atexit.unregister(mark.touch)
            signal.signal(signal.SIGALRM, old)
        assert not mark.exists()

    def test_a_fork_leaves_filters_and_output_alone(self, run_anew, entries):
        """`os.fork`'s warning about threads is suppressed; buffered output is printed once."""
        done = run_anew(FILTERS, PYTHONPATH=python_path(entries), PYTHONUNBUFFERED="")
        assert (done.stdout, done.stderr) == ("buffered True True [] [0, 0]\n", "")

    def test_ctrl_c_while_the_user_forks(self, monkeypatch):
        """Wherever a handler raises before or after a fork, workers can still be started."""
        unraisable = []
        monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

        def fork(countdown):
            with interrupted(countdown, "processes/launcher/") as struck:
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
            os.waitpid(pid, 0)
            made = []
            making = threading.Thread(target=lambda: made.append(forks.pair()), daemon=True)
            making.start()
            making.join(PATIENCE)
            # Without this, that thread would wait forever.
            for sock in made.pop():
                sock.close()
            return struck.is_set()

        first_hits(fork)
        assert not unraisable


FILTERS = """
import os, sys, threading, warnings
from cseq.processes.launcher import make_launcher

sys.stdout.write("buffered ")
seen, events, children = [], [], []
os.register_at_fork(before=lambda: seen.append(warnings.filters))
sys.addaudithook(lambda event, _: events.append(event) if event == "os.fork" else None)
launcher = make_launcher("fork", entry="entries:ready")

def launch():
    for number in range(2):
        children.append(launcher.launch(number))
        children[-1].sock.recv(1)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ours = warnings.filters
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
for child in children:
    child.sock.close()
codes = [child.status(60) for child in children]
print(len(seen) == len(events) == 2, all(them is ours for them in seen), caught, codes)
"""
