"""Every test's fixtures: a check that it leaves nothing behind, and separate runs of scripts.

A test fails that leaves a process, a thread, a file descriptor, a shared mapping or a name in
`/dev/shm`. What exits alone is awaited (a thread is joined, a process polled through its pidfd)
for at most `GRACE` seconds; the garbage collector runs before anything counts as a leak. Processes,
descriptors and mappings are read from `/proc`; without it, threads are checked, and on POSIX files
without a name.
"""

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
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from checkout import import_path
from witness import UNCOUNTED, Witness, descends, is_of

with contextlib.suppress(ImportError):
    import hypothesis

    # The clock judges no test, and the leak check may cover all examples of a test.
    allowed = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("cseq", deadline=None, suppress_health_check=allowed)
    hypothesis.settings.load_profile("cseq")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background process is started like this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Seconds in which what is about to end must end.
GRACE = 10.0
# Seconds after which a script must show where it hangs; below faulthandler_timeout.
HANG = 100.0

MAPS, SHM = Path("/proc/self/maps"), Path("/dev/shm")
# Wine's programs see Linux's /proc.
HAS_PROC = os.name == "posix" and MAPS.exists()

# The names for `pytest.mark.needs`, and whether this system has each one.
HERE = {
    "POSIX": os.name == "posix",
    "Linux": sys.platform == "linux",
    "fork": hasattr(os, "fork"),
    # Whoever sets the variable accepts slow processes.
    "quick processes": hasattr(os, "fork") or "CSEQ_TESTS_START" in os.environ,
}

# The log of workers on a busy machine may contain this.
SLOW_START = "nothing has arrived from the workers"

# Processes inherit this, so a process whose parent is gone, and which init adopted, is still known.
MARK = f"CSEQ_TESTS_{os.getpid()}"
os.environ[MARK] = "1"

# A mapping that processes share, of memory or of a file that has no name (any more).
NAMELESS = rb"(?:/memfd:|/dev/zero|/dev/shm/|\(deleted\))"
SHARED = re.compile(rb"^(\S+ ..[x-]s .*" + NAMELESS + rb".*)$", re.MULTILINE)


class Leaks(NamedTuple):
    """Everything that exists after a test and did not before."""

    processes: list[int]
    threads: list[threading.Thread]
    others: list[str]

    def __bool__(self):
        return any(self)

    def report(self):
        """List each thing that was left, one a line."""
        lines = [f"process {pid}: {command_of(pid)}" for pid in self.processes]
        lines += [f"thread {thread!r}" for thread in self.threads]
        return "\n  ".join(["the test left behind:", *lines, *self.others])


def take_census():
    """Count what this process holds, and the machine's processes, in less than a millisecond."""
    # A native thread that called Python is no thread of the test.
    native = threading._DummyThread
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, native)]
    found = {"threads": threads}
    if HAS_PROC:
        found["processes"] = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        found |= {"mappings": shared_mappings(), "descriptors": descriptors(), "names": shm_names()}
    elif os.name == "posix":
        found["descriptors"] = nameless()
    return defaultdict(frozenset, {kind: frozenset(those) for kind, those in found.items()})


def descriptors():
    """Return open descriptors and what each stands for; a driver's devices are the driver's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            # The descriptor that listed the folder is gone.
            what = os.readlink(f"/proc/self/fd/{name}")
            if not what.startswith("/dev/nvidia"):
                yield int(name), what


def nameless():
    """Return open nameless files, like cseq's shared memory on macOS. Torch leaves sockets."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            # The descriptor that listed the folder is gone.
            found = os.fstat(int(name))
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                yield int(name), f"a file without a name, {found.st_size} bytes"


def shared_mappings():
    """Return shared mappings of nameless memory: a slot of the arena, a ring, an unlinked file."""
    maps = MAPS.read_bytes()
    lines = SHARED.findall(maps)
    if b" /dev/nvidia" in maps:
        # A CUDA driver keeps page-locked memory, which is /dev/zero.
        lines = [line for line in lines if b" /dev/zero" not in line]
    return [line.decode() for line in lines]


