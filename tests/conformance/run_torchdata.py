"""Run torchdata's own tests of DataLoader2 with cseq's reading service.

    python tests/conformance/run_torchdata.py [times]

The tests are in torchdata's repository, whose tag is cloned once, to build/conformance, unless the
variable TORCHDATA names a folder that has it.
"""

import os
import sys

from suite import run, torchdata

TAG = "v0.9.0"
TESTS = ["test_mprs.py", "test_dataloader2.py", "test_random.py"]
# Seconds that one test may take.
SECONDS = 120


def main():
    """Run the tests the given number of times."""
    # No settings apply: ours would turn warnings into errors.
    options = ["-c", os.devnull, "--rootdir", ".", "--timeout", str(SECONDS)]
    tests = [f"dataloader2/{name}" for name in TESTS]
    folder = torchdata(TAG, "TORCHDATA") / "test"
    return run(f"torchdata {TAG}", folder, [*options, "-p", "torchdata_plugin", *tests])


if __name__ == "__main__":
    sys.exit(main())
