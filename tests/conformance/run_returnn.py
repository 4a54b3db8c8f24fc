"""Run RETURNN's own tests of `MultiProcDataset` with cseq's class in its place.

    python tests/conformance/run_returnn.py [times]

The tests are in RETURNN's source distribution, which is downloaded once, to build/conformance.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "1.20261022.211313"
TESTS = ["test_MultiProcDataset.py", "test_torch_dataset.py::test_MultiProcDataset_HDFDataset"]

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "conformance"


def sources() -> Path:
    """Return RETURNN's unpacked source distribution."""
    unpacked = FOLDER / f"returnn-{VERSION}"
    if not unpacked.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
        subprocess.run([*pip, "--dest", str(FOLDER), f"returnn=={VERSION}"], check=True)
        with tarfile.open(FOLDER / f"returnn-{VERSION}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    return unpacked


def main() -> int:
    """Run the tests as many times as the argument says."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # Under RETURNN's settings, not under those of the folder around it.
    options = ["-c", "../pyproject.toml", "-p", "returnn_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *TESTS]
    failed = 0
    for number in range(times):
        print(f"RETURNN {VERSION}, run {number + 1} of {times}", flush=True)
        done = subprocess.run(command, cwd=sources() / "tests", env=environment, check=False)
        failed += done.returncode != 0
    print(f"{times - failed} of {times} runs passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
