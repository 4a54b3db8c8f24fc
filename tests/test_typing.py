"""What type checkers accept and refuse of a user's script: exactly the lines that are marked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import import_path

USER = Path(__file__).parent / "typing" / "user.py"
REFUSED = {
    number
    for number, line in enumerate(USER.read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# refused")
}


def lines_of(command: list[str], folder: Path, pattern: str) -> set[int]:
    """Run a checker and find the lines that it calls errors."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = {int(line) for line in re.findall(pattern, done.stdout)}
    assert found, done.stdout + done.stderr
    return found


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where a checker is not installed: `make lint` installs both."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}")


@needs("mypy")
def test_mypy(tmp_path: Path) -> None:
    """Mypy in its strict mode."""
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {import_path()}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(USER)]
    assert lines_of(command, tmp_path, r"user\.py:(\d+): error:") == REFUSED


@needs("basedpyright")
def test_pyright(tmp_path: Path) -> None:
    """Pyright in its strict mode, from the package that brings its own Node.js."""
    config = {
        "typeCheckingMode": "strict",
        "include": [str(USER)],
        "extraPaths": [import_path().split(":")[0]],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    assert lines_of(command, tmp_path, r"user\.py:(\d+):\d+ - error:") == REFUSED
