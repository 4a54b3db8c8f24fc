"""Type checkers refuse exactly the marked lines of a user's script."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkout import import_path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tests/typing").glob("*.py"))
# The layer between Python and C: each of its files is as typed as cseq as a whole.
SEAM = r"cseq\.(_[a-z]|encoding|engine|memory|order\._|measure\._trace|indexing\.producer)"
MOST_ANY = 0.05

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def refused_in(script):
    """Return the lines that are marked; skip a script of torch if torch is missing."""
    text = script.read_text(encoding="utf-8")
    if "\nimport torch\n" in text and find_spec("torch") is None:
        pytest.skip("needs torch")
    lines = enumerate(text.splitlines(), 1)
    return {number for number, line in lines if line.endswith("# refused")}


def lines_of(command, folder, pattern):
    """Run a checker; return the lines with errors."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = {int(line) for line in re.findall(pattern, done.stdout)}
    assert found, done.stdout + done.stderr
    return found


def needs(module):
    """Skip if a checker is not installed: `make lint` installs both."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}")


@needs("mypy")
@every_script
def test_mypy(tmp_path, script):
    """Mypy in its strict mode."""
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {import_path()}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(script)]
    pattern = rf"{script.stem}\.py:(\d+): error:"
    assert lines_of(command, tmp_path, pattern) == refused_in(script)


@needs("basedpyright")
@every_script
def test_pyright(tmp_path, script):
    """Pyright in its strict mode, from the package with its own Node.js."""
    config = {"typeCheckingMode": "strict", "include": [str(script)]}
    config["extraPaths"] = [import_path().split(":")[0]]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    pattern = rf"{script.stem}\.py:(\d+):\d+ - error:"
    assert lines_of(command, tmp_path, pattern) == refused_in(script)


@needs("mypy")
@needs("torch")
def test_types_of_expressions(tmp_path):
    """Mypy finds no error, and at most one in 20 expressions is `Any`, even in each seam file."""
    command = [sys.executable, "-m", "mypy", "cseq", "--any-exprs-report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "any-exprs.txt").read_text(encoding="utf-8")
    found = re.findall(r"^ *(\S+) +(\d+) +(\d+) +[\d.]+%$", report, re.MULTILINE)
    shares = {name: int(anys) / int(expressions) for name, anys, expressions in found}
    bounded = {name: share for name, share in shares.items() if re.match(f"Total|{SEAM}", name)}
    assert len(bounded) > 30
    assert {name: share for name, share in bounded.items() if share > MOST_ANY} == {}
