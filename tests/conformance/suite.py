"""Running another project's tests, several times in a row, with cseq's class in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "conformance"  # where the tests are


def run(title: str, folder: Path, arguments: list[str]) -> int:
    """Run pytest in a folder as many times as the command line says; 1 if a run failed."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    failed = 0
    for number in range(times):
        print(f"{title}, run {number + 1} of {times}", flush=True)
        done = subprocess.run(command, cwd=folder, env=environment, check=False)
        failed += done.returncode != 0
    print(f"{times - failed} of {times} runs passed")
    return int(failed > 0)
