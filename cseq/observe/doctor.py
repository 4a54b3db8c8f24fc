"""``cseq doctor``: what is wrong with a machine or a container.

Each check is a function that returns findings; a finding that is not fine says what to do::

    examine(machine, modules, data) ──► [Finding, …] ──► lines() or JSON
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from io import FileIO
from os.path import join
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cseq._core import now_ns
from cseq.cgroup import ROOT, Folder, fields, groups, lines, number
from cseq.compute import VARIABLES, cores, variables
from cseq.compute import quota as quota_of
from cseq.errors import CseqError
from cseq.kinds import MPSequence
from cseq.memory.descriptors import anonymous_file
from cseq.memory.memory_limit import GIB, available_memory, oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["Finding", "Machine", "Rates", "examine", "judge_data", "report"]

FINE, WARNING, PROBLEM = "fine", "warning", "problem"
MARKS = {FINE: "✓", WARNING: "!", PROBLEM: "✗"}
PLAIN_MARKS = {FINE: "ok", WARNING: "! ", PROBLEM: "X "}  # for terminals without these signs

OLDEST_TORCH = (2, 4)
THROTTLED = 0.05  # part of the periods of a quota
PRESSED = 20.0  # per cent of the last 10 s in which some task waited for a core
LITTLE_MEMORY = 0.1  # part of what there is
SLOW_CLOCK = 250  # ns a reading, with the call of it
DESCRIPTORS = 20, 10  # of a manager, and of each worker
PROCESSES = 32, 4  # room for others, and for each core
SLOW_IMPORT = 5.0  # seconds
IMPORT_LIMIT = 60.0  # seconds
LOOKED_AT = 1000  # files
READING = 0.5  # seconds for each kind of reading
SMALL_READ, LARGE_READ = 4096, 1 << 20
SLOW_READS = 1000  # small reads a second, at random
SLOWER = 5  # times as many bytes come in a row, if small reads are what is slow
MEASURED = 0.3  # seconds for each size of batches
ROWS = 1_000_000
SLOW_START, SLOW_BATCH = 2.0, 50e-6  # seconds


class Finding(NamedTuple):
    """What a check has found.

    Attributes
    ----------
    about : str
        The check's name, which stays the same.
    level : 'fine', 'warning' or 'problem'
    text : str
    remedy : str
        What to do; empty where all is fine.
    """

    about: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """Where the checks look.

    Parameters
    ----------
    root : str or path
        Where ``proc`` and ``sys`` are.
    environ : mapping of str to str
    cores : int
        That the process may run on.
    """

    root: Folder = ROOT
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: int = field(default_factory=cores)


def examine(
    machine: Machine, modules: Sequence[str] = (), data: str | None = None
) -> Iterator[Finding]:
    """Make all checks, one after the other.

    Parameters
    ----------
    machine : Machine
    modules : sequence of str
        Their imports are timed.
    data : str, optional
        A file or a folder that is read from.

    Yields
    ------
    Finding
    """
    yield from look(machine)
    for module in modules:
        yield from imported(module)
    if data is not None:
        yield from read_data(data)
    yield from workers()


def look(machine: Machine) -> Iterator[Finding]:
    """Make the checks that take no time."""
    yield from versions()
    for check in (
        quota, pressure, memory, threads, clock, descriptors, processes, shared_memory
    ):  # fmt: skip
        yield from check(machine)


# -- Python and what is installed


def versions() -> Iterator[Finding]:
    """Look at the versions of what matters."""
    found = [f"Python {sys.version.split()[0]}", f"cseq {_version('cseq-loader')}"]
    found += [f"{name} {version}" for name in ("numpy", "torch") if (version := _version(name))]
    yield Finding("versions", FINE, ", ".join(found))
    torch = _version("torch")
    if torch and tuple(int(part) for part in torch.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding(
            "torch", WARNING, f"torch {torch} is not supported", f"install {oldest} or newer"
        )
    if "free-threading" in sys.version and getattr(sys, "_is_gil_enabled", bool)():
        yield Finding(
            "gil",
            WARNING,
            "this Python is free-threaded, but its GIL is on: threads take turns",
            "find the module that switches it on with `python -X gil=0 -W error -c 'import NAME'`",
        )


def _version(name: str) -> str | None:
    """Return the version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- cores


