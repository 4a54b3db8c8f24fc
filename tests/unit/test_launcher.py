"""Worker processes start, answer, end and are reaped alike under every start method."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from conftest import pids
from interrupting import first_hits, interrupted
from killing import await_death

from cseq import launcher
from cseq.launcher import forks, make_launcher, processes, server, start_methods, waiting
from cseq.launcher.waiting import hung_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunScript

    from cseq.launcher import Child, Launcher

PATIENCE = 60.0  # seconds: only a test that fails waits so long

pytestmark = pytest.mark.needs("POSIX")

# What workers run: they evaluate what they are asked. It is a file, as they import it by name.
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
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the module of entries where workers find it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "entries.py").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture(params=start_methods())
def method(request: pytest.FixtureRequest) -> str:
    """Each start method of this system."""
    return str(request.param)


@pytest.fixture
def make(method: str) -> Iterator[Callable[..., Launcher]]:
    """Return a function that makes a launcher of this method, closed after the test."""
    with closing() as make_any:
        yield lambda **options: make_any(method, **options)


@pytest.fixture
def served() -> Iterator[Callable[..., Launcher]]:
    """Return a function that makes a launcher with a fork server, closed after the test."""
    if "forkserver" not in start_methods():
        pytest.skip("this system has no fork server")
    with closing() as make_any:
        yield lambda **options: make_any("forkserver", **options)


@contextlib.contextmanager
def closing() -> Iterator[Callable[..., Launcher]]:
    """Close whatever launchers are made."""
    made = []

    def make_any(method: str, entry: str = "entries:answer", **options: Any) -> Launcher:
        made.append(make_launcher(method, entry=entry, **options))
        return made[-1]

    yield make_any
    closed = [one.close(time.monotonic() + PATIENCE) for one in made]
    assert all(closed), "something did not end"


@pytest.fixture
def launch(make: Callable[..., Launcher]) -> Iterator[Callable[..., Child]]:
    """Return a function that launches a worker, whose socket is closed after the test."""
    one = make()
    with contextlib.ExitStack() as stack:

        def launch_one(number: int = 0, **options: Any) -> Child:
            child = one.launch(number, **options)
            child.sock.settimeout(PATIENCE)
            stack.callback(child.sock.close)
            return child

        yield launch_one


def ask(child: Child, question: str) -> Any:
    """Have a worker evaluate an expression."""
    child.sock.settimeout(PATIENCE)
    child.sock.sendall(question.encode())
    answer = child.sock.recv(1 << 16).decode()
    assert answer, f"process {child.pid} has ended instead of answering {question!r}"
    return eval(answer)


def end_of(child: Child) -> int | None:
    """Wait for a worker to end; return its exit code."""
    code = child.status(PATIENCE)
    assert child.gone
    return code


def children() -> set[int]:
    """Process numbers of this process's children, the dead among them."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


linux = pytest.mark.needs("Linux")


# --- living --------------------------------------------------------------------------------------


def test_a_worker_is_a_process_of_its_own_at_the_other_end_of_its_socket(
    launch: Callable[..., Child],
) -> None:
    """`launch` returns a child whose pid is the process that answers on its socket."""
    child = launch(3)
    assert ask(child, "os.getpid()") == child.pid != os.getpid()
    assert not child.gone


def test_a_living_worker_has_no_status(launch: Callable[..., Child]) -> None:
    """`status` is None, and `gone` False, while the process lives."""
    child = launch()
    assert child.status(0) is None
    assert child.status(0.01) is None
    assert not child.gone
    assert ask(child, "1 + 1") == 2


def test_many_at_once(make: Callable[..., Launcher]) -> None:
    """Many workers start before the first of them is heard, and all of them live."""
    one = make(entry="entries:ready")
    many = 6 if one.method == "spawn" else 20
    workers = [one.launch(number) for number in range(many)]
    for child in workers:
        child.sock.settimeout(PATIENCE)
        assert child.sock.recv(1) == b"!"
    assert len({child.pid for child in workers}) == many
    for child in workers:
        child.sock.close()
    assert [end_of(child) for child in workers] == [0] * many


def test_a_worker_outlives_the_thread_that_launched_it(launch: Callable[..., Child]) -> None:
    """Any thread may launch; the worker does not end with it."""
    launched: list[Child] = []
    thread = threading.Thread(target=lambda: launched.append(launch()))
    thread.start()
    thread.join()
    assert ask(launched[0], "threading.current_thread() is threading.main_thread()") is True


