"""The ring's protocol as a model: what it promises holds, and a weakened one does not pass.

One test for each short check in `tests/model/run.sh`; `run.sh normal` and `run.sh long` have larger
bounds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "model" / "run.sh"
ROWS = re.findall(r"^short +(\S+) +(\S.*)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)

pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


def check(expected: str, options: str, folder: Path) -> str:
    """Run one check, in a folder of its own; return what it says."""
    done = subprocess.run(
        [SCRIPT, "--check", "short", expected, *options.split()],
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("expected", "options"), [row for row in ROWS if row[0] in ("holds", "ends")]
)
def test_the_protocol_holds(expected: str, options: str, tmp_path: Path) -> None:
    """No deadlock without any timeout; every ticket once, in order, whoever dies wherever."""
    assert check(expected, options, tmp_path).startswith("ok")


@pytest.mark.parametrize(
    ("expected", "options"), [row for row in ROWS if row[0] in ("fails", "runs-on")]
)
def test_a_weakened_protocol_fails(expected: str, options: str, tmp_path: Path) -> None:
    """Each step of the protocol is needed: without it, the model finds what goes wrong."""
    assert check(expected, options, tmp_path).startswith("ok")


def test_the_rows_are_there() -> None:
    """The table of checks was read: there are both kinds in it."""
    assert {expected for expected, _ in ROWS} == {"holds", "ends", "fails", "runs-on"}