def shm_names():
    """Return the names in /dev/shm, where a test must not leave any."""
    return set(os.listdir(SHM) if SHM.is_dir() else ())


def leaks_since(before):
    """Compare now with before."""
    now = take_census()
    new = defaultdict(frozenset, {kind: those - before[kind] for kind, those in now.items()})
    processes = sorted(pid for pid in new["processes"] if descends(pid, os.getpid(), MARK))
    others = [f"descriptor {number}: {what}" for number, what in new["descriptors"]]
    others += [f"mapping {line}" for line in new["mappings"]]
    others += [f"name {SHM / name}" for name in new["names"] if is_my_file(SHM / name)]
    return Leaks(processes, sorted(new["threads"], key=str), sorted(others))


def is_my_file(path):
    """Return whether a file exists that a process of this test made; see `Witness`.

    A file that nobody has open, and whose maker nobody saw, is another program's.
    """
    if path.name.startswith(UNCOUNTED) or not path.exists():
        return False
    seen = WITNESS and WITNESS.saw_us(path.name)
    return bool(is_of(path, os.getpid(), MARK) if seen is None else seen)


def names_from_now():
    """Return a function that returns the names in /dev/shm that these tests made after now."""
    before = shm_names()
    return lambda: {name for name in shm_names() - before if is_my_file(SHM / name)}


def command_of(pid):
    """Return the command line of a process; a zombie has only its state."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words).strip()[:200] or "(zombie)"
    return "(gone)"


def let_end(leaks, deadline):
    """Wait until these processes and threads have ended, or until the deadline."""
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
    """Wait until a thread has ended, or until the deadline; it may still be starting."""
    while time.monotonic() < deadline:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:
            # `threading` lists it, but cannot join it yet.
            time.sleep(0.001)
        else:
            return


def settled_leaks(before):
    """Return what is left after a garbage collection, and after all that ends has ended."""
    leaks = leaks_since(before)
    if not leaks:
        return leaks
    # This comes only now: with torch in memory, it takes longer than most tests.
    gc.collect()
    leaks = leaks_since(before)
    if not leaks:
        # The next collection visits only new objects. If a live object becomes garbage later, the
        # next census counts what it holds as older than its test.
        gc.freeze()
    else:
        let_end(leaks, time.monotonic() + GRACE)
        if "cseq.runs" in sys.modules:
            # Dropped objects close there.
            sys.modules["cseq.runs"].await_closings(GRACE)
        gc.collect()
        leaks = leaks_since(before)
    return leaks


def end_all(processes):
    """Kill what a test left running, so that it disturbs no other test."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def pytest_addoption(parser):
    """Add `--cpu-times`; see slow.py."""
    parser.addoption("--cpu-times", help="append the CPU time of each test to this file")


# Tests that start workers by every method even in `make test`: of the methods themselves, and of
# what users see first.
EACH_WAY = {
    *("test_launcher.py", "test_launcher_server.py", "test_supervisor.py"),
    *("test_multiprocessing.py", "test_same_as_test_mode", "test_scripts_without_ceremony"),
    "test_other_start_methods",
}


def starts_in_another_way(item):
    """Return whether a case starts workers by a method that is not the quickest."""
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
    """Mark the tests in slow.txt, and start methods that are left to `make check-nightly`."""
    listed = Path(__file__).with_name("slow.txt")
    slow = set(listed.read_text(encoding="utf-8").split()) if listed.exists() else set()
    for item in items:
        path = Path(os.path.relpath(item.path, listed.parent))
        # The name includes its class, if any.
        name = item.nodeid.partition("::")[2].partition("[")[0]
        if f"tests/{path.as_posix()}::{name}" in slow:
            item.add_marker("slow")
        if starts_in_another_way(item) and not {path.name, name} & EACH_WAY:
            item.add_marker("nightly")


def pytest_runtest_setup(item):
    """Skip a test if what it needs is missing."""
    needed = {name for mark in item.iter_markers("needs") for name in mark.args}
    if missing := sorted(name for name in needed if not HERE[name]):
        pytest.skip(f"needs {' and '.join(missing)}")
    if module := sys.modules.get("prepared"):
        # This comes before the test's fixtures count what exists.
        module.Prepared.replace_ended()