def quota(machine: Machine) -> Iterator[Finding]:
    """Compare the cores with what the control groups allow, and look whether they throttle."""
    most = quota_of(machine.root)
    total = os.cpu_count() or machine.cores
    if most is not None and most < machine.cores:
        workers = max(1, int(most) - 1)
        yield Finding(
            "cores",
            WARNING,
            f"{machine.cores} cores, but this container may use {most:g} of them at a time",
            f"give num_workers={workers} at most",
        )
    elif machine.cores == 1:
        yield Finding(
            "cores",
            WARNING,
            f"1 of {total} cores: the loop and the workers take turns on it",
            "let the process run on more cores (taskset, cpuset, the scheduler's options)",
        )
    else:
        text = f"{machine.cores} cores" + ("" if machine.cores == total else f" of {total}")
        yield Finding("cores", FINE, text)
    periods, throttled = _throttled(machine.root)
    if periods and throttled / periods > THROTTLED:
        yield Finding(
            "throttled",
            WARNING,
            f"the quota of this container stopped it in {throttled / periods:.0%} of the time "
            "slices so far",
            "start fewer workers, or ask for a larger quota",
        )


def _throttled(root: Folder) -> tuple[int, int]:
    """Return the periods of the narrowest quota, and in how many of them it was used up."""
    counts = [fields(join(group, "cpu.stat")) for group, _ in groups(root, "cpu", "", "")]
    seen = [(each.get("nr_throttled", 0), each.get("nr_periods", 0)) for each in counts]
    throttled, periods = max(seen, default=(0, 0))
    return periods, throttled


def pressure(machine: Machine) -> Iterator[Finding]:
    """Look whether tasks wait for cores at this moment."""
    for line in lines(join(machine.root, "proc/pressure/cpu")):
        kind, *pairs = line.split()
        share = float(dict(pair.split("=") for pair in pairs).get("avg10", 0))
        if kind == "some" and share > PRESSED:
            yield Finding(
                "pressure",
                WARNING,
                f"others compute here, too: in {share:.0f} % of the last 10 s, some task waited "
                "for a core",
                "leave them cores (fewer workers), or expect uneven times",
            )


# -- memory


def memory(machine: Machine) -> Iterator[Finding]:
    """Look at the memory that is left, and at processes that were killed for lack of it."""
    free = available_memory(machine.root)
    total = fields(join(machine.root, "proc/meminfo")).get("MemTotal:", 0) << 10
    if free is None or not total:
        yield Finding("memory", FINE, "memory: this system does not say how much is left")
        return
    limits = [
        limit
        for group, name in groups(machine.root, "memory", "memory.max", "memory.limit_in_bytes")
        if (limit := number(join(group, name))) is not None
    ]
    most = min([total, *limits])
    limited = f", limit of the container {most / GIB:.1f}" if most < total else ""
    text = f"memory: {free / GIB:.1f} GiB of {total / GIB:.1f} left{limited}"
    if free < LITTLE_MEMORY * most:
        yield Finding(
            "memory", WARNING, text, "give a smaller buffer or memory_limit, or fewer workers"
        )
    else:
        yield Finding("memory", FINE, text)
    killed = oom_kills(machine.root)
    if killed:
        yield Finding(
            "killed",
            WARNING,
            f"{killed} processes of this container were killed for lack of memory so far",
            "see `peak_rss` of stats().workers; fewer workers, or a larger limit",
        )


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Look whether shared memory needs a file system."""
    file, anonymous = anonymous_file("cseq-doctor")
    file.close()
    if anonymous or os.name == "nt" or sys.platform == "darwin":
        text = "shared memory is anonymous: the size of /dev/shm does not matter"
        yield Finding("shared memory", FINE, text)
        return
    import tempfile

    folder = tempfile.gettempdir()
    yield Finding(
        "shared memory",
        WARNING,
        f"this sandbox refuses memfd_create: batches lie in files in {folder} "
        f"({_file_system(folder, machine.root)})",
        "set TMPDIR to a folder in memory (tmpfs), or allow memfd_create",
    )


# -- limits of the process


def threads(machine: Machine) -> Iterator[Finding]:
    """Look for variables that make libraries of each worker compute with many threads."""
    for name in VARIABLES:
        value = machine.environ.get(name, "1")
        if value.isdigit() and int(value) > 1:
            yield Finding(
                "threads",
                WARNING,
                f"{name}={value} is set: each worker will compute with {value} threads",
                "unset it: cseq then sets 1 for workers, and the loop has all cores",
            )


def clock(
    machine: Machine, read: Callable[[], int] = now_ns, times: int = 1000
) -> Iterator[Finding]:
    """Measure what a reading of the clock takes."""
    best = min(_duration(read, times) for _ in range(5)) / times
    folder = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = " ".join(lines(join(machine.root, folder))) or "the system's"
    text = f"clock: {source}, {best:.0f} ns a reading"
    if best <= SLOW_CLOCK:
        yield Finding("clock", FINE, text)
        return
    yield Finding(
        "clock",
        WARNING,
        f"{text}: slow, and read a few times for each batch",
        "choose tsc, if the machine has it (kernel option clocksource=tsc)",
    )


def _duration(function: Callable[[], object], times: int) -> int:
    """Return the nanoseconds of some calls."""
    begun = time.perf_counter_ns()
    for _ in range(times):
        function()
    return time.perf_counter_ns() - begun


def descriptors(machine: Machine) -> Iterator[Finding]:
    """Compare the limit of descriptors with what workers on all cores take."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    base, each = DESCRIPTORS
    needed = base + each * machine.cores
    unlimited = soft == resource.RLIM_INFINITY
    text = f"descriptors: {'no limit' if unlimited else soft}"
    if unlimited or soft >= 2 * needed:
        yield Finding("descriptors", FINE, text)
        return
    yield Finding(
        "descriptors",
        PROBLEM if soft < needed else WARNING,
        f"{text} for this process; {machine.cores} workers take about {needed}",
        f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(4096, hard)}",
    )


