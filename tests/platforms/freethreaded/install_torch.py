"""Install torch without the CUDA libraries that its wheel asks for.

python install_torch.py PYTHON REQUIREMENT

For Linux, a registry may have torch for a CPython without a GIL only as a build for CUDA, with
gigabytes of libraries that a machine without a GPU never calls. They are left out. The dynamic
linker still requires them and their functions, so libraries replace them whose functions all return
100, which is the CUDA runtime's `cudaErrorNoDevice`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA_PACKAGE = re.compile(r"cuda-|nvidia-|triton")
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
CUDA_FUNCTION = re.compile(r"_*(cu|nv|nccl)\w+")

FIND = """
import importlib.metadata as m, json
torch = m.distribution("torch")
print(json.dumps([torch.requires, str(torch.locate_file("torch/lib"))]))
"""
TRY = """
import torch
assert not torch.cuda.is_available()
print("torch", torch.__version__, torch.ones(2).sum().item())
"""


def run(*command):
    """Run a command; return its output."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def install(python, requirement):
    """Install torch and its Python requirements; return the folder of its libraries."""
    pip = [python, "-m", "pip", "--quiet", "install"]
    run(*pip, "--no-deps", requirement)
    needs, folder = json.loads(run(python, "-c", FIND))
    run(*pip, *(one for one in needs if not CUDA_PACKAGE.match(one) and "extra ==" not in one))
    return Path(folder)


def missing(libraries):
    """Return the functions that CUDA must provide, with their version, by library."""
    present = {library.name for library in libraries}
    versions, wanted, defined = {}, defaultdict(set), set()
    for library in libraries:
        file = ""
        for line in run("readelf", "--wide", "--dynamic", "--version-info", library).splitlines():
            if needed := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                if needed[1] not in present and CUDA_LIBRARY.match(needed[1]):
                    versions.setdefault(needed[1], "")
            elif found := re.search(r" File: (\S+)", line):
                file = found[1]
            elif (found := re.search(r" Name: (\S+)", line)) and CUDA_LIBRARY.match(file):
                versions[file] = found[1]
        for line in run("nm", "--dynamic", library).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind in "Uw":
                wanted[version].add(name)
            else:
                defined.add(name)
    # Any library may provide functions without a version, so all are searched.
    loose = {name for name in wanted[""] - defined if CUDA_FUNCTION.fullmatch(name)}
    return {
        name: (version, sorted(wanted[version] if version else loose))
        for name, version in versions.items()
    }


def stand_in(path, version, functions):
    """Make a library of functions that return 100."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "source.c"), Path(folder, "versions")
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
        script.write_text(f"{version} {{ global: *; }};\n")
        options = [f"-Wl,--version-script={script}"] if version else []
        compiler = os.environ.get("CC", "cc").split()
        run(*compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", *options,
            "-o", path, source)  # fmt: skip


def main(python, requirement):
    """Install torch, and try it."""
    folder = install(python, requirement)
    for name, (version, functions) in missing(sorted(folder.glob("*.so*"))).items():
        if name != "libcuda.so.1":
            # torch looks for the driver's library only if it finds a GPU.
            stand_in(folder / name, version, functions)
    print(run(python, "-c", TRY), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
