"""Checks of tests/c, which are C programs of the core's headers alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
# run.sh exits with this where the compiler lacks a feature.
CANNOT_RUN = 77

needed = [
    pytest.mark.needs("Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        not (HERE.parent / "cseq" / "include").exists(), reason="the sources are not here"
    ),
]


def passed(check):
    """Run a check for two seconds; return its output, or skip where it cannot run."""
    command = ["sh", str(HERE / "c" / "run.sh"), "2", check]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