def processes(machine: Machine) -> Iterator[Finding]:
    """Look how many more processes and threads the control groups allow."""
    left = []
    for group, name in groups(machine.root, "pids", "pids.max", "pids.max"):
        most, now = number(join(group, name)), number(join(group, "pids.current"))
        if most is not None and now is not None:
            left.append(most - now)
    base, each = PROCESSES
    if left and min(left) < base + each * machine.cores:
        yield Finding(
            "processes",
            PROBLEM if min(left) < machine.cores else WARNING,
            f"this container may have {max(0, min(left))} more processes and threads",
            "raise its limit of pids (docker run --pids-limit)",
        )


# -- imports


def imported(module: str, slow: float = SLOW_IMPORT) -> Iterator[Finding]:
    """Time the import of a module in a new process, and count the threads that it starts."""
    code = (
        "import importlib, os, sys, time\n"
        "begun = time.perf_counter()\n"
        "importlib.import_module(sys.argv[1])\n"
        "took = time.perf_counter() - begun\n"
        "tasks = '/proc/self/task'\n"
        "print()\n"
        "print(took, len(os.listdir(tasks)) - 1 if os.path.isdir(tasks) else 0)\n"
    )
    about = f"import {module}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, module],
            env={**os.environ, **variables(1, os.environ)},  # as that of workers
            capture_output=True, text=True, timeout=IMPORT_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding(
            about, PROBLEM, f"import {module} takes more than {IMPORT_LIMIT:.0f} s", "see why"
        )
        return
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding(
            about, PROBLEM, f"import {module} fails: {why}", f"install {module}, or mend it"
        )
        return
    took, started = done.stdout.split()[-2:]
    text = f"import {module} takes {float(took):.1f} s"
    if int(started):
        yield Finding(
            about,
            WARNING if float(took) > 1 else FINE,
            f"{text} and starts threads, so each worker imports it by itself",
            "import it inside of the functions that need it" if float(took) > 1 else "",
        )
    elif float(took) > slow:
        yield Finding(
            about,
            WARNING,
            f"{text}, once for all workers: the first batch comes after it",
            "import less of it, or keep one manager for all epochs",
        )
    else:
        yield Finding(about, FINE, f"{text}, once for all workers")


# -- data


class Rates(NamedTuple):
    """How fast some files were read: small reads a second at random, bytes a second in a row."""

    files: int
    at_random: float
    in_a_row: float


def read_data(path: str) -> Iterator[Finding]:
    """Read from a file or a folder, at random and in a row."""
    files = _files(path)
    if not files:
        what = "is empty" if os.path.isdir(path) else "does not exist"
        yield Finding("data", PROBLEM, f"{path} {what}, or no file in it can be read", "mount it")
        return
    rates = Rates(len(files), _read_at_random(files), _read_in_a_row(files))
    yield judge_data(path, _file_system(path, ROOT), rates)


def judge_data(path: str, kind: str, rates: Rates) -> Finding:
    """Say whether data are read fast enough.

    Parameters
    ----------
    path, kind : str
        Where they are, and the kind of its file system.
    rates : Rates
    """
    text = (
        f"{path} ({kind}, {rates.files} files looked at): {rates.at_random:.0f} reads of 4 kB a "
        f"second at random, {rates.in_a_row / 1e6:.0f} MB/s in a row"
    )
    if rates.at_random >= SLOW_READS:
        return Finding("data", FINE, text)
    if rates.in_a_row >= SLOWER * SMALL_READ * rates.at_random:
        remedy = "pack the samples into shards, and read them by blocks (cseq.Blocks)"
    else:
        remedy = "copy the data to a faster disk, or start more workers than cores"
    return Finding("data", WARNING, text, remedy)


def _files(path: str) -> list[tuple[str, int]]:
    """List a file, or the first ones in a folder, that can be read: paths and sizes."""
    places: Iterator[str] = (
        join(folder, name) for folder, _, names in os.walk(path) for name in sorted(names)
    )
    found = []
    for place in [path] if os.path.isfile(path) else places:
        with contextlib.suppress(OSError):  # it is gone by now
            size = os.path.getsize(place)
            if size and os.path.isfile(place) and os.access(place, os.R_OK):
                found.append((place, size))
        if len(found) == LOOKED_AT:
            break
    return found


