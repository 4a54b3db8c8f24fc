"""The leak check itself: each kind of leak fails its test, and nothing else does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript
    from prepared import Prepared

SLOW_PY = Path(__file__).parents[1] / "slow.py"
CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8")
IMPATIENT = CONFTEST.replace("GRACE = 10.0", "GRACE = 0.0")

needs_proc = pytest.mark.needs("Linux")

LEAKS = """
import mmap, os, pathlib, subprocess, sys, tempfile, threading, time
keep = []

def await_command(pid):
    # In the middle of an exec a process has none, like a zombie.
    while b"sleep" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
        time.sleep(0.001)

def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_descriptor():
    os.open(os.devnull, os.O_RDONLY)

def test_pipe():
    keep.extend(os.pipe())

def test_child():
    keep.append(subprocess.Popen(["sleep", "1000"]))
    await_command(keep[-1].pid)

def test_zombie():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def test_orphan():
    script = "import os; print(os.fork() or (os.close(1), os.execvp('sleep', ['sleep', '1000'])))"
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    await_command(int(done.stdout))

def test_mapping():
    descriptor = os.memfd_create("slots")
    os.ftruncate(descriptor, 4096)
    keep.append(mmap.mmap(descriptor, 4096))
    os.close(descriptor)

def test_private_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        keep.append(mmap.mmap(file.fileno(), 4096))

def test_shm():
    path = pathlib.Path(f"/dev/shm/torch_{os.getpid()}_test")
    path.touch()
    keep.append(path)

def test_last_clean():
    keep.pop().unlink()
"""
WORDS = {
    "thread": "thread <Thread(",
    "descriptor": "descriptor ",
    "pipe": "pipe:[",
    "child": "sleep 1000",
    "zombie": "(zombie)",
    "orphan": "sleep 1000",
    "mapping": "/memfd:slots",
    "private_file": "(deleted)",
    "shm": "name /dev/shm/torch_",
}

NAMELESS = """
import os, tempfile

def test_file():
    with tempfile.TemporaryFile() as file:
        os.dup(file.fileno())

def test_a_named_one():
    os.open(__file__, os.O_RDONLY)
"""

CLEAN = """
import os, pytest, subprocess, sys, tempfile, threading
from hypothesis import given, strategies

@pytest.fixture(scope="module")
def file():
    with tempfile.TemporaryFile() as file:
        yield file

def test_a_fixture_that_lives_longer(file):
    assert file

def test_everything_put_away(tmp_path, capfd):
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with open(tmp_path / "file", "w") as file:
        file.write("text")

@given(strategies.integers())
def test_a_property(number):
    assert number == number

class Circle:
    def __init__(self):
        self.me, self.ends = self, os.pipe()
    def __del__(self):
        for end in self.ends:
            os.close(end)

def test_garbage():
    Circle()

@pytest.mark.xfail(strict=True)
def test_a_traceback_that_keeps_a_pipe():
    circle = Circle()
    raise ValueError(circle)

def test_a_thread_and_a_process_about_to_end():
    ends = os.pipe()
    def close_last():
        subprocess.run([sys.executable, "-c", ""], check=True)
        for end in ends:
            os.close(end)
    threading.Thread(target=close_last).start()
"""

HANGS = '''
import os, subprocess

SCRIPT = """
import os, threading
def stuck():
    os.close(os.open("here", os.O_WRONLY))
    threading.Event().wait()
stuck()
"""

def test_it(run_anew, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "here")
    def first_wait(process, timeout):
        monkeypatch.undo()
        (tmp_path / "here").read_bytes()
        raise subprocess.TimeoutExpired("script", timeout)
    monkeypatch.setattr(subprocess.Popen, "communicate", first_wait)
    run_anew(SCRIPT)
'''


def run(pytester: pytest.Pytester, conftest: str, source: str) -> pytest.RunResult:
    """Run tests under a conftest, in a process of their own."""
    pytester.makeini("[pytest]\nfilterwarnings = error")
    pytester.makeconftest(conftest)
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.needs("POSIX")
def test_leaks_without_proc(pytester: pytest.Pytester) -> None:
    """Shared memory is found on macOS, too; what a library may open there is not looked at."""
    without = re.sub(r"^HAS_PROC = .*", "HAS_PROC = False", IMPATIENT, flags=re.MULTILINE)
    result = run(pytester, without, NAMELESS)
    result.assert_outcomes(passed=2, errors=1)
    assert "a file without a name, 0 bytes" in result.stdout.str()


@needs_proc
def test_leaks_fail_their_tests(pytester: pytest.Pytester) -> None:
    """Threads, descriptors, processes, zombies, orphans, mappings and names that stay are named.

    A leaked process does not outlive the report of it, so it disturbs no other test.
    """
    result = run(pytester, IMPATIENT, LEAKS)
    result.assert_outcomes(passed=len(WORDS) + 1, errors=len(WORDS))
    reports = re.split(r"ERROR at teardown of test_(\w+) ", result.stdout.str())[1:]
    for name, report in zip(reports[::2], reports[1::2], strict=True):
        assert WORDS[name] in report
    # With CI in the environment, pytest prints each report twice.
    killed = set(re.findall(r"^ *process (\d+): sleep", result.stdout.str(), re.MULTILINE))
    assert len(killed) == 2
    for pid in killed:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or ") Z " in stat.read_text(encoding="utf-8")


def test_clean_tests_pass(pytester: pytest.Pytester) -> None:
    """Longer-lived fixtures, hypothesis, garbage and what is about to end are no leaks."""
    run(pytester, CONFTEST, CLEAN).assert_outcomes(passed=5, xfailed=1)


@pytest.mark.needs("POSIX")
def test_a_script_that_hangs_shows_its_stacks(pytester: pytest.Pytester) -> None:
    """`run_anew` ends a script that hangs, and shows at which line every thread was."""
    result = run(pytester, CONFTEST, HANGS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*hangs*", "* in stuck*"])


SLOW = """
import pytest

