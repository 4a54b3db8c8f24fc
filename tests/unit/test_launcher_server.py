"""The fork server: its death and its imports; and launchers on other systems."""

import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from killing import await_death
from launching import PATIENCE, ask, end_of, entries, linux, served
from waiting import until

from cseq.processes import launcher
from cseq.processes.launcher import forkserver, make_launcher, start_methods

pytestmark = pytest.mark.needs("POSIX")


def kill_server(child):
    """Kill the parent of a worker, and wait for its death; the launcher reaps it."""
    pid = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@linux
def test_a_worker_whose_server_is_dead_can_be_killed_but_not_asked_how_it_ended(served):
    """Its `status` is None; `gone` says that it has ended. The earlier worker's status is known."""
    one = served()
    child, other = one.launch(0), one.launch(1)
    ask(child, "0")
    ask(other, "0")
    assert other.status(0.01) is None
    other.kill()
    assert end_of(other) == -signal.SIGKILL
    other.sock.close()
    kill_server(child)
    assert child.status(0) is None
    assert not child.gone
    child.kill()
    assert child.sock.recv(1) == b""
    assert child.status(PATIENCE) is None
    assert child.gone
    assert child.ended.wait(0)
    assert child.code is None
    child.sock.close()


def test_a_server_that_cannot_start_is_an_error(served, entries, monkeypatch):
    """`launch` raises its exit code after some deaths, or that it takes too long."""
    (entries / "fatal.py").write_text("import os\nos._exit(23)")
    with pytest.raises(OSError, match="exited with code 23"):
        served(entry="fatal:answer").launch(0)
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served(entry="endless:answer")
    monkeypatch.setattr(forkserver, "START", 0.01)
    with pytest.raises(TimeoutError, match="in time"):
        one.launch(0)
    # It still ends the server.
    assert one.close(time.monotonic())


# A module whose server runs other lines at its first fork.
BIRTH = """
import errno, os, signal
from pathlib import Path
from cseq.processes.launcher import server
from entries import answer
fork, born = server.fork, Path(__file__).with_name("born")
def first():
    if born.exists():
        return fork()
    born.touch()
    LINES
server.fork = first
"""


@pytest.fixture
def at_birth(served, entries):
    """Return a function that makes a launcher whose server forks first by these lines."""

    def make_one(lines):
        (entries / "birth.py").write_text(BIRTH.replace("LINES", lines))
        return served(entry="birth:answer")

    return make_one


def test_a_fork_that_fails_is_an_error(at_birth):
    """`launch` raises the OSError of the server's fork, and the server lives on."""
    one = at_birth("raise OSError(errno.EAGAIN, 'full')")
    with pytest.raises(BlockingIOError, match="worker process could not be started"):
        one.launch(0)
    child = one.launch(1)
    assert ask(child, "1") == 1
    child.sock.close()


# The worker acts at once; the server waits for that.
DIES = """pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.{signal})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    return pid"""


@linux
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGSTOP"])
def test_a_worker_that_dies_at_birth(at_birth, name):
    """It counts as launched, and ends like any other worker."""
    one = at_birth(DIES.format(signal=name))
    child, other = one.launch(0), one.launch(1)
    if name == "SIGSTOP":
        assert not child.gone
        child.kill()
    assert child.sock.recv(1) == b""
    assert end_of(child) == -getattr(signal, "SIGKILL" if name == "SIGSTOP" else name)
    assert ask(other, "1") == 1
    child.sock.close()
    other.sock.close()


@linux
def test_a_server_that_dies_at_a_birth(at_birth, entries):
    """The unknown worker ends with it; another server has another worker."""
    child = at_birth("""pid = fork()
    if pid:
        born.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return pid""").launch(0)
    assert ask(child, "1") == 1
    unknown = int((entries / "born").read_text())
    assert unknown != child.pid
    await_death(unknown)
    child.sock.close()