def _read_at_random(files: Sequence[tuple[str, int]]) -> float:
    """Return how many small reads a second there are, each of some file."""
    chance = random.Random(0)
    count = 0
    begun = time.perf_counter()
    while time.perf_counter() < begun + READING:
        path, size = chance.choice(files)
        with _opened(path) as file:
            file.seek(chance.randrange(size) // SMALL_READ * SMALL_READ)
            file.read(SMALL_READ)
        count += 1
    return count / (time.perf_counter() - begun)


def _read_in_a_row(files: Sequence[tuple[str, int]]) -> float:
    """Return the bytes a second of large reads, of one file after the other."""
    count = 0
    begun = now = time.perf_counter()
    for path, _ in itertools.cycle(files):
        with _opened(path) as file:
            while now < begun + READING and (part := file.read(LARGE_READ)):
                count += len(part)
                now = time.perf_counter()
        now = time.perf_counter()
        if now >= begun + READING:
            break
    return count / (now - begun)


def _opened(path: str) -> FileIO:
    """Open a file, which is then not in the system's cache, where that can be asked for."""
    file = FileIO(path)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def _file_system(path: str, root: Folder) -> str:
    """Return the kind of the file system that a path is on."""
    best = "", "unknown file system"
    place = os.path.realpath(path)
    for line in lines(join(root, "proc/self/mounts")):
        _, mounted, kind, *_ = line.split()
        if os.path.commonpath([place, mounted]) == mounted and len(mounted) >= len(best[0]):
            best = mounted, kind
    return best[1]


# -- workers


class Rows:
    """An indexer of rows of `width` floats."""

    def __init__(self, width: int) -> None:
        self._table = np.zeros((64, width), np.float32)

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        batch: NDArray[np.float32] = self._table[indices % 64]
        return batch


def workers() -> Iterator[Finding]:
    """Run two worker processes, and measure what batches cost."""
    begun = time.perf_counter()
    try:
        rate, _ = _run(1, 32)
        started = time.perf_counter() - begun - MEASURED
        _, flow = _run(37_500, 32)  # 4.8 MB
    except (CseqError, OSError, MemoryError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [""])[0]
        yield Finding(
            "workers",
            PROBLEM,
            f"worker processes do not run: {type(error).__name__}: {why}",
            "see the message; MTSequence runs threads instead",
        )
        return
    text = (
        f"2 worker processes: {1e6 / rate:.1f} µs a small batch, {flow / 1e9:.1f} GB/s of large "
        f"ones, started and ended in {started:.2f} s"
    )
    if started > SLOW_START or 1 / rate > SLOW_BATCH:
        yield Finding(
            "workers",
            WARNING,
            text + ": slow",
            "see whether something else takes the cores, and try again",
        )
    else:
        yield Finding("workers", FINE, text)


def _run(width: int, batch_size: int) -> tuple[float, float]:
    """Return the batches and the bytes a second of two workers, from their first batch on."""
    count = 0
    with MPSequence(
        functools.partial(Rows, width), ROWS, 2, batch_size=batch_size, out_type="null", seed=0
    ).start() as batches:
        feed = iter(batches)
        next(feed)
        begun = now = time.perf_counter()
        for _ in feed:
            count += 1
            now = time.perf_counter()
            if now > begun + MEASURED:
                break
    rate = count / (now - begun)
    return rate, rate * width * batch_size * 4


# -- the report


def report(arguments: Sequence[str], data: str | None, *, as_json: bool) -> int:
    """Print what `examine` finds; return the exit status: 1 if there is a problem.

    Parameters
    ----------
    arguments : sequence of str
        Modules.
    data : str, optional
    as_json : bool
        A list of objects with the fields of `Finding`, in place of lines.
    """
    found = []
    for finding in examine(Machine(), arguments, data):
        found.append(finding)
        if not as_json:
            print(_line(finding), flush=True)  # noqa: T201
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))  # noqa: T201
    else:
        print(_summary(found))  # noqa: T201
    return int(any(finding.level == PROBLEM for finding in found))


def _line(finding: Finding) -> str:
    """Write a finding in a line."""
    marks = MARKS
    try:
        "".join(MARKS.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        marks = PLAIN_MARKS
    remedy = f": {finding.remedy}" if finding.remedy else ""
    return f" {marks[finding.level]} {finding.text}{remedy}"


def _summary(found: Sequence[Finding]) -> str:
    """Count what is not fine."""
    counts = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for word in (WARNING, PROBLEM)
        if (count := sum(finding.level == word for finding in found))
    ]
    return ", ".join(counts) or "nothing is wrong"
