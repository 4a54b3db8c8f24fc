"""What every test gets: a check that it leaves nothing behind, and scripts run on their own.

A test fails that leaves a process, a thread, a file descriptor, a shared mapping or a name in
`/dev/shm`. What ends by itself is waited for (a thread is joined, a process polled through its
pidfd), `GRACE` seconds at most; the garbage collector runs before anything is called a leak.
Processes, descriptors and mappings are read from `/proc`; without it, threads are checked, and on
POSIX files without a name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import filecmp
import gc
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pytest
from checkout import import_path
from witness import UNCOUNTED, Witness, descends, is_of

with contextlib.suppress(ImportError):
    import hypothesis

    # No test is judged by the clock, and the leak check may run around all examples of a test.
    hypothesis.settings.register_profile(
        "cseq", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("cseq")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRACE = 10.0  # seconds in which what is about to end has to end
HANG = 100.0  # seconds after which a script is asked where it hangs; below faulthandler_timeout

PROC = Path("/proc/self")
HAS_PROC = os.name == "posix" and (PROC / "maps").exists()  # Wine's programs see Linux's /proc
SHM = Path("/dev/shm")

# What `pytest.mark.needs` can name, and whether this system has it.
HERE = {
    "POSIX": os.name == "posix",
    "Linux": sys.platform == "linux",
    "fork": hasattr(os, "fork"),
    "quick processes": hasattr(os, "fork") or "CSEQ_TESTS_START" in os.environ,  # or patience
    "worker processes": True,
}

# What the log may say of workers on a machine that is busy.
SLOW_START = "nothing has come from the workers"

# Processes inherit this: one whose parent is gone, and which init adopted, is still ours.
MARK = f"CSEQ_TESTS_{os.getpid()}"
os.environ[MARK] = "1"

# A mapping that processes share, of memory without a name or of a file without one (any more).
SHARED = re.compile(
    rb"^(\S+ ..[x-]s .*(?:/memfd:|/dev/zero|/dev/shm/|\(deleted\)).*)$", re.MULTILINE
)


class Census(NamedTuple):
    """What this process holds, and which processes there are on the machine."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    mappings: frozenset[str]
    names: frozenset[str]


class Leaks(NamedTuple):
    """What is there after a test and was not before it."""

    processes: list[int]
    threads: list[threading.Thread]
    others: list[str]

    def __bool__(self):
        """Whether there is anything."""
        return any(self)

    def report(self):
        """Name each thing that was left, one a line."""
        lines = [f"process {pid}: {command_of(pid)}" for pid in self.processes]
        lines += [f"thread {thread!r}" for thread in self.threads]
        return "\n  ".join(["the test left behind:", *lines, *self.others])


def take_census():
    """Count everything; under a millisecond."""
    threads = frozenset(
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # a native thread that called Python
    )
    if not HAS_PROC:
        opened = frozenset(nameless() if os.name == "posix" else ())
        return Census(frozenset(), threads, opened, frozenset(), frozenset())
    return Census(pids(), threads, frozenset(descriptors()), shared_mappings(), shm_names())


def pids():
    """All processes that the machine shows."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())


def descriptors():
    """Open descriptors and what each stands for; a driver's devices are the driver's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            what = os.readlink(f"/proc/self/fd/{name}")
            if not what.startswith("/dev/nvidia"):
                yield int(name), what


def nameless():
    """Open files without a name, as cseq's shared memory is on macOS. Torch leaves sockets."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder
            found = os.fstat(int(name))
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                yield int(name), f"a file without a name, {found.st_size} bytes"


def shared_mappings():
    """Shared mappings of nameless memory: a slot of the arena, a ring, a torn-off file."""
    maps = (PROC / "maps").read_bytes()
    lines = SHARED.findall(maps)
    if b" /dev/nvidia" in maps:  # a CUDA driver keeps page-locked memory, which is /dev/zero
        lines = [line for line in lines if b" /dev/zero" not in line]
    return frozenset(line.decode() for line in lines)


def shm_names():
    """Names in /dev/shm, where a test has no business to leave any."""
    return frozenset(os.listdir(SHM) if SHM.is_dir() else ())


def leaks_since(before):
    """Compare now with before."""
    now = take_census()
    new = now.processes - before.processes
    others = [
        f"descriptor {number}: {what}" for number, what in now.descriptors - before.descriptors
    ]
    others += [f"mapping {line}" for line in now.mappings - before.mappings]
    others += [f"name {SHM / name}" for name in now.names - before.names if is_my_file(SHM / name)]
    return Leaks(
        sorted(filter(is_ours, new)),
        sorted(now.threads - before.threads, key=str),
        sorted(others),
    )


def is_ours(pid):
    """Whether a process is this one, descends from it, or bears its mark."""
    return descends(pid, os.getpid(), MARK)


def is_my_file(path):
    """Whether a file still exists that a process of this test's has made; see `Witness`.

    A file whose maker nobody saw, and that nobody has open, is another program's.
    """
    if path.name.startswith(UNCOUNTED) or not path.exists():
        return False
    seen = WITNESS and WITNESS.saw_us(path.name)
    return bool(is_of(path, os.getpid(), MARK) if seen is None else seen)


def command_of(pid):
    """How a process was called; a zombie has nothing left but its state."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words).strip()[:200] or "(zombie)"
    return "(gone)"