@linux
def test_a_worker_ends_though_its_server_is_stopped(served):
    """It is gone, with a failure's code; the server's report comes too late."""
    one = served()
    killed, left = one.launch(0), one.launch(1)
    server = int(ask(killed, "os.getppid()"))
    os.kill(server, signal.SIGSTOP)
    try:
        killed.kill()
        assert killed.status(PATIENCE) == -signal.SIGKILL
        left.sock.shutdown(socket.SHUT_WR)
        await_death(left.pid)
        assert left.gone
        assert left.code is None
    finally:
        os.kill(server, signal.SIGCONT)
    other = one.launch(2)
    assert ask(other, "os.getppid()") == server
    for child in (killed, left, other):
        child.sock.close()


def test_no_server_is_started_any_more_once_it_is_cancelled(served, entries, monkeypatch):
    """It holds after the end of a server that was importing: `launch` raises."""
    starts, spawn = [], forkserver.spawn
    monkeypatch.setattr(forkserver, "spawn", lambda *args: starts.append(args) or spawn(*args))
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served()
    one.preload(["endless"])
    with ThreadPoolExecutor() as pool:
        launched = pool.submit(one.launch, 0)
        until(lambda: one.importing)
        one.cancel()
        for launch in (launched.result, lambda: one.launch(0)):
            with pytest.raises(InterruptedError):
                launch()
    assert len(starts) == 1


# A module that records each of its imports: the process, by its name in the system.
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


@pytest.fixture
def run_job(run_script, tmp_path):
    """Return a function that runs lines after `JOB`, beside modules like `NOTING`."""

    def run(lines, **modules):
        for name, more in modules.items():
            (tmp_path / f"{name}.py").write_text(NOTING + more)
        return run_script(JOB + lines)

    return run


@linux
def test_modules_are_imported_once_for_all_workers(run_job):
    """They are the modules to which a worker refers, no matter how it travels."""
    lines = """
import by_name, used
class Local(used.Indexer): pass
print(run(by_name.Indexer))
print(run(functools.partial(by_name.Indexer, used)))
print(run(Local), run(lambda: used.Indexer()))
print(run(by_name.Indexer, preload=False))
print(run(by_name.Indexer, 'spawn'))
print(run(by_name.Indexer, 'fork'))
"""
    done = run_job(lines, by_name="", used="")
    one, two = ["by_name cseq-server"], ["used cseq-server"]
    each = ["by_name cseq-w0", "by_name cseq-w1", "by_name cseq-w2"]
    expected = [one, one + two, f"{two} {two}", each, each, []]
    assert done.stdout == "".join(f"{line}\n" for line in expected), done.stderr


# The log's words for what must not exist before a fork.
UNFIT = {
    "starts threads": "from threading import *; Thread(target=Event().wait, daemon=True).start()",
    "opens files": "kept = open(__file__)",
    "ends the process": "import os; os._exit(3)",
}


@linux
@pytest.mark.parametrize("reason", UNFIT)
def test_a_module_that_must_not_be_there_before_a_fork(run_job, reason):
    """The log names it, and each worker imports all modules."""
    lines = """
import fit, unfit
class Local(unfit.Indexer):
    def __init__(self): fit.Indexer()
run(Local)
print(run(Local))
"""
    done = run_job(lines, unfit=f"if 'server' in process:\n    {UNFIT[reason]}\n", fit="")
    unfit = [f"unfit cseq-w{number}" for number in range(3)]
    each = [f"fit cseq-w{number}" for number in range(3)]
    assert done.stdout == f"{each + unfit}\n", done.stderr
    assert done.stderr.count("each worker imports all modules itself") == 1
    assert f"module unfit {reason}" in done.stderr


@linux
def test_a_module_prints_once_and_raises_as_in_a_worker(run_job):
    """The server prints its output once; the loop raises its exception."""
    lines = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    import prints
import raises
run(prints.Indexer)
try:
    run(raises.Indexer)
except ZeroDivisionError as error:
    print(type(error.__cause__).__name__)
"""
    prints, raises = "print('hello', flush=False)", "if 'cseq' in process: 1 / 0"
    done = run_job(lines, prints=prints, raises=raises)
    assert done.stdout == "hello\nRemoteTraceback\n", done.stderr
    assert "module raises could not be imported in advance" in done.stderr


SLEEPS = "import time\nif 'cseq' in process: time.sleep(1000)\n"


@linux
def test_a_slow_import_is_told_of_and_can_be_broken_off(run_job):
    """The log says what a start waits for; Ctrl-C ends the import at once, and nothing remains."""
    lines = """
