"""Run RETURNN's and torchdata's own tests with cseq's classes in their place.

    python tests/conformance/run_others.py [times]

RETURNN's are in its source distribution, torchdata's in its repository at a tag. Each is fetched
once, to build/conformance, unless the variable TORCHDATA names a folder that has the repository.
"""

import os
import subprocess
import sys
import tarfile
import tempfile

from suite import BUILD, run, torchdata

VERSION = "1.20261022.211313"
RETURNN = ["test_MultiProcDataset.py", "test_torch_dataset.py::test_MultiProcDataset_HDFDataset"]
TAG = "v0.9.0"
TORCHDATA = ["test_mprs.py", "test_dataloader2.py", "test_random.py"]
# Seconds that one test of torchdata may take.
SECONDS = 120


def returnn():
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
    # The settings are RETURNN's, not this folder's.
    options = ["-c", "../pyproject.toml", "-p", "returnn_plugin"]
    failed = run(f"RETURNN {VERSION}", returnn() / "tests", [*options, *RETURNN])
    # No settings apply: ours would turn warnings into errors.
    options = ["-c", os.devnull, "--rootdir", ".", "--timeout", str(SECONDS)]
    options += ["-p", "torchdata_plugin", *(f"dataloader2/{name}" for name in TORCHDATA)]
    return run(f"torchdata {TAG}", torchdata(TAG, "TORCHDATA") / "test", options) or failed


if __name__ == "__main__":
    sys.exit(main())