def test_a_worker_has_the_trainers_paths_and_arguments(
    launch: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sys.path`` and ``sys.argv`` are those of the trainer when it launched the worker."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "7"])
    child = launch()
    assert ask(child, "sys.argv") == ["train.py", "--epochs", "7"]
    assert ask(child, "sys.path") == sys.path


def test_no_file_in_the_current_folder_stands_in_for_a_module(
    make: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not on the trainer's path is not on a worker's, the current one neither."""
    for name in ("struct", "socket", "numpy", "cseq"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    child = make().launch(0)
    assert ask(child, "os.getcwd()") == str(tmp_path)
    child.sock.close()


def test_cseq_is_found_when_its_folder_has_left_the_path(
    make: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run the very cseq of the trainer, also when ``sys.path`` no longer leads to it."""
    home = str(Path(launcher.__file__).parents[2])
    monkeypatch.setattr(sys, "path", [p for p in sys.path if os.path.abspath(p) != home])
    child = make().launch(0)
    assert ask(child, "sys.modules['cseq.launcher'].__file__") == launcher.__file__
    child.sock.close()


def test_a_working_directory_that_is_gone(
    make: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers start where it was deleted, also if ``sys.path`` leads to it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    folder.rmdir()
    child = make().launch(0)
    assert ask(child, "sys.path")[0] == ""
    child.sock.close()


def test_standard_input_is_empty(launch: Callable[..., Child]) -> None:
    """A worker reads end of file from its standard input, by descriptor and by object."""
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


@pytest.mark.parametrize("method", [m for m in start_methods() if m != "fork"], indirect=True)
def test_main_is_empty(launch: Callable[..., Child]) -> None:
    """``__main__`` of a worker has no names of its own, and no file."""
    child = launch()
    names = ask(child, "[name for name in dir(sys.modules['__main__'])]")
    assert [name for name in names if not name.startswith("__")] == []
    assert "__file__" not in names


def test_workers_collect_garbage(launch: Callable[..., Child]) -> None:
    """A worker's garbage collector is on, though it was off while the imports were made."""
    assert ask(launch(), "__import__('gc').isenabled()") is True


def test_signals_are_not_blocked(launch: Callable[..., Child]) -> None:
    """A worker's signal mask is that of the trainer, whose own is as before the launch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = launch()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert ask(child, "{int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())}") == set(
        map(int, before)
    )


@linux
def test_the_process_list_shows_who_is_who(launch: Callable[..., Child]) -> None:
    """The system knows a worker by the name 'cseq-w' and its number."""
    child = launch(11)
    ask(child, "0")
    assert Path(f"/proc/{child.pid}/comm").read_text() == "cseq-w11\n"


def test_a_worker_may_start_processes_of_its_own(launch: Callable[..., Child]) -> None:
    """Workers are not daemons in the sense of multiprocessing; programs run in them as usual."""
    child = launch()
    assert ask(child, "multiprocessing.current_process().daemon") is False
    run = "subprocess.run([sys.executable, '-c', 'print(6 * 7)'], stdout=-1).stdout.split()"
    assert ask(child, run) == [b"42"]


@linux
def test_the_trainers_descriptors_stay_with_the_trainer(make: Callable[..., Launcher]) -> None:
    """A worker holds no socket but its own, whoever else was launched before it."""
    one = make()
    others = [one.launch(number) for number in range(3)]
    for other in others:
        ask(other, "0")
    child = one.launch(3)
    links = (
        "[os.readlink('/proc/self/fd/%s' % fd) for fd in os.listdir('/proc/self/fd')"
        " if os.path.islink('/proc/self/fd/%s' % fd)]"
    )
    sockets = {link for link in ask(child, links) if link.startswith("socket:")}
    mine = ask(child, "os.readlink('/proc/self/fd/%d' % sock.fileno())")
    inherited = {os.readlink(f"/proc/self/fd/{fd}") for fd in standard_streams()}
    assert sockets - inherited == {mine}
    for each in (*others, child):
        each.sock.close()


def standard_streams() -> list[int]:
    """Descriptors that every process inherits."""
    return [fd for fd in (0, 1, 2) if os.path.islink(f"/proc/self/fd/{fd}")]


# --- ending --------------------------------------------------------------------------------------


def test_a_worker_ends_when_the_trainer_closes_its_socket(launch: Callable[..., Child]) -> None:
    """End of file lets the entry return, and None stands for exit code 0."""
    child = launch()
    ask(child, "0")
    child.sock.shutdown(socket.SHUT_WR)
    assert end_of(child) == 0
    assert child.status(0) == 0


def test_the_end_of_a_worker_is_there_for_other_threads_to_see(
    launch: Callable[..., Child],
) -> None:
    """`ended` is set, and `code` there, once any thread has found the end; not before."""
    child = launch()
    ask(child, "0")
    assert not child.ended.wait(0)
    watching = threading.Thread(target=child.status, args=(PATIENCE,))
    watching.start()
    assert not child.ended.wait(0.01)
    child.kill()
    assert child.ended.wait(PATIENCE)
    assert child.code == -signal.SIGKILL
    watching.join()


@pytest.mark.parametrize("sent", [b"", b"unread"])
def test_a_worker_that_finds_the_trainer_gone_is_silent(
    make: Callable[..., Launcher], capfd: pytest.CaptureFixture[str], sent: bytes
) -> None:
    """Broken pipe and connection reset end a worker, in order, when its socket is closed."""
    one = make(entry="entries:talk")
    child = one.launch(0)
    child.sock.sendall(sent)
    child.sock.close()
    assert end_of(child) == 0
    assert capfd.readouterr().err == ""


def test_another_broken_connection_is_reported(
    launch: Callable[..., Child], capfd: pytest.CaptureFixture[str]
) -> None:
    """An error of a connection of the worker's own is an error like any other."""
    child = launch()
    child.sock.sendall(b"socket.socket().connect(('127.0.0.1', 1))")
    assert end_of(child) == 1
    assert "ConnectionRefusedError" in capfd.readouterr().err


CODES = {
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit('out of paper')": 1,
    "1 / 0": 1,
    "os._exit(77)": 77,
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
    "os.kill(os.getpid(), signal.SIGALRM)": -14,
}


def test_exit_codes(
    launch: Callable[..., Child], capfd: pytest.CaptureFixture[str], method: str
) -> None:
    """`status` is the exit code, or minus the number of the signal; the socket reaches its end.

    Spawned workers are reaped as forked ones are, and cost most: two ways to end are enough there.
    """
    for number, (question, code) in enumerate(CODES.items()):
        if method == "spawn" and question not in ("1 / 0", "os.kill(os.getpid(), signal.SIGKILL)"):
            continue
        child = launch(number)
        ask(child, "0")
        child.sock.sendall(question.encode())
        assert child.sock.recv(1) == b"", question
        assert end_of(child) == code, question
        printed = capfd.readouterr().err
        assert ("out of paper" in printed) == ("paper" in question)
        assert ("ZeroDivisionError" in printed) == (question == "1 / 0")


def test_kill(launch: Callable[..., Child]) -> None:
    """A killed worker's socket reaches its end, and its status is minus SIGKILL."""
    child = launch()
    child.kill()
    assert child.sock.recv(1) == b""
    assert end_of(child) == -signal.SIGKILL


def test_a_signal_reaches_the_worker_alone(launch: Callable[..., Child]) -> None:
    """`send_signal` sends any signal to this process."""
    child, other = launch(0), launch(1)
    ask(child, "[signal.signal(signal.SIGALRM, lambda *_: sys.exit(9)), 0][1]")
    child.send_signal(signal.SIGALRM)
    assert end_of(child) == 9
    assert ask(other, "2") == 2


def test_nobody_is_killed_in_place_of_a_worker_that_is_gone(
    launch: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill` does nothing once the process is gone: its number may be another one's by now."""
    child = launch()
    child.kill()
    end_of(child)

    def shoot(*args: object) -> None:
        raise AssertionError(f"a signal was sent: {args}")

    monkeypatch.setattr(os, "kill", shoot)
    monkeypatch.setattr(signal, "pidfd_send_signal", shoot, raising=False)
    child.kill()
    assert child.status(0) == -signal.SIGKILL


def test_who_waits_for_a_worker_does_not_hold_up_others(make: Callable[..., Launcher]) -> None:
    """While threads wait for workers to end, others are launched, answer and are killed."""
    one = make()
    workers = [one.launch(number) for number in range(4)]
    codes: dict[int, int | None] = {}

    def wait(child: Child) -> None:
        codes[child.pid] = child.status(PATIENCE)

    threads = [threading.Thread(target=wait, args=(child,)) for child in workers]
    for thread in threads:
        thread.start()
    late = one.launch(4)
    assert ask(late, "5") == 5
    for child in workers[::-1]:
        child.kill()
    for thread in threads:
        thread.join(PATIENCE)
    assert codes == {child.pid: -signal.SIGKILL for child in workers}
    for child in (*workers, late):
        child.sock.close()


def test_closing_ends_what_is_left(make: Callable[..., Launcher]) -> None:
    """`close` kills and reaps workers that nobody has ended; closing again is fine."""
    one = make()
    workers = [one.launch(number) for number in range(3)]
    for child in workers:
        ask(child, "0")
    assert one.close(time.monotonic() + PATIENCE)
    assert [child.status(0) for child in workers] == [-signal.SIGKILL] * 3
    assert one.close(time.monotonic())
    for child in workers:
        child.sock.close()


def test_ctrl_c_while_a_launcher_is_closed(method: str) -> None:
    """Wherever a handler raises in `close`, calling it again ends everything, and says so.

    The supervisor's thread closes its launcher; if it has failed, the user's thread does.
    """

    def close_interrupted(countdown: int) -> bool:
        with closing() as make_any:
            one = make_any(method)
            child = one.launch(0)
            with interrupted(countdown, "launcher/", "threads.py") as struck:
                one.close(time.monotonic() + PATIENCE)
            assert one.close(time.monotonic() + PATIENCE)
            assert child.ended.wait(0)
            assert child.code == -signal.SIGKILL
            child.sock.close()
        return struck.is_set()

    # What the methods have in common is in `apart`; a worker is forked from the trainer soonest.
    assert first_hits(close_interrupted, 1 if method == "fork" else 5) > 3


def test_a_launcher_is_closed_where_there_can_be_no_more_threads(
    make: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread does then what it would have another one do."""
    one = make()
    child = one.launch(0)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert one.close(time.monotonic() + PATIENCE)
    assert child.code == -signal.SIGKILL
    child.sock.close()


@linux
def test_a_launcher_that_launched_nothing_has_nothing_to_close(method: str) -> None:
    """Making a launcher starts nothing."""
    before = children()
    one = make_launcher(method, entry="entries:answer")
    assert children() == before
    assert one.close(time.monotonic())


@linux
def test_many_launches_leave_nothing_behind(make: Callable[..., Launcher]) -> None:
    """After many workers have come and gone there is no new descriptor, and no zombie."""
    one = make(entry="entries:ready")

    def come_and_go(number: int) -> None:
        child = one.launch(number)
        child.sock.close()
        end_of(child)

    come_and_go(0)
    descriptors, processes = len(os.listdir("/proc/self/fd")), children()
    for number in range(3 if one.method == "spawn" else 20):
        come_and_go(number)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children() == processes


def test_what_a_worker_has_registered_to_run_at_its_end_runs(
    launch: Callable[..., Child], tmp_path: Path
) -> None:
    """A worker's own ``atexit`` functions run, though a thread of it does not end."""
    child, mark = launch(), tmp_path / "mark"
    ask(child, f"atexit.register(open, {str(mark)!r}, 'w') and 0")
    ask(child, "threading.Thread(target=signal.pause).start() or 0")
    child.sock.shutdown(socket.SHUT_WR)
    assert end_of(child) == 0
    assert mark.exists()


# --- signals and the user's own processes --------------------------------------------------------


def test_signals_for_the_trainer_do_nothing_to_workers(launch: Callable[..., Child]) -> None:
    """A worker lives through the signals that a terminal or a job scheduler sends to all."""
    child = launch()
    ask(child, "0")
    for number in launcher.SHIELDED:
        for _ in range(3):
            child.send_signal(number)
            assert ask(child, "'alive'") == "alive", number


def test_what_a_worker_starts_can_be_terminated(launch: Callable[..., Child]) -> None:
    """The shield is not inherited: SIGTERM ends a program that a worker executes."""
    child = launch()
    start = "[p := subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1),"
    end = " p.terminate(), p.wait(), p.stdin.close()][2]"
    assert ask(child, start + end) == -signal.SIGTERM


def test_what_a_worker_forks_can_be_terminated(launch: Callable[..., Child]) -> None:
    """A process that a worker forks has the usual handlers of the shielded signals."""
    child = launch()
    fork = (
        "[pipe := os.pipe(), pid := os.fork() or [os.write(pipe[1], repr((signal.getsignal("
        "signal.SIGTERM), signal.getsignal(signal.SIGINT))).encode()), os._exit(0)],"
        " os.read(pipe[0], 999).decode(), os.waitpid(pid, 0)][2]"
    )
    handlers = ask(child, fork)
    assert "SIG_DFL" in handlers
    assert "default_int_handler" in handlers


def test_the_end_of_a_worker_is_seen_though_a_process_it_forked_lives(
    launch: Callable[..., Child],
) -> None:
    """A process that a worker forks does not hold the worker's socket open."""
    child = launch()
    fork = "[pipe := os.pipe(), pid := os.fork() or [os.close(pipe[1]), os.read(pipe[0], 1)]][1]"
    grandchild = ask(child, fork)
    child.kill()
    assert child.sock.recv(1) == b""
    assert end_of(child) == -signal.SIGKILL
    await_death(grandchild)  # the pipe of the dead worker has ended


def test_the_trainers_death_is_seen_though_a_process_it_forked_lives(
    launch: Callable[..., Child],
) -> None:
    """A process that the user forks off the trainer does not hold workers' sockets open."""
    child = launch()
    ask(child, "0")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test is over
        os._exit(0)
    child.sock.close()
    assert end_of(child) == 0
    os.close(writer)
    os.close(reader)
    os.waitpid(pid, 0)


def test_a_process_that_the_user_forks_does_not_end_the_trainers_workers(
    make: Callable[..., Launcher],
) -> None:
    """In a forked process `close` and `kill` do nothing, and `launch` is an OSError."""
    one = make()
    child = one.launch(0)
    ask(child, "0")
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            child.kill()
            done = one.close(time.monotonic())
            try:
                one.launch(1)
            except OSError:
                code = 0 if done and child.status(0) is None else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ask(child, "'alive'") == "alive"
    child.sock.close()


STORM = """
import os, signal, sys, threading
from cseq.launcher import make_launcher
import time

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


def test_ctrl_c_while_workers_start_does_nothing_to_them(
    run_script: RunScript, entries: Path, method: str
) -> None:
    """Signals to the whole process group, from before the launch on, stop and print nothing."""
    done = run_script(STORM, method, PYTHONPATH=python_path(entries))
    assert done.stderr == ""
    assert done.stdout == f"{[b'!'] * 4} {[0] * 4} True True\n"


def python_path(folder: Path) -> str:
    """PYTHONPATH with a folder, and this very cseq."""
    return os.pathsep.join([str(folder), str(Path(launcher.__file__).parents[2])])


SCRIPT = """
import sys, time
from cseq.launcher import make_launcher

print("the script runs")
launcher = make_launcher(sys.argv[1], entry="entries:ready")
children = [launcher.launch(number) for number in range(2)]
print([child.sock.recv(1) for child in children])
for child in children:
    child.sock.close()
print([child.status(60) for child in children], launcher.close(time.monotonic() + 60))
"""


def test_workers_do_not_run_the_users_script(
    run_script: RunScript, entries: Path, method: str
) -> None:
    """No ``if __name__ == '__main__'`` is needed: the script runs once."""
    done = run_script(SCRIPT, method, PYTHONPATH=python_path(entries))
    assert done.stdout.splitlines() == ["the script runs", "[b'!', b'!']", "[0, 0] True"]
    assert done.stderr == ""


def test_a_trainer_without_standard_streams_launches(
    run_script: RunScript, entries: Path, method: str, tmp_path: Path
) -> None:
    """Nothing is handed to a worker in the place of a stream that the trainer has closed."""
    source = f"import os\nos.close(0); os.close(2)\n{SCRIPT}\nopen('done', 'w').close()"
    done = run_script(source, method, PYTHONPATH=python_path(entries))
    assert done.stdout.splitlines() == ["the script runs", "[b'!', b'!']", "[0, 0] True"]
    assert (tmp_path / "done").exists()


VICTIM = """
import os, signal, sys
from cseq.launcher import make_launcher

launcher = make_launcher(sys.argv[1], entry="entries:ready")
children = [launcher.launch(number) for number in range(2)]
answers = [child.sock.recv(1) for child in children]
children = [child.pid for child in children]
with open(f"/proc/{children[0]}/stat") as file:
    parent = int(file.read().rpartition(")")[2].split()[1])
with open("pids", "w") as file:
    print(*children, *{parent} - {os.getpid()}, file=file)
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_nothing_outlives_a_killed_trainer(
    run_script: RunScript, entries: Path, method: str, tmp_path: Path
) -> None:
    """Server and workers end when the trainer is killed."""
    done = run_script(VICTIM, method, PYTHONPATH=python_path(entries))
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""
    for pid in (tmp_path / "pids").read_text().split():
        await_death(int(pid))


# --- fork ----------------------------------------------------------------------------------------


@pytest.mark.needs("fork")
class TestFork:
    """What only a copy of the trainer has."""

    @pytest.fixture
    def method(self) -> str:
        """Just this one."""
        return "fork"

    def test_an_object_is_handed_over_as_it_is(self, launch: Callable[..., Child]) -> None:
        """`local` reaches the worker without being pickled."""
        lock = threading.Lock()
        child = launch(local={"lock": lock, "answer": 42})
        assert ask(child, "local['answer']") == 42
        assert ask(child, "local['lock'].acquire()") is True
        assert not lock.locked()

    def test_the_trainers_handlers_stay_in_the_trainer(
        self, launch: Callable[..., Child], tmp_path: Path
    ) -> None:
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

    def test_what_the_trainer_has_printed_is_printed_once(
        self, run_script: RunScript, entries: Path
    ) -> None:
        """Text that waits in the trainer's buffers is not printed by its copies too."""
        source = "import sys\nsys.stdout.write('buffered')\n" + SCRIPT
        path = python_path(entries)
        done = run_script(source, "fork", PYTHONPATH=path, PYTHONUNBUFFERED="")
        assert done.stdout.count("buffered") == 1

    def test_a_fork_leaves_the_filters_of_warnings_alone(
        self, run_script: RunScript, entries: Path
    ) -> None:
        """That the process has threads, of which `os.fork` warns, is known; audits see the fork."""
        done = run_script(FILTERS, PYTHONPATH=python_path(entries))
        assert (done.stdout, done.stderr) == ("True True [] [0, 0]\n", "")

    def test_ctrl_c_while_the_user_forks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wherever a handler raises before or after a fork, workers can still be started."""
        unraisable: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

        def fork(countdown: int) -> bool:
            with interrupted(countdown, "launcher/") as struck:
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
            os.waitpid(pid, 0)
            made: list[tuple[socket.socket, ...]] = []
            making = threading.Thread(target=lambda: made.append(forks.pair()), daemon=True)
            making.start()
            making.join(PATIENCE)
            for sock in made.pop():  # or that thread waits for ever
                sock.close()
            return struck.is_set()

        first_hits(fork)
        assert not unraisable


FILTERS = """
import os, sys, threading, warnings
from cseq.launcher import make_launcher

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


@pytest.mark.parametrize("method", [m for m in start_methods() if m != "fork"], indirect=True)
def test_other_methods_take_no_objects(make: Callable[..., Launcher]) -> None:
    """`local` is a TypeError where it would have to be pickled."""
    one = make()
    assert not one.takes_objects
    with pytest.raises(TypeError, match="as it is"):
        one.launch(0, local={})


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


SUBREAPER = """
import ctypes, os, signal
import numpy as np, cseq
from cseq import testing
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
manager = cseq.MPSequence(
    np.arange(40), 40, 2, batch_size=1, out_type="null", start_method="forkserver", shuffle=False
)
with manager.start() as batches:
    for number, batch in enumerate(batches):
        if number == 10:
            testing.await_workers(manager)
            with open(f"/proc/{testing.pids(manager)[0]}/stat") as file:
                os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            testing.kill(manager, 0)
try:
    print(number, os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print(number, "no children")
"""


@linux
def test_a_subreaper_has_no_zombies(run_script: RunScript) -> None:
    """Workers that it has adopted, since their server was killed, are reaped."""
    done = run_script(SUBREAPER)
    assert done.stdout == "39 no children\n", done.stdout + done.stderr


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


def test_an_interrupted_launch_is_undone(
    served: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while `launch` waits leaves no worker: closing the launcher ends it."""
    one = served()
    first = one.launch(0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(server.ForkServer, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.launch(1)
    assert ask(first, "1") == 1
    first.sock.close()
    assert one.close(time.monotonic() + PATIENCE)


def test_a_fork_that_fails_is_an_error(served: Callable[..., Launcher], entries: Path) -> None:
    """`launch` raises the OSError of the server's fork, and the server lives on."""
    (entries / "full.py").write_text(
        "import errno\nfrom cseq.launcher import child\nfrom entries import answer\n"
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
    one.prepare()
    with pytest.raises(InterruptedError):
        one.launch(0)
    assert len(starts) == 1


def test_a_cancelled_launcher_still_launches_by_the_server_that_is_there(
    served: Callable[..., Launcher],
) -> None:
    """A pool that is being ended ends that worker as the others, in good order."""
    one = served()
    one.prepare()
    one.cancel()
    child = one.launch(0)
    assert ask(child, "1") == 1
    child.sock.close()


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


@linux
def test_ctrl_c_while_a_pidfd_is_dropped_does_not_leak_it() -> None:
    """A handler cannot run in the middle, since no Python code does."""

    def strike(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_filename == waiting.__file__:
            raise KeyboardInterrupt

    pidfd = waiting.PidFd.open(os.getpid())
    assert pidfd is not None
    fd = pidfd.fileno()
    before = sys.gettrace()
    sys.settrace(strike)
    del pidfd
    sys.settrace(before)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


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
    monkeypatch.setattr("cseq.launcher.waiting.select", system)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert hung_up(ours) is ended
        assert asked == [((ours.fileno(), -1, 33), 1, 0), "closed"]


def test_an_end_that_kqueue_tells_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS it comes before a process can be reaped: `wait` reaps it nevertheless."""
    read, write = os.pipe()
    ending = threading.Timer(0.1, os.close, [write])

    class Queue:
        def control(self, events: list[Any], most: int, seconds: float) -> list[Any]:
            ending.start()  # the process ends from now on
            return events

        def close(self) -> None:
            pass

    names = ("KQ_EV_ADD", "KQ_EV_ONESHOT", "KQ_FILTER_PROC", "KQ_NOTE_EXIT")
    system = SimpleNamespace(kqueue=Queue, kevent=lambda *event: event, **dict.fromkeys(names, 1))
    monkeypatch.setattr(waiting, "select", system)
    monkeypatch.setattr(processes, "select", system)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
    actions = [(os.POSIX_SPAWN_DUP2, read, 0)]
    process = processes.PosixProcess(
        os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    )
    os.close(read)
    assert process.wait(0) is None
    assert process.wait(PATIENCE) == 7
    assert process.gone
    ending.join()


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
    assert processes.spawn(cast("Any", Socket()), start, "cseq-w0").wait(60.0) == 0


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


# --- modules that are imported once for all workers ----------------------------------------------

# A module that notes down each of its imports: the process, by the name that the system shows.
NOTING = """
import sys
with open("/proc/self/comm") as comm, open("imports", "a") as file:
    process = comm.read()
    file.write(f"{__name__} {process}")
class Indexer:
    def __init__(self, *args):
        pass
    def __getitem__(self, indices):
        return indices
"""

JOB = """
import functools, logging, os, signal, sys, time
import numpy as np, cseq
from cseq import testing
logging.basicConfig(level=logging.INFO, format="%(message)s")

def imports():
    with open("imports") as file:
        return sorted(line.strip() for line in file)

def run(worker, method="forkserver", **options):
    open("imports", "w").close()
    options = {"out_type": "null", "batch_size": 1, "start_method": method, "seed": 1, **options}
    with cseq.MPSequence(worker, 12, 3, **options).start() as batches:
        assert len(list(batches)) == 12
        testing.await_workers(batches)  # all have imported what they need
    return imports()
"""


@linux
def test_modules_are_imported_once_for_all_workers(run_script: RunScript, tmp_path: Path) -> None:
    """Those that a worker refers to, however it travels, and those that are listed."""
    for name in ("by_name", "used", "listed"):
        (tmp_path / f"{name}.py").write_text(NOTING)
    done = run_script(
        JOB + "import by_name, used\n"
        "class Local(used.Indexer):\n    pass\n"
        "def function():\n    return used.Indexer()\n"
        "print(run(by_name.Indexer))\n"
        "print(run(functools.partial(by_name.Indexer, used)))\n"
        "print(run(Local), run(function))\n"
        "print(run(np.arange(12), preload=['listed']))\n"
        "print(run(by_name.Indexer, preload=False))\n"
        "print(run(by_name.Indexer, 'spawn', preload=['listed']))\n"
        "print(run(by_name.Indexer, 'fork', preload=['listed']))\n"
    )
    one, two = ["by_name cseq-server"], ["used cseq-server"]
    each = ["by_name cseq-w0", "by_name cseq-w1", "by_name cseq-w2"]
    expected = [one, one + two, f"{two} {two}", ["listed cseq-server"], each, each, []]
    assert done.stdout == "".join(f"{line}\n" for line in expected), done.stderr


# What must not be there before a fork, and how the log says so.
CUDA = "types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))"
UNFIT = {
    "threads": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "starts threads",
    ),
    "files": ("kept = open(__file__)", "opens files"),
    "cuda": (f"import types\nsys.modules['torch'] = {CUDA}", "initialises CUDA"),
    "fatal": ("import os\nif 'server' in process: os._exit(3)", "ended two"),
}


@linux
@pytest.mark.parametrize("kind", UNFIT)
def test_modules_that_must_not_be_there_before_a_fork(
    run_script: RunScript, tmp_path: Path, kind: str
) -> None:
    """Each worker imports such a module; the log says why; the next start knows it."""
    more, reason = UNFIT[kind]
    (tmp_path / "unfit.py").write_text(f"{NOTING}\n{more}\n")
    (tmp_path / "fit.py").write_text(NOTING)
    done = run_script(
        JOB + "import fit\n"
        "class Local(fit.Indexer):\n"
        "    def __init__(self):\n        import unfit\n"
        "print(run(Local, preload=['unfit']))\nprint(run(Local, preload=['unfit']))\n"
    )
    workers = [f"unfit cseq-w{number}" for number in range(3)]
    # A module that seems to end a server is given to a second one: it may have been something else.
    servers = 2 if kind == "fatal" else 1
    first = ["fit cseq-server"] * (servers + 1) + ["unfit cseq-server"] * servers + workers
    again = ["fit cseq-server", *workers]
    assert done.stdout == f"{first}\n{again}\n", done.stderr
    assert done.stderr.count("module unfit is imported by each worker") == 1
    assert reason in done.stderr


@linux
def test_a_module_prints_once_and_raises_as_in_a_worker(
    run_script: RunScript, tmp_path: Path
) -> None:
    """Its output comes once, from the server; what it raises comes out of the loop."""
    (tmp_path / "prints.py").write_text(NOTING + "print('hello', flush=False)\n")
    (tmp_path / "raises.py").write_text(NOTING + "if 'cseq' in process: 1 / 0\n")
    done = run_script(
        JOB + "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n    import prints\n"
        "import raises\n"
        "run(prints.Indexer)\n"
        "try:\n    run(raises.Indexer)\n"
        "except ZeroDivisionError as error:\n    print(type(error.__cause__).__name__)\n"
    )
    assert done.stdout == "hello\nRemoteTraceback\n", done.stderr
    assert "module raises was to be imported for all workers" in done.stderr


@linux
def test_a_slow_import_is_told_of_and_can_be_broken_off(
    run_script: RunScript, tmp_path: Path
) -> None:
    """The log says what a start waits for; Ctrl-C ends it at once, and nothing is left."""
    (tmp_path / "slow.py").write_text(
        NOTING + "import time\nif 'cseq' in process: time.sleep(1000)\n"
    )
    done = run_script(
        JOB + "import threading, slow, cseq.supervisor\n"
        "cseq.supervisor.SHORT = 0.2\n"
        "class Interrupts(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        if 'slow' in record.getMessage():\n"
        "            begun[:] = [record]\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "logging.getLogger().addHandler(Interrupts())\n"
        "begun = []\n"
        "for method in ('forkserver', 'spawn'):\n"
        "    manager = cseq.MPSequence(slow.Indexer, 12, 1, out_type='null', start_method=method)\n"
        "    cseq.supervisor.GRACE = 1.0\n"
        "    try:\n"
        "        with manager.start() as batches:\n"
        "            next(iter(batches))\n"
        "    except KeyboardInterrupt:\n"
        "        print(method, begun[0].getMessage().partition(': ')[2])\n"
    )
    told = "forkserver module slow is imported for all of them\nspawn worker 0 imports slow\n"
    assert done.stdout == told, done.stderr  # or it sleeps, and does not end


@linux
def test_a_hanging_import_counts_as_a_workers(run_script: RunScript, tmp_path: Path) -> None:
    """With a timeout, a server that hangs in an import is given up, and workers are watched."""
    (tmp_path / "slow.py").write_text(
        NOTING + "import time\nif 'cseq' in process: time.sleep(1000)\n"
    )
    done = run_script(
        JOB + "import slow\n"
        "try:\n    run(slow.Indexer, timeout=0.1)\n"
        "except cseq.WorkerTimeout as error:\n    print('slow.py' in str(error))\n"
    )
    assert done.stdout == "True\n", done.stderr
    assert "module slow is imported by each worker, not by their server: it takes more than" in (
        done.stderr
    )


@linux
def test_replaced_workers_need_not_import(run_script: RunScript, tmp_path: Path) -> None:
    """A worker that dies is forked anew; a server that dies imports anew."""
    (tmp_path / "by_name.py").write_text(
        NOTING + "import os, signal\n"
        "class Dies(Indexer):\n"
        "    def __getitem__(self, indices):\n"
        "        if not os.path.exists('died'):\n"
        "            open('died', 'w').close()\n"
        "            if self.server:\n"
        "                os.kill(os.getppid(), signal.SIGKILL)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return indices\n"
        "    def __init__(self, server):\n        self.server = server\n"
    )
    done = run_script(
        JOB
        + "import by_name\n"
        "for server in (False, True):\n"
        "    print(run(functools.partial(by_name.Dies, server), num_workers=1))\n"
        "    os.unlink('died')\n".replace(", num_workers=1", "")
    )
    once = ["by_name cseq-server"]
    assert done.stdout == f"{once}\n{once * 2}\n", done.stderr


SHARED = """
import os, signal
import numpy as np, cseq
from cseq import testing

def server(manager):
    testing.await_workers(manager)
    with open(f"/proc/{testing.pids(manager)[0]}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

def manager(**options):
    made = cseq.MPSequence(
        np.arange(20), 20, 1, batch_size=2, out_type="null", start_method="forkserver",
        shuffle=False, **({"preload": ["json"]} | options),
    ).start()
    return made, server(made)

def right(*managers):
    return all(np.concatenate(list(m)).tolist() == list(range(20)) for m in managers)

def ended(*pids):
    return [not os.path.exists(f"/proc/{pid}") for pid in pids]

"""


@linux
@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ("b, q = manager(); print(p == q)", "True"),
        ("os.environ['NEW'] = '1'; b, q = manager(); print(p == q)", "False"),
        ("b, q = manager(threads=2); print(p == q)", "False"),
        ("b, q = manager(preload=False); print(p == q)", "False"),
        ("os.mkdir('d'); os.chdir('d'); b, q = manager(); print(p == q)", "False"),
    ],
)
def test_managers_of_one_setting_share_a_fork_server(
    run_script: RunScript, more: str, printed: str
) -> None:
    """It ends with the last of them, whichever that is; another setting has another server."""
    ends = """
print(right(a, b))
a.finish()
print(ended(p) == [p != q], right(b))
b.finish()
print(ended(p, q))
"""
    done = run_script(f"{SHARED}a, p = manager()\n{more}\n{ends}")
    assert done.stdout.splitlines() == [printed, "True", "True True", "[True, True]"], done.stderr


@linux
def test_the_death_of_a_shared_fork_server(run_script: RunScript) -> None:
    """Managers that are there go on, new workers of theirs share a new one."""
    done = run_script(
        SHARED
        + """
a, p = manager()
b, _ = manager()
os.kill(p, signal.SIGKILL)
for m in (a, b):
    testing.kill(m, 0)
    print(right(m))
q, r = server(a), server(b)
print(q == r != p)
a.finish(), b.finish()
print(ended(p, q))
"""
    )
    assert done.stdout.splitlines() == ["True", "True", "True", "[True, True]"], done.stderr


@linux
def test_a_forked_program_has_fork_servers_of_its_own(run_script: RunScript) -> None:
    """Its parent's stays with the parent."""
    done = run_script(
        SHARED
        + """
a, p = manager()
pid = os.fork()
if pid == 0:
    b, q = manager()
    print(q != p, right(b), flush=True)
    b.finish()
    print(ended(q), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(right(a), server(a) == p)
"""
    )
    assert done.stdout.splitlines() == ["True True", "[True]", "True True"], done.stderr


@linux
def test_a_module_that_was_changed_is_not_taken_from_a_shared_fork_server(
    run_script: RunScript, tmp_path: Path
) -> None:
    """A manager whose modules are newer than the server's has a new one."""
    (tmp_path / "rows.py").write_text(ROWS.format(1))
    (tmp_path / "later.py").write_text(ROWS.format(2))
    done = run_script(
        """
import importlib, os, cseq, rows
first = cseq.MPSequence(rows.Rows, 4, 1, out_type="null", start_method="forkserver").start()
print(next(iter(first)))
os.replace("later.py", "rows.py")
os.utime("rows.py", (1, 1))
importlib.reload(rows)
second = cseq.MPSequence(rows.Rows, 4, 1, out_type="null", start_method="forkserver").start()
print(next(iter(second)))
first.finish(), second.finish()
"""
    )
    assert done.stdout.splitlines() == ["[1]", "[2]"], done.stderr


ROWS = """
import numpy as np
class Rows:
    def __getitem__(self, indices): return np.array([{}])
"""


@pytest.mark.parametrize("method", [m for m in start_methods() if m != "fork"])
def test_a_module_that_starts_workers_when_workers_import_it(
    run_script: RunScript, tmp_path: Path, method: str
) -> None:
    """It would start processes without end: an error that says what to do."""
    (tmp_path / "training.py").write_text(
        "import sys, cseq\n"
        "class Indexer:\n    def __getitem__(self, indices):\n        return indices\n"
        f"with cseq.MPSequence(Indexer, 4, 1, out_type='null', start_method={method!r}).start() "
        "as batches:\n    print(list(batches))\n"
    )
    done = run_script("import training\n")
    assert "RuntimeError: a module that worker processes import starts worker" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
