"""The core's headers alone: sanitizers, kills, interleavings (`make check-sanitizers`: longer)."""

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HEADERS = TESTS.parent / "cseq" / "include"
# run.sh exits with this where the compiler lacks a feature.
CANNOT_RUN = 77

pytestmark = [
    pytest.mark.needs("Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(not HEADERS.exists(), reason="the sources are not here"),
]


def passed(check):
    """Run a check for two seconds; return its output, or skip where it cannot run."""
    command = ["sh", str(TESTS / "c" / "run.sh"), "2", check]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RARE = ["shuffle", "stress", "tsan", "asan", "darwin"]
CHECKS = ["explore", "kill", *(pytest.param(check, marks=pytest.mark.nightly) for check in RARE)]


@pytest.mark.parametrize("check", CHECKS)
def test_the_headers_alone(check):
    """No race, no bad access, no lost wake-up, and each ticket once, at any death in any step."""
    passed(check)


@pytest.mark.nightly
@pytest.mark.parametrize("weakness", ["NO_FLAG", "PLAIN_PUBLISH", "NO_OWNER", "RELAXED_PUBLISH"])
def test_a_weakened_ring_is_caught(weakness):
    """The checks can fail: a ring without one of its steps or memory orders does not pass."""
    assert f"caught: {weakness}" in passed(f"mutant-{weakness}")
