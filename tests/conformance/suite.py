"""Another project's tests, run several times with cseq's class."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "conformance"
TORCHDATA = "https://github.com/pytorch/data.git"


def torchdata(tag, variable):
    """Return torchdata's repository at a tag: the folder in a variable, or a clone."""
    if variable in os.environ:
        return Path(os.environ[variable]).resolve()
    folder = BUILD / f"torchdata-{tag}"
    if not folder.is_dir():
        clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
        done = subprocess.run([*clone, "--branch", tag, TORCHDATA, str(folder)], check=False)
        if done.returncode:
            sys.exit(f"{tag} of {TORCHDATA} cannot be had; {variable}=folder says where it is")
    return folder


def run(title, folder, arguments, times=None, variables=None):
    """Run pytest in a folder, `times` (the first argument) in a row; return 1 if a run failed."""
    if times is None:
        times = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    environment = os.environ | (variables or {})
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    failed = 0
    for number in range(times):
        print(f"{title}, run {number + 1} of {times}", flush=True)
        done = subprocess.run(command, cwd=folder, env=environment, check=False)
        failed += done.returncode != 0
    print(f"{times - failed} of {times} runs passed", flush=True)
    return int(failed > 0)