def let_end(leaks, deadline):
    """Wait until these processes and threads have ended, or the time is up."""
    for pid in leaks.processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            os.close(descriptor)
    for thread in leaks.threads:
        join(thread, deadline)


def join(thread, deadline):
    """Wait until a thread has ended, or the time is up; one that is just being started, too."""
    while time.monotonic() < deadline:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # `threading` lists it, but does not let it be joined yet
            time.sleep(0.001)
        else:
            return


def settled_leaks(before):
    """Find what was left after the garbage is collected and all that ends has ended."""
    leaks = leaks_since(before)
    if not leaks:
        return leaks
    gc.collect()  # only now: with torch in memory it takes longer than most tests
    leaks = leaks_since(before)
    if not leaks:
        # The next collection goes through what is new since. What lives now and is garbage later
        # holds what the next census counts as there before its test.
        gc.freeze()
    else:
        let_end(leaks, time.monotonic() + GRACE)
        if "cseq.runs" in sys.modules:
            sys.modules["cseq.runs"].await_closings(GRACE)  # what was dropped, and closes
        gc.collect()
        leaks = leaks_since(before)
    return leaks


def end_all(processes):
    """Kill what a test left running, so that it disturbs no other."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def pytest_addoption(parser):
    """Add `--cpu-times`; see slow.py."""
    parser.addoption("--cpu-times", help="append the CPU time of each test to this file")


# Where `make test`, too, starts workers in each way: how that is done, and what users see first.
EACH_WAY = {
    "test_launcher.py",
    "test_launcher_server.py",
    "test_supervisor.py",
    "test_multiprocessing.py",
    "test_same_as_test_mode",
    "test_scripts_without_ceremony",
    "test_other_start_methods",
}


def starts_in_another_way(item):
    """Say whether a case starts workers in a way that is not the quickest."""
    values = []
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        values += value.values() if isinstance(value, dict) else [value]
    values = [getattr(value, "start_method", value) for value in values]
    ways = {value for value in values if isinstance(value, str)} & {"fork", "forkserver", "spawn"}
    if not ways:
        return False
    from kinds import QUICKEST

    return QUICKEST.start_method not in ways


def pytest_collection_modifyitems(items):
    """Mark what slow.txt names, and start methods that are left to `make check-nightly`."""
    listed = Path(__file__).with_name("slow.txt")
    slow = set(listed.read_text(encoding="utf-8").split()) if listed.exists() else set()
    for item in items:
        path = Path(os.path.relpath(item.path, listed.parent))
        name = item.nodeid.partition("::")[2].partition("[")[0]  # with its class, if it has one
        if f"tests/{path.as_posix()}::{name}" in slow:
            item.add_marker("slow")
        if starts_in_another_way(item) and not {path.name, name} & EACH_WAY:
            item.add_marker("nightly")


def pytest_runtest_setup(item):
    """Skip a test that needs what is missing here; a `Kind` of processes needs worker processes."""
    needed = {name for mark in item.iter_markers("needs") for name in mark.args}
    case = item.callspec.params if hasattr(item, "callspec") else {}
    if any(getattr(value, "processes", False) for value in case.values()):
        needed.add("worker processes")
    if missing := sorted(name for name in needed if not HERE[name]):
        pytest.skip(f"needs {' and '.join(missing)}")
    if module := sys.modules.get("prepared"):  # before its fixtures count what there is
        module.Prepared.replace_ended()


def pytest_collection_finish():
    """Leave what is there before the first test, torch's modules above all, out of collections."""
    gc.collect()
    gc.freeze()


