"""Modules that a fork server imports once for all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cseq.processes.launcher import start_methods

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunScript

from launching import entries, linux, method

pytestmark = pytest.mark.needs("POSIX")


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
def test_a_module_that_must_not_be_there_before_a_fork(
    run_script: RunScript, tmp_path: Path, kind: str
) -> None:
    """The log names it, and each worker imports all modules but those that `preload` lists."""
    more, reason = UNFIT[kind]
    (tmp_path / "unfit.py").write_text(f"{NOTING}\nif 'server' in process:\n    {more}\n")
    (tmp_path / "fit.py").write_text(NOTING)
    done = run_script(
        JOB + "import fit, unfit\n"
        "class Local(unfit.Indexer):\n"
        "    def __init__(self):\n        fit.Indexer()\n"
        "run(Local)\nprint(run(Local))\nprint(run(Local, preload=['fit']))\n"
        "try:\n    run(np.arange(12), preload=['fit', 'unfit'])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    unfit = [f"unfit cseq-w{number}" for number in range(3)]
    each = [f"fit cseq-w{number}" for number in range(3)]
    *imported, error = done.stdout.splitlines()
    assert imported == [f"{each + unfit}", f"{['fit cseq-server', *unfit]}"], done.stderr
    assert done.stderr.count("each worker imports all modules itself") == 1
    assert f"module unfit {reason}" in done.stderr
    assert error.startswith(f"preload=['fit', 'unfit']: module unfit {reason}")


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
        "        print(method, begun[0].getMessage().partition('; ')[2].splitlines()[0])\n"
    )
    told = "forkserver module slow is imported for all of them\nspawn worker 0 is here:\n"
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
    assert "module slow takes more than 1 s when it is imported" in done.stderr


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
        ("os.environ['NEW'] = '1'; b, q = manager(); print(p == q)", "True"),
        ("b, q = manager(threads=2); print(p == q)", "False"),
        ("import sys; sys.path.append('d'); b, q = manager(); print(p == q)", "False"),
        ("b, q = manager(preload=False); print(p == q)", "False"),
    ],
)
def test_managers_share_a_fork_server(run_script: RunScript, more: str, printed: str) -> None:
    """It ends with the last of them; other threads, or a changed sys.path, have another."""
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