import slow, cseq.processes.supervisor
cseq.processes.supervisor.SLOW = 0.2
class Interrupts(logging.Handler):
    def emit(self, record):
        if 'slow' in record.getMessage():
            begun[:] = [record]
            signal.raise_signal(signal.SIGINT)
logging.getLogger().addHandler(Interrupts())
begun = []
for method in ('forkserver', 'spawn'):
    manager = cseq.MPSequence(slow.Indexer, 12, 1, out_type='null', start_method=method)
    cseq.processes.supervisor.GRACE = 1.0
    try:
        with manager.start() as batches:
            next(iter(batches))
    except KeyboardInterrupt:
        print(method, begun[0].getMessage().partition(': ')[2])
"""
    done = run_job(lines, slow=SLEEPS)
    told = "forkserver module slow is being imported for all of them; cseq is still waiting\n"
    told += "spawn worker 0 is still importing slow (slow.py:12 in <module>); "
    told += "cseq is still waiting\n"
    # Otherwise it would sleep, and not end.
    assert done.stdout == told, done.stderr


BUSY = """
import os, sys, time
open("begun", "w").close()
while 'cseq' in process and not os.path.exists("go"):
    time.sleep(0.001)
"""


@linux
def test_a_server_that_is_importing_for_another_manager(run_job):
    """The first manager ends silently, or has a worker replaced after that import.

    The server's time limit for an answer excludes that import.
    """
    lines = """
import threading
from cseq.processes.launcher import forkserver
class Clock(threading.local):  # of each thread
    now = 0.0
    def monotonic(self):
        if goes:
            looks.append(1)
            self.now += 50.0
        return self.now
def manager(worker):
    return cseq.MPSequence(worker, 12, 2, batch_size=1, out_type="null", start_method="forkserver",
                           shuffle=False).start()
def exists(name):
    while not os.path.exists(name):
        time.sleep(0.001)
ended, killed = manager(np.arange(12)), manager(np.arange(12))
for each in (ended, killed):
    testing.await_workers(each)
import busy
os.remove("begun")
other = manager(busy.Indexer)
while not os.path.exists("begun"):
    time.sleep(0.001)
ended.finish()
goes, looks, forkserver.time = False, [], Clock()
testing.kill(killed, 0)
while testing.pids(killed)[0] is not None:
    time.sleep(0.001)
goes = True
while len(looks) < 20:
    time.sleep(0.001)
goes = False
open("go", "w").close()
print([np.concatenate(list(each)).tolist() == list(range(12)) for each in (killed, other)])
for each in (killed, other):
    each.finish()
"""
    done = run_job(lines, busy=BUSY)
    assert done.stdout == "[True, True]\n", done.stderr
    assert done.stderr == "worker 0 was killed by SIGKILL and is being replaced\n"


@linux
def test_a_module_that_ends_the_server_while_another_waits_for_its_own(run_job):
    """The log names only that module; the workers of both start."""
    lines = """
from concurrent.futures import ThreadPoolExecutor
from cseq.processes.launcher import make_launcher
first, second = (make_launcher("forkserver", entry="entry:run") for _ in range(2))
first.preload(["fatal"])
second.preload(["fine"])
with ThreadPoolExecutor(2) as pool:
    launched = [pool.submit(first.launch, 0)]
    while not os.path.exists("begun"):
        time.sleep(0.001)
    launched.append(pool.submit(second.launch, 0))
    while second.importing != "fine":
        time.sleep(0.001)
    open("go", "w").close()
    for child in [each.result() for each in launched]:
        print(child.sock.recv(1))
        child.sock.close()
