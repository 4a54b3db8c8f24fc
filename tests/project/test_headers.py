"""The core's headers alone: two checks of `make check-nightly`, which has all."""

import pytest
from sanitizing import needed, passed

pytestmark = needed


@pytest.mark.parametrize("check", ["explore", "kill"])
def test_the_headers_alone(check):
    """Each ticket comes once, for each interleaving, and for a party's death at any step."""
    passed(check)