def cpu_seconds():
    """CPU time of this process, of all that it has started and that have ended, and of `Prepared`.

    A prepared interpreter ends with the last test, which has not used what the others have.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    module = sys.modules.get("prepared")
    return own + (module.Prepared.cpu_seconds() if module else 0.0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Measure a test, if that is asked for; of several processes, each appends whole lines."""
    file, before = item.config.getoption("cpu_times"), cpu_seconds()
    done = yield
    if file:
        with open(file, "a", encoding="utf-8") as times:
            times.write(f"{cpu_seconds() - before:.2f} {item.nodeid}\n")
    return done


RAISED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Remember that a test raised: its traceback keeps alive what it was working with."""
    if call.excinfo is not None:
        item.stash[RAISED] = True
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def cuda_started(request):
    """Start CUDA, if a test will use it, before anything is counted: it stays until the end."""
    torch = sys.modules.get("torch")
    wanted = any("gpu" in item.path.parts for item in request.session.items)
    if wanted and torch is not None and torch.cuda.is_available():
        torch.zeros(1, device="cuda").cpu()


WITNESS: Witness | None = None


@pytest.fixture(scope="session", autouse=True)
def watched_names():
    """Have a process look on who makes names in /dev/shm, where there is one."""
    global WITNESS
    if HAS_PROC and SHM.is_dir():
        WITNESS = Witness(SHM, MARK)
    yield
    if WITNESS is not None:
        WITNESS.close()


@pytest.fixture(scope="session", autouse=True)
def tracker_started():
    """Start what multiprocessing starts once in a process that spawns others, if tests will."""
    if os.environ.get("CSEQ_TESTS_START") == "spawn" and os.name == "posix":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fail a test that leaves a process, thread, descriptor, shared mapping or /dev/shm name."""
    before = take_census()
    yield
    if request.node.stash.get(RAISED, False):
        return
    leaks = settled_leaks(before)
    if leaks:
        report = leaks.report()
        end_all(leaks.processes)
        pytest.fail(report, pytrace=False)


def complaints(lines):
    """Return the lines of a log that a slow start of workers does not explain."""
    return [line for line in lines if not line.startswith(SLOW_START)]


class RunScript(Protocol):
    """The type of `run_anew`."""

    def __call__(self, source, *args, **environment): ...


@pytest.fixture
def run_anew(tmp_path):
    """Return a function that runs a user's script, `run_anew(source, *args, **environment)`.

    It runs in a new interpreter, in the test's temporary folder, warnings being errors, and
    returns when everybody who holds its output is gone. One that hangs is made to show the
    stacks of all its threads, and fails the test. What it is told of a busy machine is left out of
    its standard error.
    """

    def run(source, *args, **environment):
        script = tmp_path / "script.py"
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, "-W", "error", "-X", "faulthandler", str(script), *args]
        with (
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": import_path()} | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
            killer_of(process) as kill,
        ):
            try:
                output, errors = process.communicate(timeout=HANG)
            except subprocess.TimeoutExpired:
                pytest.fail(stacks_of(process, kill), pytrace=False)
        return at_ease(subprocess.CompletedProcess(command, process.returncode, output, errors))

    return run


def at_ease(done):
    """Leave out of a script's standard error what it is told of a busy machine."""
    done.stderr = "".join(complaints(done.stderr.splitlines(keepends=True)))
    return done


def prepared_with(module):
    """Give an interpreter that has imported a module, for scripts that would each import it anew.

    None where there is no such module, or no fork that such a process is sure to survive.
    """
    if find_spec(module) is None or not hasattr(os, "fork") or sys.platform == "darwin":
        yield None
        return
    from prepared import Prepared

    interpreter = Prepared(module, environment=os.environ | {"PYTHONPATH": import_path()})
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session")
def with_numpy():
    """An interpreter that has imported numpy."""
    yield from prepared_with("numpy")


@pytest.fixture(scope="session")
def with_torch():
    """An interpreter that has imported torch."""
    yield from prepared_with("torch")


@pytest.fixture
def run_script(tmp_path, run_anew, with_numpy):
    """Return a function as `run_anew` is, for scripts whose interpreter may have numpy ready.

    Each runs as `__main__` of a process of its own, in which numpy is imported and nothing else has
    happened. What it starts anew (a spawned worker, a program) has nothing ready.
    """
    return run_anew if with_numpy is None else runner_of(with_numpy, tmp_path)


@pytest.fixture
def run_prepared(tmp_path, run_anew, with_torch):
    """Return a function as `run_script` is, for scripts whose interpreter may have torch ready."""
    return run_anew if with_torch is None else runner_of(with_torch, tmp_path)


