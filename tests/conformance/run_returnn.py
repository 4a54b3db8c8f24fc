"""Run RETURNN's own tests of `MultiProcDataset` with cseq's class instead.

    python tests/conformance/run_returnn.py [times]

The tests are in RETURNN's source distribution, which is downloaded once, to build/conformance.
"""

import os
import subprocess
import sys
import tarfile
import tempfile

from suite import BUILD, run

VERSION = "1.20261022.211313"
TESTS = ["test_MultiProcDataset.py", "test_torch_dataset.py::test_MultiProcDataset_HDFDataset"]


def sources():
    """Return RETURNN's unpacked source distribution."""
    unpacked = BUILD / f"returnn-{VERSION}"
    if not unpacked.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
        subprocess.run([*pip, "--dest", str(BUILD), f"returnn=={VERSION}"], check=True)
        with (
            tempfile.TemporaryDirectory(dir=BUILD) as folder,
            tarfile.open(BUILD / f"{unpacked.name}.tar.gz") as archive,
        ):
            archive.extractall(folder, filter="data")
            # A rename leaves the whole folder, or nothing.
            os.rename(os.path.join(folder, unpacked.name), unpacked)
    return unpacked


def main():
    """Run the tests the given number of times."""
    # The settings are RETURNN's, not this folder's.
    options = ["-c", "../pyproject.toml", "-p", "returnn_plugin"]
    return run(f"RETURNN {VERSION}", sources() / "tests", [*options, *TESTS])


if __name__ == "__main__":
    sys.exit(main())