def pytest_collection_finish():
    """Exclude all objects from before the first test, mainly torch's modules, from collections."""
    gc.collect()
    gc.freeze()


def cpu_seconds():
    """Return the CPU time of this process, of all its children that have ended, and of `Prepared`.

    A prepared interpreter ends with the last test, which has not used the time of the others.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    module = sys.modules.get("prepared")
    return own + (module.Prepared.cpu_seconds() if module else 0.0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Measure a test if requested; of several processes, each appends whole lines."""
    file, before = item.config.getoption("cpu_times"), cpu_seconds()
    done = yield
    if file:
        with open(file, "a", encoding="utf-8") as times:
            times.write(f"{cpu_seconds() - before:.2f} {item.nodeid}\n")
    return done


RAISED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Remember that a test raised: its traceback keeps its objects alive."""
    if call.excinfo is not None:
        item.stash[RAISED] = True
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def what_stays(request):
    """Start what stays until the end, if a test will use it, before anything is counted.

    This is CUDA, or multiprocessing's tracker, in a process whose tests will spawn others.
    """
    torch = sys.modules.get("torch")
    wanted = any("gpu" in item.path.parts for item in request.session.items)
    if wanted and torch is not None and torch.cuda.is_available():
        torch.zeros(1, device="cuda").cpu()
    if os.environ.get("CSEQ_TESTS_START") == "spawn" and os.name == "posix":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()


WITNESS = None


@pytest.fixture(scope="session", autouse=True)
def watched_names():
    """Let a process watch who makes names in /dev/shm, where it exists; yield `names_from_now`."""
    global WITNESS
    if HAS_PROC and SHM.is_dir():
        WITNESS = Witness(SHM, MARK)
    yield names_from_now
    if WITNESS is not None:
        WITNESS.close()


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


@pytest.fixture
def run_anew(tmp_path):
    """Return a function that runs a user's script, `run_anew(source, *args, **environment)`.

    It runs in a new interpreter, in the test's temporary folder, with warnings as errors, and
    returns when no process holds its output. A script that hangs must show the stacks of all its
    threads, and fails the test. Messages about a busy machine are removed from its standard error.
    """

    def run(source, *args, **environment):
        script = tmp_path / "script.py"
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, "-W", "error", "-X", "faulthandler", str(script), *args]
        ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"cwd": tmp_path, "env": variables(environment), "text": True, **ends}
        with subprocess.Popen(command, **options) as process, killer_of(process) as kill:
            try:
                output, errors = process.communicate(timeout=HANG)
            except subprocess.TimeoutExpired:
                pytest.fail(stacks_of(process, kill), pytrace=False)
        return at_ease(subprocess.CompletedProcess(command, process.returncode, output, errors))

    return run


def variables(environment):
    """Return this process's variables, the tested cseq's place, and others."""
    return os.environ | {"PYTHONPATH": import_path()} | environment


def at_ease(done):
    """Remove messages about a busy machine from a script's standard error."""
    done.stderr = "".join(complaints(done.stderr.splitlines(keepends=True)))
    return done


def prepared_with(module):
    """Yield an interpreter that has imported a module, for scripts that would each import it.

    It is None without that module, or without a fork that such a process surely survives.
    """
    if find_spec(module) is None or not hasattr(os, "fork") or sys.platform == "darwin":
        yield None
        return
    from prepared import Prepared

    interpreter = Prepared(module, environment=variables({}))
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session")
def with_numpy():
    """Return an interpreter that has imported numpy."""
    yield from prepared_with("numpy")


@pytest.fixture(scope="session")
def with_torch():
    """Return an interpreter that has imported torch."""
    yield from prepared_with("torch")


@pytest.fixture
def run_script(tmp_path, run_anew, with_numpy):
    """Return a function like `run_anew`, for scripts whose interpreter may have imported numpy.

    Each script runs as `__main__` of its own process, in which numpy is imported and nothing else
    has happened. New processes that it starts (a spawned worker, a program) have imported nothing.
    """
    return run_anew if with_numpy is None else runner_of(with_numpy, tmp_path)


