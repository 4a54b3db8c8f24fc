"""The fork server: its death and its imports; and launchers on other systems."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from killing import await_death
from launching import PATIENCE, ask, end_of, entries, linux, make, method, served

from cseq.processes import launcher
from cseq.processes.launcher import forkserver, make_launcher, start_methods

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RunScript

    from cseq.processes.launcher import Child, Launcher


pytestmark = pytest.mark.needs("POSIX")


# --- fork server ---------------------------------------------------------------------------------


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


def test_a_server_that_cannot_start_is_an_error(served, entries):
    """`launch` raises OSError with the server's exit code after repeated deaths."""
    (entries / "fatal.py").write_text("import os\nos._exit(23)")
    with pytest.raises(OSError, match="exited with code 23"):
        served(entry="fatal:answer").launch(0)


def test_a_server_that_does_not_get_ready_is_a_timeout(served, entries, monkeypatch):
    """`launch` raises TimeoutError; closing the launcher still ends the server."""
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served(entry="endless:answer")
    monkeypatch.setattr(forkserver, "START", 0.01)
    with pytest.raises(TimeoutError, match="in time"):
        one.launch(0)
    assert one.close(time.monotonic())


def test_a_fork_that_fails_is_an_error(served, entries):
    """`launch` raises the OSError of the server's fork, and the server lives on."""
    (entries / "full.py").write_text(
        "import errno\nfrom cseq.processes.launcher import server\nfrom entries import answer\n"
        "fork = server.fork\n"
        "def fail():\n    server.fork = fork\n    raise OSError(errno.EAGAIN, 'full')\n"
        "server.fork = fail"
    )
    one = served(entry="full:answer")
    with pytest.raises(BlockingIOError, match="worker process could not be started"):
        one.launch(0)
    child = one.launch(1)
    assert ask(child, "1") == 1
    child.sock.close()


# The server's first worker acts at once; the server waits for that.
AT_BIRTH = """
import os, signal
from cseq.processes.launcher import server
from entries import answer
fork = server.fork
def fork_once():
    server.fork = fork
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.{signal})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    return pid
server.fork = fork_once
"""


@linux
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGSTOP"])
def test_a_worker_that_dies_at_birth(served, entries, name):
    """It counts as launched, and ends like any other worker."""
    (entries / "birth.py").write_text(AT_BIRTH.format(signal=name))
    one = served(entry="birth:answer")
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
def test_a_server_that_dies_at_a_birth(served, entries):
    """The unknown worker ends with it; another server has another worker."""
    (entries / "birth.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom cseq.processes.launcher import server\n"
        "from entries import answer\nfork, born = server.fork, Path(__file__).with_name('born')\n"
        "def fork_once():\n"
        "    if not born.exists():\n"
        "        pid = fork()\n"
        "        if pid:\n"
        "            born.write_text(str(pid))\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return pid\n"
        "    return fork()\n"
        "server.fork = fork_once\n"
    )
    child = served(entry="birth:answer").launch(0)
    assert ask(child, "1") == 1
    unknown = int((entries / "born").read_text())
    assert unknown != child.pid
    await_death(unknown)
    child.sock.close()


@linux
def test_a_worker_ends_though_its_server_is_stopped(served):
    """It is gone, with a failure's code; only the server could say that it ended without one.

    The report then comes too late, and is not needed.
    """
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
    starts = []
    spawn = forkserver.spawn

    def count(*args):
        starts.append(1)
        return spawn(*args)

    monkeypatch.setattr(forkserver, "spawn", count)
    (entries / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    one = served()
    one.preload(["endless"])
    raised = []

    def launch():
        with pytest.raises(InterruptedError) as caught:
            one.launch(0)
        raised.append(caught.value)

    importing = threading.Thread(target=launch)
    importing.start()
    while not one.importing:
        importing.join(0.001)
    one.cancel()
    importing.join(PATIENCE)
    assert len(raised) == 1
    with pytest.raises(InterruptedError):
        one.launch(0)
    assert len(starts) == 1


# --- modules that are imported once for all workers ----------------------------------------------

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


@linux
def test_modules_are_imported_once_for_all_workers(run_script, tmp_path):
    """They are the modules to which a worker refers, no matter how it travels."""
    for name in ("by_name", "used"):
        (tmp_path / f"{name}.py").write_text(NOTING)
    done = run_script(
        JOB + "import by_name, used\n"
        "class Local(used.Indexer):\n    pass\n"
        "def function():\n    return used.Indexer()\n"
        "print(run(by_name.Indexer))\n"
        "print(run(functools.partial(by_name.Indexer, used)))\n"
        "print(run(Local), run(function))\n"
        "print(run(by_name.Indexer, preload=False))\n"
        "print(run(by_name.Indexer, 'spawn'))\n"
        "print(run(by_name.Indexer, 'fork'))\n"
    )
    one, two = ["by_name cseq-server"], ["used cseq-server"]
    each = ["by_name cseq-w0", "by_name cseq-w1", "by_name cseq-w2"]
    expected = [one, one + two, f"{two} {two}", each, each, []]
    assert done.stdout == "".join(f"{line}\n" for line in expected), done.stderr


# Things that must not exist before a fork, and the log's words for them.
UNFIT = {
    "threads": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "starts threads",
    ),
    "files": ("kept = open(__file__)", "opens files"),
    "fatal": ("import os; os._exit(3)", "ends the process"),
}


