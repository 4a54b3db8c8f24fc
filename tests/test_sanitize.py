"""The ring's headers alone, under the compiler's sanitizers (`make sanitize`: longer)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parent / "cseq" / "include"

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(not INCLUDE.exists(), reason="the sources are not here"),
]


def build(tmp_path: Path, sanitizer: str, include: Path) -> Path:
    """Compile the threads of tests/c; skip where this compiler lacks the sanitizer."""
    program = tmp_path / sanitizer
    command = [
        "cc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", f"-fsanitize={sanitizer}",
        f"-I{include}", str(HERE / "c" / "threads.c"), "-o", str(program), "-pthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr or "unsupported" in done.stderr:
        pytest.skip(f"no -fsanitize={sanitizer} here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("how", [[], ["nap"]], ids=["wake", "nap"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_ring_under_sanitizers(tmp_path: Path, sanitizer: str, how: list[str]) -> None:
    """Runners that die, epochs that are given up: no race, no bad access, each ticket once."""
    program = build(tmp_path, sanitizer, INCLUDE)
    done = subprocess.run(
        [program, "1", "20", *how], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "every ticket once" in done.stdout


def test_a_weakened_ring_is_caught(tmp_path: Path) -> None:
    """Publishing without a release is a race that ThreadSanitizer sees: the check can fail."""
    weak = tmp_path / "include"
    shutil.copytree(INCLUDE, weak)
    header = weak / "cseq_ring.h"
    text = header.read_text()
    strong = "cseq_swap_sc_u64(&c->word, CSEQ_WORD(CSEQ_TICKET(w), 0, next));"
    assert strong in text
    header.write_text(text.replace(strong, strong.replace("swap_sc", "store_rlx")))
    program = build(tmp_path, "thread", weak)
    done = subprocess.run(
        [program, "1", "20"], capture_output=True, text=True, check=False, timeout=100
    )
    assert "data race" in done.stderr
