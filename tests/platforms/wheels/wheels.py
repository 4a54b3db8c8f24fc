"""Wheels of an sdist for several Pythons: built twice, compared, repaired and tested.

    python tests/platforms/wheels/wheels.py SDIST FOLDER PYTHON... [-- ARGUMENTS OF PYTEST]

The two builds take place in different folders, with the environment variable SOURCE_DATE_EPOCH, and
their wheels must be the same, byte for byte. auditwheel (on Linux) puts its result for each into
FOLDER. The result is installed into an empty environment, where the tests of this checkout run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
NAME = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"


def run(*command, cwd=None):
    """Run a command; raise an exception if it fails."""
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def build(python, sdist, folder):
    """Build a wheel: pip unpacks the sdist into a new folder each time. On Linux, repair it."""
    quiet = ("--quiet", "--disable-pip-version-check")
    run(python, "-m", "pip", "wheel", *quiet, "--no-deps", "--no-cache-dir", "-w", folder, sdist)
    wheel = next(folder.glob("*.whl"))
    if sys.platform == "linux":
        run("auditwheel", "repair", "--wheel-dir", folder / "repaired", wheel)
        return next((folder / "repaired").glob("*.whl"))
    return wheel


def reproduced(python, sdist, scratch):
    """Build twice, and return one of the wheels; exit if they differ."""
    wheel, other = (build(python, sdist, scratch / attempt) for attempt in ("one", "another"))
    if wheel.read_bytes() != other.read_bytes():
        sys.exit(f"{wheel.name} is another one each time")
    return wheel


def try_wheel(python, wheel, scratch, arguments):
    """Run the tests with the wheel in an empty environment."""
    run(python, "-m", "venv", scratch / "venv")
    binaries = scratch / "venv" / ("Scripts" if os.name == "nt" else "bin")
    install = [binaries / "python", "-m", "pip", "--quiet", "install", "--prefer-binary"]
    run(*install, f"{wheel}[test]")
    run(binaries / "pytest", "-p", "no:cacheprovider", TESTS, *arguments, cwd=scratch)


def main():
    """Build and test for each Python."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    sdist, folder, *pythons = words[:end]
    Path(folder).mkdir(parents=True, exist_ok=True)
    built = set()
    for python in pythons:
        named = subprocess.run([python, "-c", NAME], stdout=subprocess.PIPE, text=True, check=True)
        print(f"== {named.stdout.strip()}: {python}", flush=True)
        if named.stdout in built:
            print("another Python of these has built that wheel", flush=True)
            continue
        built.add(named.stdout)
        with tempfile.TemporaryDirectory() as name:
            wheel = reproduced(python, Path(sdist).resolve(), Path(name))
            kept = Path(shutil.move(wheel, Path(folder).resolve()))
            print(f"{kept.name}: the same bytes twice", flush=True)
            try_wheel(python, kept, Path(name), words[end + 1 :])


if __name__ == "__main__":
    main()
