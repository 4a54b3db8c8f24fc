"""Run torchdata's own tests of DataLoader2 with cseq's reading service in the place of theirs.

    python tests/conformance/run_torchdata.py [times]

The tests are in torchdata's repository, of which the tag is cloned once, to build/conformance; or
the variable TORCHDATA names a folder that has it already.
"""

import os
import sys

from suite import run, torchdata

TAG = "v0.9.0"
TESTS = ["test_mprs.py", "test_dataloader2.py", "test_random.py"]
SECONDS = 120  # that one test may take


def main():
    """Run the tests as many times as the argument says."""
    # Under no settings at all: ours would make warnings errors.
    options = ["-c", os.devnull, "--rootdir", ".", "--timeout", str(SECONDS)]
    tests = [f"dataloader2/{name}" for name in TESTS]
    folder = torchdata(TAG, "TORCHDATA") / "test"
    return run(f"torchdata {TAG}", folder, [*options, "-p", "torchdata_plugin", *tests])


if __name__ == "__main__":
    sys.exit(main())
