"""Run torch's own tests of `DataLoader` with cseq's class instead.

    python tests/conformance/run_torch.py [--class module:Class] [--tags must,own] [-k EXPR] [times]

With --stateful: torchdata's tests of `StatefulDataLoader`.

See README.md for the tags, and for where the tests come from.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from stand_in import ENTERED, STAND_IN
from suite import BUILD, HERE, run, torchdata

# torch's packages lack its tests; Debian's source package has the whole repository.
DEBIAN = HERE.parent / "platforms" / "debian.py"
RELEASE = "trixie"
SOURCE = "pytorch"
VERSION = "2.6.0"
SHA256 = "c955067aa66c0d9d74bff7ddabd3f912ab81164e0b133bd12d1debad557215a3"
TEST = "test_dataloader.py"

# The class in .venv's torchdata, which still has DataLoader2, is older than these tests.
TORCHDATA = "0.11.0"
STATEFUL = ["test_state_dict.py", "test_sampler.py", "test_incremental_state.py"]

# Seconds that one test may take: test_proper_exit starts 24 programs.
SECONDS = 900


def download(folder):
    """Return torch's test file from Debian's source package."""
    subprocess.run([sys.executable, DEBIAN, RELEASE, SOURCE, folder], check=True)
    with tarfile.open(next(folder.glob(f"{SOURCE}_*.orig.tar.*"))) as archive:
        for member in archive:
            if member.name.endswith(f"/test/{TEST}"):
                return archive.extractfile(member).read()
    raise FileNotFoundError(f"no test/{TEST} in {SOURCE}")


def torch_tests():
    """Return a folder with torch's test file: the one in TORCH_TESTS, or one made once."""
    folder = Path(os.environ.get("TORCH_TESTS", BUILD / f"torch-{VERSION}")).resolve()
    BUILD.mkdir(parents=True, exist_ok=True)
    if not (folder / TEST).is_file():
        try:
            with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
                text = download(Path(scratch))
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{SOURCE} cannot be had: {error}; TORCH_TESTS=folder says where {TEST} is")
        folder.mkdir(exist_ok=True)
        (folder / TEST).write_bytes(text)
    found = hashlib.sha256((folder / TEST).read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{folder / TEST} is not that of torch {VERSION}: its SHA-256 is {found}")
    return folder


def torchdata_package():
    """Return a folder from which torchdata can be imported, in the version of its tests."""
    folder = BUILD / f"torchdata-package-{TORCHDATA}"
    if not folder.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
            target = ["--no-deps", "--target", f"{scratch}/package", f"torchdata=={TORCHDATA}"]
            subprocess.run([*pip, *target], check=True)
            # A rename leaves the whole folder, or nothing.
            os.rename(f"{scratch}/package", folder)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("times", type=int, nargs="?", default=1, help="runs in a row")
    option("--stateful", action="store_true", help="torchdata's tests, not torch's")
    option("--class", dest="cls", metavar="MODULE:CLASS", help="what is tested; cseq's class")
    option("--tags", help="only the tests with these tags, with commas between")
    option("-k", metavar="EXPRESSION", help="only the tests that pytest selects by it")
    asked = parser.parse_args()
    module = "cseq.adapters.torch"
    if asked.stateful:
        title, library = f"torchdata {TORCHDATA}", "torchdata.stateful_dataloader"
        cls = asked.cls or f"{module}:StatefulDataLoader"
        folder = torchdata(f"v{TORCHDATA}", "TORCHDATA_STATEFUL") / "test" / "stateful_dataloader"
        tests, paths = STATEFUL, [HERE / "site", torchdata_package()]
    else:
        title, library = f"torch {VERSION}", "torch"
        cls = asked.cls or f"{module}:DataLoader"
        folder, tests, paths = torch_tests(), [TEST], [HERE / "site"]
    name = "stateful" if asked.stateful else "torch"
    # No settings apply: ours would turn warnings into errors.
    options = ["-c", os.devnull, "--rootdir", ".", "--timeout", str(SECONDS), "--disable-warnings"]
    options += ["-p", "torch_plugin", "--table", str(HERE / "torch_tests.txt")]
    options += ["--tags", asked.tags] if asked.tags else []
    options += ["-k", asked.k] if asked.k else []
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    variables = {
        STAND_IN: f"{library}={cls}",
        ENTERED: str(BUILD / f"{name}-entered.txt"),
        # The tests run elsewhere.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [*paths, *given])),
        "PYTORCH_TEST_WITH_SLOW": "1",
    }
    return run(f"{title} with {cls}", folder, [*options, *tests], asked.times, variables)


if __name__ == "__main__":
    sys.exit(main())