@linux
@pytest.mark.parametrize("kind", UNFIT)
def test_a_module_that_must_not_be_there_before_a_fork(run_script, tmp_path, kind):
    """The log names it, and each worker imports all modules."""
    more, reason = UNFIT[kind]
    (tmp_path / "unfit.py").write_text(f"{NOTING}\nif 'server' in process:\n    {more}\n")
    (tmp_path / "fit.py").write_text(NOTING)
    done = run_script(
        JOB + "import fit, unfit\n"
        "class Local(unfit.Indexer):\n"
        "    def __init__(self):\n        fit.Indexer()\n"
        "run(Local)\nprint(run(Local))\n"
    )
    unfit = [f"unfit cseq-w{number}" for number in range(3)]
    each = [f"fit cseq-w{number}" for number in range(3)]
    assert done.stdout == f"{each + unfit}\n", done.stderr
    assert done.stderr.count("each worker imports all modules itself") == 1
    assert f"module unfit {reason}" in done.stderr


@linux
def test_a_module_prints_once_and_raises_as_in_a_worker(run_script, tmp_path):
    """The server prints its output once; the loop raises its exception."""
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
    assert "module raises could not be imported in advance" in done.stderr


@linux
def test_a_slow_import_is_told_of_and_can_be_broken_off(run_script, tmp_path):
    """The log says what a start waits for; Ctrl-C ends the import at once, and nothing remains."""
    (tmp_path / "slow.py").write_text(
        NOTING + "import time\nif 'cseq' in process: time.sleep(1000)\n"
    )
    done = run_script(
        JOB + "import threading, slow, cseq.processes.supervisor\n"
        "cseq.processes.supervisor.SLOW = 0.2\n"
        "class Interrupts(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        if 'slow' in record.getMessage():\n"
        "            begun[:] = [record]\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "logging.getLogger().addHandler(Interrupts())\n"
        "begun = []\n"
        "for method in ('forkserver', 'spawn'):\n"
        "    manager = cseq.MPSequence(slow.Indexer, 12, 1, out_type='null', start_method=method)\n"
        "    cseq.processes.supervisor.GRACE = 1.0\n"
        "    try:\n"
        "        with manager.start() as batches:\n"
        "            next(iter(batches))\n"
        "    except KeyboardInterrupt:\n"
        "        print(method, begun[0].getMessage().partition(': ')[2])\n"
    )
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
def test_a_server_that_is_importing_for_another_manager(run_script, tmp_path):
    """The first manager ends silently, or has a worker replaced after that import.

    The server's time limit for an answer excludes that import.
    """
    (tmp_path / "busy.py").write_text(NOTING + BUSY)
    done = run_script(
        JOB
        + """
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
exists("begun")
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
    )
    assert done.stdout == "[True, True]\n", done.stderr
    assert done.stderr == "worker 0 was killed by SIGKILL and is being replaced\n"


@linux
def test_a_module_that_ends_the_server_while_another_waits_for_its_own(run_script, tmp_path):
    """The log names only that module; the workers of both start."""
    (tmp_path / "fatal.py").write_text(NOTING + BUSY + "if 'server' in process: os._exit(3)\n")
    (tmp_path / "fine.py").write_text(NOTING)
    (tmp_path / "entry.py").write_text("def run(sock): sock.sendall(b'!') or sock.recv(1)\n")
    done = run_script(
        """
import logging, os, time
from concurrent.futures import ThreadPoolExecutor
from cseq.processes.launcher import make_launcher
logging.basicConfig(format="%(message)s")
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
    )
    assert done.stdout == "b'!'\nb'!'\nTrue True\n", done.stderr
    assert "module fatal ends the process" in done.stderr
    assert "module fine" not in done.stderr


@linux
def test_a_hanging_import_counts_as_a_workers(run_script, tmp_path):
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
    done = run_script(f"{SHARED}a, p = manager()\n{more}\n{ends}")
    assert done.stdout.splitlines() == [printed, "True", "True True", "[True, True]"], done.stderr


@linux
def test_the_death_of_a_shared_fork_server(run_script):
    """Existing managers continue, and their new workers share a new one."""
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
def test_a_forked_program_has_fork_servers_of_its_own(run_script):
    """The parent's server stays with the parent."""
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
def test_start_methods_of_other_systems(monkeypatch, platform, lacks, methods):
    """A fork server requires a fork that sends descriptors; on Windows, there is only spawn."""
    monkeypatch.setattr(sys, "platform", platform)
    for name in lacks:
        monkeypatch.delattr(os if name == "fork" else socket, name)
    assert start_methods() == methods


def test_an_unknown_method_is_an_error_that_names_the_known():
    """`make_launcher` raises ValueError with the value and the choices."""
    with pytest.raises(ValueError, match=r"'magic'.*'spawn'"):
        make_launcher("magic", entry="entries:answer")


def test_a_frozen_program_is_not_started_as_if_it_were_python(monkeypatch):
    """Spawning needs an interpreter: a frozen application without one raises an OSError."""
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
