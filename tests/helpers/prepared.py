"""Scripts in processes forked from an interpreter that has imported what they need.

An import of torch, or of numpy, costs more than most scripts that use it. `Prepared` starts an
interpreter that imports it once, and forks a process for each script; the script becomes its
`__main__`.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import ClassVar


class Prepared:
    """An interpreter that has imported modules, and runs scripts; warnings are errors.

    Each script has other variables than its `environment`.
    """

    running: ClassVar = []

    def __init__(self, *modules, environment):
        command = [sys.executable, "-W", "error", "-X", "faulthandler", __file__, *modules]
        ends = dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
        self.begin = partial(subprocess.Popen, command, env=dict(environment), text=True, **ends)
        self.process = self.begin()
        self.running.append(self)

    @classmethod
    def replace_ended(cls):
        """Restart the interpreters that have ended, for want of memory, for example."""
        for one in cls.running:
            if one.process.poll() is not None:
                one.end()
                one.process = one.begin()

    @classmethod
    def cpu_seconds(cls):
        """Return the CPU time of interpreters that run and their ended scripts; 0 without /proc."""
        total = 0.0
        for one in cls.running:
            with contextlib.suppress(FileNotFoundError):
                stat = Path(f"/proc/{one.process.pid}/stat").read_text(encoding="ascii")
                ticks = sum(map(int, stat.rpartition(")")[2].split()[11:15]))
                total += ticks / os.sysconf("SC_CLK_TCK")
        return total

    def run(self, command, folder, environment, patience):
        """Run a script, with arguments, until no process has its output; see `conftest.run_anew`.

        A module is `-m` and its name. A script that hangs shows its stacks, and fails.
        """
        names = [folder / ".output", folder / ".errors"]
        for name in names:
            os.mkfifo(name)
        ends = [os.open(name, os.O_RDONLY | os.O_NONBLOCK) for name in names]
        request = {"command": command, "folder": str(folder), "environment": dict(environment)}
        try:
            pid = self._ask(json.dumps({**request, "streams": [*map(str, names)]}))
            texts = [bytearray() for _ in ends]
            hangs = not read(ends, texts, patience)
            if hangs:
                # faulthandler prints the stacks.
                os.kill(pid, signal.SIGABRT)
                read(ends, texts, 10.0)
            code = self._answer()
        except BaseException:
            # The interpreter's next answer would not belong to the next request.
            self.process.kill()
            raise
        finally:
            for end, name in zip(ends, names, strict=True):
                os.close(end)
                name.unlink()
        output, errors = (text.decode(errors="replace") for text in texts)
        assert not hangs, f"the script, or what it started, hangs\n{output}\n{errors}"
        return subprocess.CompletedProcess(command, code, output, errors)

    def _ask(self, request):
        """Send a line; return the number that comes back."""
        with contextlib.suppress(BrokenPipeError):
            # `_answer` reports this.
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            how = f"has ended with {self.process.wait()}; the next test has a new one"
            raise ChildProcessError(f"the prepared interpreter {how}")
        return int(line)

    def close(self):
        self.running.remove(self)
        self.end()

    def end(self):
        # A line that the interpreter has not read may be left.
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def read(ends, texts, patience):
    """Read each pipe until no process can write to it; return whether that point came in time."""
    deadline = time.monotonic() + patience
    with selectors.DefaultSelector() as left:
        for end, text in zip(ends, texts, strict=True):
            left.register(end, selectors.EVENT_READ, text)
        while left.get_map() and time.monotonic() < deadline:
            for key, _ in left.select(deadline - time.monotonic()):
                text = os.read(key.fd, 1 << 16)
                key.data.extend(text)
                if not text:
                    left.unregister(key.fd)
        return not left.get_map()


def serve():
    """Fork a process for each request; return the request in the forked process only."""
    for line in sys.stdin:
        with warnings.catch_warnings():
            # numpy's threads are idle, and OpenBLAS supports forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            return json.loads(line)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


def become(request):
    """Take over a script's streams, folder, variables, arguments and path; return its command."""
    command = request["command"]
    for fd, file in enumerate([os.devnull, *request["streams"]]):
        opened = os.open(file, os.O_WRONLY if fd else os.O_RDONLY)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(request["folder"])
    before = python_path()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = command
    folder = os.path.dirname(command[0]) if command[0] != "-m" else os.getcwd()
    sys.path[: 1 + len(before)] = [folder, *python_path()]
    return command


def python_path():
    """Return the folders in PYTHONPATH."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def main():
    """Import the modules; in each forked process, run the script."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # At its end, a script must not visit or destroy these objects: that would copy their pages.
    kept = [value for each in [*sys.modules.values()] for value in vars(each).values()]
    kept.append(kept)
    gc.collect()
    gc.freeze()
    libc = sys.modules["ctypes"].CDLL(None) if "ctypes" in sys.modules else None
    # glibc's `on_exit` ends the process before torch takes its libraries apart.
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
    first, *others = become(serve())
    names = globals()
    if first == "-m":
        import runpy

        sys.argv[:] = [first, *others[1:]]
        run = partial(runpy._run_module_as_main, others[0])
        more = {}
    else:
        code = compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
        run = partial(exec, code, names)
        more = {"__file__": first, "__doc__": None, "__cached__": None}
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names.update(more)
    run()


if __name__ == "__main__":
    main()
