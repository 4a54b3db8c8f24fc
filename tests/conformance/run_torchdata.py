"""Run torchdata's own tests of DataLoader2 with cseq's reading service in the place of theirs.

    python tests/conformance/run_torchdata.py [times]

The tests are in torchdata's repository, of which the tag is cloned once, to build/conformance; or
the variable TORCHDATA names a folder that has it already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from suite import BUILD, run

TAG = "v0.9.0"
REPOSITORY = "https://github.com/pytorch/data.git"
TESTS = ["test_mprs.py", "test_dataloader2.py", "test_random.py"]
SECONDS = 120  # that one test may take

FOLDER = BUILD / f"torchdata-{TAG}"


def sources() -> Path:
    """Return the repository at the tag."""
    if "TORCHDATA" in os.environ:
        return Path(os.environ["TORCHDATA"]).resolve()
    if not FOLDER.is_dir():
        clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
        done = subprocess.run([*clone, "--branch", TAG, REPOSITORY, str(FOLDER)], check=False)
        if done.returncode:
            sys.exit(f"{TAG} of {REPOSITORY} cannot be had; TORCHDATA=folder says where it is")
    return FOLDER


def main() -> int:
    """Run the tests as many times as the argument says."""
    # Under no settings at all: ours would make warnings errors.
    options = ["-c", os.devnull, "--rootdir", ".", "--timeout", str(SECONDS)]
    tests = [f"dataloader2/{name}" for name in TESTS]
    return run(f"torchdata {TAG}", sources() / "test", [*options, "-p", "torchdata_plugin", *tests])


if __name__ == "__main__":
    sys.exit(main())