class RunCommand(Protocol):
    """The type of `run_command`."""

    def __call__(self, folder, *args, **environment): ...


@pytest.fixture
def run_command(with_torch):
    """Return a function that runs the command, in a folder: `cseq` with these arguments.

    As `python -m cseq`, in a process that may have torch ready.
    """

    def run(folder, *args, **environment):
        command = ["-m", "cseq", *args]
        environment = os.environ | {"PYTHONPATH": import_path()} | environment
        if with_torch is not None:
            return at_ease(with_torch.run(command, folder, environment, HANG))
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def runner_of(prepared, folder):
    """Return a function that runs scripts by a prepared interpreter, in a folder."""

    def run(source, *args, **environment):
        script = folder / "script.py"
        script.write_text(source, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": import_path()} | environment
        return at_ease(prepared.run([str(script), *args], folder, environment, HANG))

    return run


@pytest.fixture(scope="session")
def debug_build():
    """Build the package a second time, with fault points, and return the folder to import from.

    It stays for the next run, which builds what has changed, if anything. Of test processes that
    run at the same time, one builds and the others wait. These find nothing changed and write
    nothing, since scripts of the first one may be importing the package by then.
    """
    spec = find_spec("cseq")
    root = Path(spec.origin).resolve().parents[1] if spec and spec.origin else Path()
    if not (root / "setup.py").exists():
        pytest.skip("tests run on an installed package, whose sources are not here")
    fcntl = pytest.importorskip("fcntl")
    faulthandler.cancel_dump_traceback_later()  # the hang guard: a compiler may take longer
    tree = root / "build" / f"faults-{sys.implementation.cache_tag}"
    tree.mkdir(parents=True, exist_ok=True)
    with open(tree / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
        for old in (tree / "cseq").rglob("*.p[yx]*"):
            if not (root / old.relative_to(tree)).exists():
                old.unlink()
        stamp = tree / "built"
        copy = partial(copy_changed, stamp=stamp)
        shutil.copytree(
            root / "cseq", tree / "cseq", ignore=built, copy_function=copy, dirs_exist_ok=True
        )
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            copy(str(root / name), str(tree / name))
        numpy = version("numpy")
        if stamp.exists() and stamp.read_text(encoding="ascii") == numpy:
            return tree
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=tree,
            env=os.environ | {"CSEQ_DEBUG": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stamp.write_text(numpy, encoding="ascii")
    return tree


def copy_changed(source, target, stamp):
    """Copy a file if the target is not the same; what is stamped as built is so no more then."""
    if not os.path.exists(target) or not filecmp.cmp(source, target, shallow=False):
        stamp.unlink(missing_ok=True)
        shutil.copy2(source, target)


@contextlib.contextmanager
def killer_of(process):
    """Give what kills a process; on Windows, with all that it has started by then.

    There, threads read its output, and closing a pipe waits for them, and so for all who hold it.
    """
    if os.name != "nt":
        yield process.kill
        return
    import ctypes

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
    handle = ctypes.c_void_p(int(cast("Any", process)._handle))
    try:
        if not kernel.AssignProcessToJobObject(job, handle) and process.poll() is None:
            raise OSError(f"no job: error {ctypes.get_last_error()}")  # type: ignore[attr-defined,unused-ignore]
        yield lambda: kernel.TerminateJobObject(job, 1)
    finally:
        kernel.CloseHandle(job)


def stacks_of(process, kill):
    """Make a script that hangs print where it does, and end it."""
    process.send_signal(
        signal.SIGTERM if os.name == "nt" else signal.SIGABRT
    )  # faulthandler answers
    try:
        output, errors = process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired as error:  # what it started hangs too and holds its output
        kill()
        output, errors = as_text(error.output), as_text(error.stderr)
        if os.name == "nt":
            output, errors = process.communicate()
    return f"the script, or what it started, hangs\n--- output\n{output}\n--- errors\n{errors}"


def as_text(output):
    """Decode what TimeoutExpired carries, which is bytes even of a process opened as text."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


@pytest.fixture
def arena():
    """An arena, closed after the test."""
    from cseq.memory.arena import Arena

    arena = Arena()
    yield arena
    arena.close()


@pytest.fixture
def writer(arena):
    """A writer that has begun with slot 0 of `arena`."""
    from slots import writer_of

    writer = writer_of(arena)
    yield writer
    writer.room.close()
