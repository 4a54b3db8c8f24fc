"""Download the original archive of a Debian source package from apt's mirror.

python tests/platforms/debian.py RELEASE PACKAGE FOLDER
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def apt(folder, *arguments, cwd):
    """Run apt-get with its own list of sources; the system's lists stay unchanged."""
    options = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        # The folder belongs to this user.
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*command, *arguments], cwd=cwd, check=True)


def mirror():
    """Return apt's mirror of Debian."""
    targets = ["--format", "$(REPO_URI)", "Origin: Debian", "Label: Debian"]
    found = subprocess.check_output(["apt-get", "indextargets", *targets], text=True).split()
    if not found:
        raise FileNotFoundError("apt-get knows no mirror of Debian; try `apt-get update`")
    return found[0]


def download(release, package, folder):
    """Put the original archive of a source package into a folder; apt checks its signature."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        (scratch / "sources.list").write_text(f"deb-src {mirror()} {release} main\n")
        for needed in ("lists/partial", "cache/archives/partial"):
            (scratch / needed).mkdir(parents=True)
        apt(scratch, "update", cwd=scratch)
        apt(scratch, "source", "--download-only", "--tar-only", package, cwd=scratch)
        archive = next(scratch.glob(f"{package}_*.orig.tar.*"))
        return archive.rename(folder / archive.name)


if __name__ == "__main__":
    try:
        print(download(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{sys.argv[2]} cannot be had: {error}")