print(*(each.close(time.monotonic() + 60) for each in (first, second)))
"""
    done = run_job(
        lines,
        fatal=BUSY + "if 'server' in process: os._exit(3)\n",
        fine="",
        entry="def run(sock): sock.sendall(b'!') or sock.recv(1)\n",
    )
    assert done.stdout == "b'!'\nb'!'\nTrue True\n", done.stderr
    assert "module fatal ends the process" in done.stderr
    assert "module fine" not in done.stderr


@linux
def test_a_hanging_import_counts_as_a_workers(run_job):
    """With a timeout, a server that hangs in an import is given up, and workers are watched."""
    lines = """
import slow
try:
    run(slow.Indexer, timeout=0.1)
except cseq.WorkerTimeout as error:
    print('slow.py' in str(error))
"""
    done = run_job(lines, slow=SLEEPS)
    assert done.stdout == "True\n", done.stderr
    assert "importing module slow takes more than 1 s, so" in done.stderr


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
        shuffle=False, **options,
    ).start()
    return made, server(made)

def right(*managers):
    return all(np.concatenate(list(m)).tolist() == list(range(20)) for m in managers)

def ended(*pids):
    return [not os.path.exists(f"/proc/{pid}") for pid in pids]

a, p = manager()
"""


@linux
@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ("b, q = manager(); print(p == q)", "True"),
        ("os.environ['NEW'] = '1'; b, q = manager(); print(p == q)", "True"),
        ("b, q = manager(threads=2); print(p == q)", "False"),
        ("import sys; sys.path.append('d'); b, q = manager(); print(p == q)", "False"),
        ("b, q = manager(preload=False); print(p == q)", "False"),
    ],
)
def test_managers_share_a_fork_server(run_script, more, printed):
    """It ends with the last of them; another thread, or a changed sys.path, has another server."""
    ends = """
print(right(a, b))
a.finish()
print(ended(p) == [p != q], right(b))
b.finish()
print(ended(p, q))
"""
    done = run_script(f"{SHARED}{more}\n{ends}")
    assert done.stdout.splitlines() == [printed, "True", "True True", "[True, True]"], done.stderr


@linux
def test_the_death_of_a_shared_fork_server(run_script):
    """Existing managers continue, and their new workers share a new one."""
    more = """
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
    done = run_script(SHARED + more)
    assert done.stdout.splitlines() == ["True", "True", "True", "[True, True]"], done.stderr


@linux
def test_a_forked_program_has_fork_servers_of_its_own(run_script):
    """The parent's server stays with the parent."""
    more = """
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
    done = run_script(SHARED + more)
    assert done.stdout.splitlines() == ["True True", "[True]", "True True"], done.stderr


@pytest.mark.parametrize("method", [m for m in start_methods() if m != "fork"])
def test_a_module_that_starts_workers_when_workers_import_it(run_script, tmp_path, method):
    """It would start processes without end; the error has the remedy."""
    (tmp_path / "training.py").write_text(
        "import sys, cseq\n"
        "class Indexer:\n    def __getitem__(self, indices):\n        return indices\n"
        f"with cseq.MPSequence(Indexer, 4, 1, out_type='null', start_method={method!r}).start() "
        "as batches:\n    print(list(batches))\n"
    )
    done = run_script("import training\n")
    assert "RuntimeError: a module that worker processes import starts worker" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


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
def test_start_methods_of_other_systems(monkeypatch, platform, lacks, methods):
    """A fork server requires a fork that sends descriptors; on Windows, there is only spawn."""
    monkeypatch.setattr(sys, "platform", platform)
    for name in lacks:
        monkeypatch.delattr(os if name == "fork" else socket, name)
    assert start_methods() == methods


def test_launchers_that_cannot_be(monkeypatch):
    """The method is unknown, or a frozen program has no interpreter for processes."""
    with pytest.raises(ValueError, match=r"'magic'.*'spawn'"):
        make_launcher("magic", entry="entries:answer")
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
        (0xC0000005, "crashed with NTSTATUS 0xC0000005"),
        (0xFFFFFFFF, "exited with code -1"),
        (None, "ended (its exit code is unknown)"),
    ],
)
def test_the_end_of_a_process_in_words(code, text):
    """`describe_exit` returns the words for a message."""
    assert launcher.describe_exit(code) == text
