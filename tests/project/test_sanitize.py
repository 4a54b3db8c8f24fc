"""The core's headers alone: sanitizers, kills, interleavings (`make check-sanitizers`: longer)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
CANNOT_RUN = 77  # what run.sh says where the compiler lacks something

pytestmark = [
    pytest.mark.needs("Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        not (HERE.parent / "cseq" / "include").exists(), reason="the sources are not here"
    ),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run some checks of tests/c; skip where they cannot run."""
    command = ["sh", str(HERE / "c" / "run.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stdout)
    return done


@pytest.mark.parametrize(
    "check",
    ["shuffle", "recipes", "history", "explore", "stress", "tsan", "asan", "kill", "darwin"],
)
def test_the_headers_alone(check: str) -> None:
    """No race, no bad access, no lost wake-up, each ticket once, whoever dies at whatever step."""
    done = run("2", check)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("weakness", ["NO_FLAG", "PLAIN_PUBLISH", "NO_OWNER", "RELAXED_PUBLISH"])
def test_a_weakened_ring_is_caught(weakness: str) -> None:
    """The checks can fail: a ring without one of its steps or memory orders does not pass them."""
    done = run("2", f"mutant-{weakness}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"caught: {weakness}" in done.stdout