class TestClass:
    def test_slow(self): pass
    @pytest.mark.parametrize("case", "ab")
    def test_cases(self, case): pass

def test_slow(): pass
def test_quick(): pass
"""


def test_slow_tests_are_left_out(pytester: pytest.Pytester) -> None:
    """What slow.py makes of measured times is what `-m "not slow"` leaves out, in classes too."""
    tests = pytester.mkdir("tests")
    pytester.makeini("[pytest]\nmarkers = slow: left out")
    (tests / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tests / "test_all.py").write_text(SLOW, encoding="utf-8")
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "tests")
    pytester.runpytest_subprocess("--cpu-times=times", *plain).assert_outcomes(passed=5)
    measured = Path("times").read_text(encoding="utf-8").splitlines()
    names = [line.split(" ", 1)[1] for line in measured]
    slow_ones = [name for name in names if "::TestClass::" in name]
    assert len(slow_ones) == 3
    times = [f"{5.0 if name in slow_ones else 0.0} {name}\n" for name in names]
    Path("times").write_text("".join(times), encoding="utf-8")
    shutil.copy(SLOW_PY, tests)
    subprocess.run([sys.executable, tests / "slow.py", "times"], check=True)
    assert len((tests / "slow.txt").read_text(encoding="utf-8").split()) == 2
    result = pytester.runpytest_subprocess("-m", "not slow", *plain)
    result.assert_outcomes(passed=2, deselected=3)


@pytest.fixture(params=["anew", "script", "prepared"])
def run_in_a_way(
    request: pytest.FixtureRequest,
    run_anew: RunScript,
    run_script: RunScript,
    run_prepared: RunScript,
) -> RunScript:
    """Each of the fixtures that run scripts."""
    return {"anew": run_anew, "script": run_script, "prepared": run_prepared}[request.param]


@pytest.mark.needs("fork")
def test_all_output_of_a_script_is_waited_for(run_in_a_way: RunScript) -> None:
    """That of a process that it has left behind, too; however much it is."""
    done = run_in_a_way(
        "import os\n"
        "reader, writer = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(writer)\n"
        "    os.read(reader, 1)  # until the script has ended\n"
        "    print('x' * 300_000, end='')\n"
    )
    assert (done.stdout, done.stderr) == ("x" * 300_000, "")


@pytest.mark.needs("fork")
def test_a_prepared_script_is_as_one_in_a_new_interpreter(
    run_anew: RunScript, run_script: RunScript, run_prepared: RunScript
) -> None:
    """It has the same names, path, arguments, variables, folder, streams, errors and status."""
    left_out = ("__loader__", "numpy", "torch")
    source = (
        "import os, sys, warnings\n"
        f"names = {{n: str(v) for n, v in globals().items() if n not in {left_out}}}\n"
        "print(names, sys.argv, sys.path, os.getcwd(), os.environ['A'], sys.stdin.read())\n"
        "print('an error', file=sys.stderr)\n"
        "try:\n    warnings.warn('look')\nexcept UserWarning:\n    os.write(1, b'raised')\n"
        "class A:\n    x: int\n"
        "print(A.__annotations__, os.listdir('/dev/fd'))\n"
        "sys.exit(sys.modules['__main__'].__dict__ is not globals() or 3)\n"
    )
    expected = run_anew(source, "x", A="y")
    assert (expected.stderr, expected.returncode) == ("an error\n", 3)
    for run in (run_script, run_prepared):
        done = run(source, "x", A="y")
        assert done.stdout == expected.stdout
        assert (done.stderr, done.returncode) == ("an error\n", 3)
        assert "1 / 0" in run("1 / 0").stderr
        assert run("import os\nos.kill(os.getpid(), 9)").returncode == -9


@pytest.mark.needs("Linux")
def test_a_prepared_script_that_hangs_shows_its_stacks(
    with_numpy: Prepared | None, tmp_path: Path
) -> None:
    """It fails its test, and no other one: the next script runs."""
    assert with_numpy is not None
    script = tmp_path / "script.py"
    script.write_text("import threading\ndef stuck():\n    threading.Event().wait()\nstuck()\n")
    with pytest.raises(AssertionError, match=r"hangs(?s:.*) in stuck"):
        with_numpy.run([str(script)], tmp_path, os.environ, 0.1)
    script.write_text("print('well')")
    assert with_numpy.run([str(script)], tmp_path, os.environ, 60.0).stdout == "well\n"
