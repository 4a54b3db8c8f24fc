"""The ``cseq`` command: run a script with cseq's DataLoader, or inspect loops."""

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
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

RAW = argparse.RawDescriptionHelpFormatter
DESCRIPTION = "Feed training loops: run scripts with cseq's workers, and see why loops wait."
EXAMPLES = """examples:
  cseq run --watch train.py --lr 0.1        what torch's DataLoaders cost this script
  cseq run --report loader.html train.py    with cseq's workers, and a page about what they did
  cseq bench data.py:make --step 30ms       loaders of this data, for a loop of 30 ms a batch
  cseq doctor                               what slows this machine or container down
  cseq top                                  what the loaders of running programs are doing"""
DOCS = "documentation: https://cseq-loader.github.io/cseq/stable/how-to/slow.html"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``cseq`` command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments to parse. Defaults to the command-line arguments.
    """
    parser = argparse.ArgumentParser(
        prog="cseq", description=DESCRIPTION, epilog=f"{EXAMPLES}\n\n{DOCS}", formatter_class=RAW
    )
    version = f"cseq {sys.modules['cseq'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, about: str, look: object) -> argparse.ArgumentParser:
        options: dict[str, Any] = {"help": about, "epilog": DOCS, "allow_abbrev": False}
        added = commands.add_parser(name, description=f"{about[:1].upper()}{about[1:]}.", **options)
        added.set_defaults(look=look)
        return added

    run = command("run", "run a script with cseq's worker processes in torch's DataLoaders", _run)
    run.add_argument(
        "--watch",
        action="store_true",
        help="keep torch's workers, and report at the end what they cost the script and what helps",
    )
    run.add_argument(
        "--rng",
        choices=("worker", "batch"),
        help="seed each worker once, as torch does, or each batch, regardless of num_workers",
    )
    run.add_argument(
        "--threads",
        action="store_true",
        help="use threads, not processes, for map-style data sets: no copies, no pickling",
    )
    run.add_argument("--report", metavar="FILE", help="write an HTML page about all loaders")
    run.add_argument("--trace", metavar="FILE", help="trace every batch into a .json or .json.gz")
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module as a script")
    # Parse the script and its arguments as one argument; otherwise, argparse would drop a `--`.
    run.add_argument("script", nargs=argparse.PARSER, metavar="script", help="with its arguments")
    bench = command("bench", "measure a data set or a loader, with and without cseq", _bench)
    bench.add_argument(
        "target", metavar="FILE.py:make", help="a function that returns the data set or loader"
    )
    bench.add_argument("--step", metavar="30ms", help="how long the loop spends on a batch")
    bench.add_argument("--seconds", type=float, default=5.0, help="how long each measurement takes")
    command("doctor", "report what slows this machine or container down", _doctor)
    top = command("top", "show the runs of other processes, live (Linux)", _top)
    top.add_argument("pid", nargs="?", type=int, metavar="PID", help="show only this process tree")
    top.add_argument("--once", action="store_true", help="print once, after a second, and exit")
    given = parser.parse_args(arguments)
    if not hasattr(given, "look"):
        parser.print_help()
        return
    # On Windows, the encoding of redirected output may not support arrows.
    if given.look is not _run and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    status = given.look(given)
    if status is not None:
        sys.exit(status)


def _run(given: argparse.Namespace) -> str | None:
    if not given.watch:
        _replace(given)
    elif given.rng or given.threads or given.report or given.trace:
        return (
            "cseq run: --watch keeps torch's workers, so it cannot be combined with --rng, "
            "--threads, --report or --trace"
        )
    else:
        _watch()
    sys.argv = given.script
    # A leading `--` ends cseq's options.
    if sys.argv[0] == "--" and sys.argv[1:]:
        del sys.argv[0]
    if given.is_module:
        _run_module(sys.argv[0])
    else:
        _run_script(sys.argv[0])
    return None


def _doctor(_: argparse.Namespace) -> int:
    from cseq.report.doctor import report

    return report()


def _bench(given: argparse.Namespace) -> int | str:
    from cseq.observe.bench import bench, seconds_of

    try:
        step = seconds_of(given.step) if given.step else 0.0
    except ValueError as error:
        return f"cseq bench: --step {error}"
    return bench(given.target, step, given.seconds)


def _top(given: argparse.Namespace) -> int | str:
    from cseq.observe.top import top

    return top(given.pid, once=given.once)


def _replace(given: argparse.Namespace) -> None:
    """Use cseq's workers in every DataLoader, including those in child processes."""
    if given.rng is not None:
        os.environ["CSEQ_LOADER_RNG"] = given.rng

    if given.threads:
        os.environ["CSEQ_LOADER_WORKER_METHOD"] = "thread"

    from cseq.adapters.torch import install
    from cseq.tracing import Trace

    install()
    try:
        if given.trace is not None:
            Trace(given.trace)
            os.environ["CSEQ_TRACE"] = given.trace
        if given.report is not None:
            from cseq.observe.recorder import Recorder

            atexit.register(Recorder(given.report).end)
    except (OSError, ValueError) as error:
        sys.exit(f"cseq run: {error}")
    atexit.register(_tell_engines, os.getpid())


def _watch() -> None:
    from cseq.observe.watch import Watched, tell, watch

    loaders: dict[object, Watched] = {}
    watch(loaders)
    atexit.register(tell, loaders, os.getpid())


def _tell_engines(pid: int) -> None:
    """Print which engine each kind of loader used, except in a forked process."""
    from cseq.adapters.torch.fallback import lines

    if os.getpid() == pid and sys.stderr is not None:
        for line in lines():
            print("cseq:", line, file=sys.stderr)  # noqa: T201


def _run_module(name: str) -> None:
    """Run a module as ``python -m`` does."""
    _enter(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        sys.exit(f"{sys.executable}: Error while finding module specification for {name!r} ({why})")
    if spec is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(script: str) -> None:
    """Run a file, a folder or an archive as ``python`` does."""
    # An absolute path stays valid after a chdir. `abspath` would collapse a `..` that follows
    # a symbolic link.
    path = os.path.join(os.getcwd(), script)
    if pkgutil.get_importer(path) is not None:
        _enter(None)
        # `run_path` adds the path to `sys.path`.
        runpy.run_path(path, run_name="__main__")
        return
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {path!r}: {reason}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    _enter(os.path.dirname(os.path.realpath(path)))
    # `runpy` would remove the module when the script ends, but threads and `atexit` functions may
    # still use its globals.
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


def _enter(folder: str | None) -> None:
    """Replace the folder that ``-m cseq`` added to ``sys.path``, or remove it if None is given."""
    # In isolated or safe-path mode, Python does not prepend a folder to `sys.path`.
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    if folder is None:
        del sys.path[0]
    else:
        sys.path[0] = folder


if __name__ == "__main__":
    main()
