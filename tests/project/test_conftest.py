"""The leak check itself: each kind of leak fails its test, and nothing else does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prepared import Prepared

TESTS = Path(__file__).parents[1]
CONFTEST = (TESTS / "conftest.py").read_text(encoding="utf-8")
IMPATIENT = CONFTEST.replace("GRACE = 10.0", "GRACE = 0.0")

needs_proc = pytest.mark.needs("Linux")

LEAKS = """
import conftest, mmap, os, pathlib, subprocess, sys, tempfile, threading, time
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

def test_shm_of_a_dead_process():
    script = "import os, pathlib; p = pathlib.Path(f'/dev/shm/torch_{os.getpid()}_dead')\\n" + (
        "p.touch(); print(p, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as maker:
        keep.append(pathlib.Path(maker.stdout.readline().decode().strip()))
        assert conftest.is_my_file(keep[-1])  # and from now on, when its maker has ended
        maker.communicate(b"\\n")

def test_last_clean():
    keep.pop().unlink()
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
    "shm_of_a_dead_process": "_dead",
}

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


def run(pytester, conftest, source):
    """Run tests under a conftest, in a separate process."""
    pytester.makeini(
        f"[pytest]\nfilterwarnings = error\npythonpath = {(TESTS / 'helpers').as_posix()}"
    )
    pytester.makeconftest(conftest)
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@needs_proc
def test_leaks_fail_their_tests(pytester):
    """Threads, descriptors, processes, zombies, orphans, mappings and names that remain are named.

    A leaked process does not outlive its report, so it disturbs no other test.
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


def test_clean_tests_pass(pytester):
    """Fixtures with a wider scope, hypothesis, garbage and what is about to end are no leaks."""
    run(pytester, CONFTEST, CLEAN).assert_outcomes(passed=5, xfailed=1)


# Another program's actions in /dev/shm: it holds a name open, and leaves a second one.
PROGRAM = """
import mmap, os, sys
asked, made, *paths = sys.argv[1:]
open(asked).close()
with open(paths[0], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
open(paths[1], "x").close()
open(made, "w").close()
sys.stdin.read()
for path in paths:
    os.unlink(path)
"""
WHILE_IT_WORKS = """
import os

def test_its_names(watched_names):
    names_left = watched_names()
    open(os.environ["ASKED"], "w").close()
    open(os.environ["MADE"]).close()
    assert all(map(os.path.exists, os.environ["PATHS"].split()))
    assert names_left() == set()

def test_my_name(watched_names):
    names_left = watched_names()
    path = os.environ["PATHS"].split()[0] + "-mine"
    with open(path, "x"):
        assert names_left() == {os.path.basename(path)}
    os.unlink(path)
"""


@needs_proc
def test_names_of_another_program_are_no_leaks(pytester, monkeypatch):
    """Another program of the same user may hold names in /dev/shm open, and leave names."""
    asked, made = (str(pytester.path / name) for name in ("asked", "made"))
    paths = [f"/dev/shm/{name}_{os.urandom(4).hex()}x" for name in ("psm", "left")]
    for name in (asked, made):
        os.mkfifo(name)
    command = [sys.executable, "-c", PROGRAM, asked, made, *paths]
    for name, value in {"ASKED": asked, "MADE": made, "PATHS": " ".join(paths)}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        run(pytester, IMPATIENT, WHILE_IT_WORKS).assert_outcomes(passed=2)


def test_cpu_times_need_no_sysconf(monkeypatch):
    """Windows has neither it nor prepared interpreters, and each test asks for their times."""
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(Prepared, "running", [])
    assert Prepared.cpu_seconds() == 0


@pytest.mark.needs("fork")
def test_a_prepared_script_is_as_one_in_a_new_interpreter(run_anew, run_script, run_prepared):
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


@pytest.mark.needs("fork")
def test_a_prepared_interpreter_that_ended_is_replaced(tmp_path):
    """The test that notices it fails, and says why; the next test has another interpreter."""
    script = tmp_path / "script.py"
    script.write_text("print(json)", encoding="utf-8")
    interpreter = Prepared("json", environment=os.environ)
    interpreter.process.kill()
    interpreter.process.wait()
    with pytest.raises(ChildProcessError, match="has ended with -9"):
        interpreter.run([str(script)], tmp_path, os.environ, 10.0)
    Prepared.replace_ended()
    done = interpreter.run([str(script)], tmp_path, os.environ, 10.0)
    assert "NameError" in done.stderr
    interpreter.close()
