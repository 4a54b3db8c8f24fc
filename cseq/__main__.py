"""``python -m cseq``: a script with cseq's DataLoader, or a look at the machine."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line says.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m cseq")
    version = f"cseq {sys.modules['cseq'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a script; every DataLoader of torch in it has cseq's worker processes",
        allow_abbrev=False,
    )
    watch = commands.add_parser(
        "watch", help="run a script, and say what its DataLoaders cost it", allow_abbrev=False
    )
    run.add_argument(
        "--rng",
        choices=("worker", "batch"),
        help="seed each worker once, as torch does, or each batch: the same for any num_workers",
    )
    run.add_argument("--report", metavar="FILE", help="a page of HTML about all that has run")
    run.add_argument("--trace", metavar="FILE", help="a trace of every batch: .json or .json.gz")
    for each in run, watch:
        each.add_argument("-m", dest="is_module", action="store_true", help="a module's name")
        # One argument for both: after one of its own, argparse drops a `--` of the script's.
        each.add_argument(
            "script", nargs=argparse.PARSER, metavar="script", help="and its arguments"
        )
    watch.set_defaults(prepare=_watch)
    run.set_defaults(prepare=_replace)
    doctor = commands.add_parser(
        "doctor", help="say what is wrong with this machine or container", allow_abbrev=False
    )
    doctor.add_argument("modules", nargs="*", metavar="MODULE", help="whose import is timed")
    doctor.add_argument("--data", metavar="PATH", help="a file or folder that is read from")
    doctor.add_argument("--json", action="store_true", help="a list of objects, not lines")
    doctor.set_defaults(look=_doctor)
    bench = commands.add_parser(
        "bench", help="measure a data set or a loader, with and without cseq", allow_abbrev=False
    )
    bench.add_argument("target", metavar="FILE.py:make", help="a function that returns it")
    bench.add_argument("--step", metavar="30ms", help="what the loop does with a batch")
    bench.add_argument("--json", metavar="FILE", help="where the figures go, beside the table")
    bench.add_argument(
        "--seconds", type=float, default=5.0, help="for each row's rate, and again for its waiting"
    )
    bench.set_defaults(look=_bench)
    top = commands.add_parser(
        "top", help="show the runs of other processes, live (Linux)", allow_abbrev=False
    )
    top.add_argument("pid", nargs="?", type=int, metavar="PID", help="with all its descendants")
    top.add_argument("--all", action="store_true", help="all runs of this user: the default")
    top.add_argument("--plain", action="store_true", help="lines of text, once a second")
    top.add_argument("--once", action="store_true", help="the same, once, after a second")
    top.add_argument("--dump", action="store_true", help="print the stacks of all workers")
    top.set_defaults(look=_top)
    given = parser.parse_args(arguments)
    if hasattr(given, "look"):
        sys.exit(given.look(given))
    given.prepare(given)
    sys.argv = given.script
    if sys.argv[0] == "--" and sys.argv[1:]:
        del sys.argv[0]  # it ends our own options
    if given.is_module:
        _run_module(sys.argv[0])
    else:
        _run_script(sys.argv[0])


def _doctor(given: argparse.Namespace) -> int:
    from cseq.observe.doctor import report

    return report(given.modules, given.data, as_json=given.json)


def _bench(given: argparse.Namespace) -> int | str:
    from cseq.observe.bench import bench, seconds_of

    try:
        step = seconds_of(given.step) if given.step else 0.0
    except ValueError as error:
        return f"python -m cseq bench: --step {error}"
    try:
        return bench(given.target, step, given.json, given.seconds)
    except OSError as error:
        return f"python -m cseq bench: {error}"


def _top(given: argparse.Namespace) -> int | str:
    from cseq.observe.top import top

    return top(
        None if given.all else given.pid, plain=given.plain, once=given.once, dump=given.dump
    )


def _replace(given: argparse.Namespace) -> None:
    """Have cseq's workers in every DataLoader."""
    if given.rng is not None:
        os.environ["CSEQ_LOADER_RNG"] = given.rng  # for the processes it starts, too

    from cseq.adapters.torch import install
    from cseq.tracing import Trace

    install()
    try:
        if given.trace is not None:
            Trace(given.trace)
            os.environ["CSEQ_TRACE"] = given.trace
        if given.report is not None:
            from cseq.observe.report import Recorder

            atexit.register(Recorder(given.report).end)
    except (OSError, ValueError) as error:  # of a name
        sys.exit(f"python -m cseq run: {error}")
    atexit.register(_tell_engines, os.getpid())


def _watch(_: argparse.Namespace) -> None:
    """Time every DataLoader, and leave it as it is."""
    from cseq.observe.watch import Watched, tell, watch

    loaders: dict[object, Watched] = {}
    watch(loaders)
    atexit.register(tell, loaders, os.getpid())


def _tell_engines(pid: int) -> None:
    """Say of each kind of loader which engine it had; not in a copy of the process."""
    from cseq.adapters.torch import engines

    if os.getpid() == pid and sys.stderr is not None:
        for engine in engines():
            print("cseq:", engine, file=sys.stderr)  # noqa: T201


def _run_module(name: str) -> None:
    """Run a module as ``python -m`` does."""
    _enter(os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        sys.exit(f"{sys.executable}: Error while finding module specification for {name!r} ({why})")
    if found is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(script: str) -> None:
    """Run a file as ``python`` does, or a folder or an archive that has a ``__main__.py``."""
    # What ``__file__`` is, also where the script goes; `..` after a link stays as it is.
    path = os.path.join(os.getcwd(), script)
    if pkgutil.get_importer(path) is not None:
        _enter(None)
        runpy.run_path(path, run_name="__main__")  # which enters it
        return
    try:
        code = _code_of(path)
    except OSError as error:
        what = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {path!r}: {what}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    _enter(os.path.dirname(os.path.realpath(path)))
    # As python does it, the module stays when the script has come to its end: threads that still
    # run and functions of `atexit` find their names. `runpy` sets `sys.argv[0]` to `__file__`.
    module = ModuleType("__main__")
    module.__dict__.update(
        __annotations__={},
        __builtins__=sys.modules["builtins"],
        __cached__=None,
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _code_of(path: str) -> CodeType:
    """Read a script: its source, or what it was compiled to."""
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
    if code is not None:
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec")


def _enter(folder: str | None) -> None:
    """Have modules looked for in a folder, in place of where ``-m cseq`` was called."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):  # neither is there
        return
    if folder is None:
        del sys.path[0]
    else:
        sys.path[0] = folder


if __name__ == "__main__":
    main()
