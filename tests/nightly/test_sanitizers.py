"""The core's headers alone: sanitizers, kills, interleavings (`make check-sanitizers`: longer)."""

import pytest
from sanitizing import needed, passed

pytestmark = needed


@pytest.mark.parametrize(
    "check",
    ["shuffle", "explore", "stress", "tsan", "asan", "kill", "darwin"],
)
def test_the_headers_alone(check):
    """No race, no bad access, no lost wake-up, and each ticket once, at any death in any step."""
    passed(check)


@pytest.mark.parametrize("weakness", ["NO_FLAG", "PLAIN_PUBLISH", "NO_OWNER", "RELAXED_PUBLISH"])
def test_a_weakened_ring_is_caught(weakness):
    """The checks can fail: a ring without one of its steps or memory orders does not pass."""
    assert f"caught: {weakness}" in passed(f"mutant-{weakness}")