@pytest.fixture
def run_prepared(tmp_path, run_anew, with_torch):
    """Return a function like `run_script`, for scripts whose interpreter may have torch ready."""
    return run_anew if with_torch is None else runner_of(with_torch, tmp_path)


@pytest.fixture
def run_command(with_torch):
    """Return a function that runs the command `cseq` with these arguments in a folder.

    It runs as `python -m cseq`, in a process that may have imported torch.
    """

    def run(folder, *args, **environment):
        command, env = ["-m", "cseq", *args], variables(environment)
        if with_torch is not None:
            return at_ease(with_torch.run(command, folder, env, HANG))
        options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, *command], check=False, **options)

    return run


def runner_of(prepared, folder):
    """Return a function that runs scripts in a prepared interpreter, in a folder."""

    def run(source, *args, **environment):
        script = folder / "script.py"
        script.write_text(source, encoding="utf-8")
        return at_ease(prepared.run([str(script), *args], folder, variables(environment), HANG))

    return run


@pytest.fixture(scope="session")
def debug_build():
    """Build the package a second time, with fault points, and return the folder for imports.

    It stays for the next run, which builds only changes. Of simultaneous test processes, one builds
    and the others wait. These find no change and write nothing, as scripts of the first one may
    already import the package.
    """
    spec = find_spec("cseq")
    root = Path(spec.origin).resolve().parents[1] if spec and spec.origin else Path()
    if not (root / "setup.py").exists():
        pytest.skip("tests run on an installed package, whose sources are not here")
    fcntl = pytest.importorskip("fcntl")
    # The hang guard must wait, as a compiler may take longer.
    faulthandler.cancel_dump_traceback_later()
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
        options = {"ignore": built, "copy_function": copy, "dirs_exist_ok": True}
        shutil.copytree(root / "cseq", tree / "cseq", **options)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            copy(str(root / name), str(tree / name))
        numpy = version("numpy")
        if stamp.exists() and stamp.read_text(encoding="ascii") == numpy:
            return tree
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        silent = dict.fromkeys(["stdout", "stderr"], subprocess.DEVNULL)
        debug = os.environ | {"CSEQ_DEBUG": "1"}
        subprocess.run(command, cwd=tree, env=debug, check=True, **silent)
        stamp.write_text(numpy, encoding="ascii")
    return tree


def copy_changed(source, target, stamp):
    """Copy a file if the target differs; a new file no longer counts as built."""
    if not os.path.exists(target) or not filecmp.cmp(source, target, shallow=False):
        stamp.unlink(missing_ok=True)
        shutil.copy2(source, target)


@contextlib.contextmanager
def killer_of(process):
    """Return what kills a process; on Windows, with all that it has started by then.

    There, threads read its output, and closing a pipe waits for them, and thus for every holder of
    the pipe.
    """
    if os.name != "nt":
        yield process.kill
        return
    import ctypes

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
    handle = ctypes.c_void_p(int(process._handle))
    try:
        if not kernel.AssignProcessToJobObject(job, handle) and process.poll() is None:
            raise OSError(f"no job: error {ctypes.get_last_error()}")
        yield lambda: kernel.TerminateJobObject(job, 1)
    finally:
        kernel.CloseHandle(job)


def stacks_of(process, kill):
    """Make a script that hangs print its stacks, and end it."""
    # faulthandler prints the stacks.
    process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGABRT)
    try:
        output, errors = process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired as error:
        # A process that it started hangs, too, and holds its output.
        kill()
        output, errors = as_text(error.output), as_text(error.stderr)
        if os.name == "nt":
            output, errors = process.communicate()
    return f"the script, or what it started, hangs\n--- output\n{output}\n--- errors\n{errors}"


def as_text(output):
    """Decode the output of TimeoutExpired, which is bytes even for a process opened as text."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


@pytest.fixture
def arena():
    """Return an arena, closed after the test."""
    from cseq.memory.arena import Arena

    arena = Arena()
    yield arena
    arena.close()


@pytest.fixture
def writer(arena):
    """Return a writer that has begun with slot 0 of `arena`."""
    from slots import writer_of

    writer = writer_of(arena)
    yield writer
    writer.room.close()
