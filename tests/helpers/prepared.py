"""Scripts in processes that are forked from an interpreter which has imported what they need.

An import of torch costs more than most scripts that use it. `Prepared` starts an interpreter that
imports it once; for each script it forks a process, whose `__main__` the script becomes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class Prepared:
    """An interpreter with modules imported, warnings being errors, that runs scripts.

    Parameters
    ----------
    *modules : str
        What it imports.
    environment : dict
        Its variables; each script has its own.
    """

    running: ClassVar[list[Prepared]] = []

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        self.command = [sys.executable, "-W", "error", "-X", "faulthandler", __file__, *modules]
        self.process = subprocess.Popen(
            self.command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running.append(self)

    @classmethod
    def cpu_seconds(cls) -> float:
        """CPU time of those that run, and of their scripts that have ended; 0 without /proc."""
        total = 0
        for one in cls.running:
            with contextlib.suppress(FileNotFoundError):
                stat = Path(f"/proc/{one.process.pid}/stat").read_text(encoding="ascii")
                total += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return total / os.sysconf("SC_CLK_TCK")

    def run(
        self, command: list[str], folder: Path, environment: Mapping[str, str], patience: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, with arguments, to its end; one that hangs shows its stacks and fails."""
        files = [folder / ".output", folder / ".errors"]
        request = {
            "command": command,
            "folder": str(folder),
            "environment": dict(environment),
            "files": [str(file) for file in files],
            "patience": patience,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        output, errors = (file.read_text(encoding="utf-8") for file in files)
        for file in files:
            file.unlink()
        return subprocess.CompletedProcess(command, code, output, errors)

    def close(self) -> None:
        """End the interpreter."""
        self.process.communicate()
        self.running.remove(self)


def serve() -> dict[str, Any]:
    """Fork a process for each request; return the request in that process, and in no other."""
    for line in sys.stdin:
        with warnings.catch_warnings():
            # numpy's threads are there: they compute nothing yet, and OpenBLAS knows of forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> list[str]:
    """Take on a script's streams, folder, variables, arguments and path; return its command."""
    import faulthandler

    command: list[str] = request["command"]
    for fd, file in enumerate([os.devnull, *request["files"]]):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND if fd else os.O_RDONLY
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(request["folder"])
    before = python_path()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = command
    sys.path[: 1 + len(before)] = [os.path.dirname(command[0]), *python_path()]
    faulthandler.dump_traceback_later(request["patience"], exit=True)
    return command


def python_path() -> list[str]:
    """Folders that PYTHONPATH names."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def main() -> None:
    """Import what is to be ready; in each process that is forked, run the script."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a script's end would go through all of it, and so copy it
    script = become(serve())[0]
    code = compile(Path(script).read_bytes(), script, "exec")
    names = globals()
    names.update(__file__=script, __doc__=None, __cached__=None)
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    exec(code, names)


if __name__ == "__main__":
    main()
