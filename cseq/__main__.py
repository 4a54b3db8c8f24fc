"""``python -m cseq run``: a script whose DataLoaders have cseq's workers."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
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
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser(
        "run", help="run a script; every DataLoader of torch in it has cseq's worker processes"
    )
    run.add_argument(
        "--rng",
        choices=("worker", "batch"),
        help="seed each worker once, as torch does, or each batch: the same for any num_workers",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="script is a module's name")
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    if given.rng is not None:
        os.environ["CSEQ_LOADER_RNG"] = given.rng  # for the processes it starts, too

    from cseq.adapters.torch import install

    install()
    sys.argv = [given.script, *given.arguments]
    if given.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(given.script)  # as ``__file__`` is, also where the script goes
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
