"""Compiles cseq for Windows, and copies it with its tests to the folder "cseq" of Wine's drive C.

    .venv/bin/python tests/platforms/wine/build.py FOLDER      FOLDER: what setup.sh has made

Run in the top folder of a checkout. setup.py says what is compiled and how. The compiler is zig's,
and the headers come from the running Python, except for pyconfig.h, and from numpy for Windows.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import setuptools  # noqa: F401 - before distutils, which it has
from dll import compile_dll, exports_of, write_definition, zig

from distutils.core import run_setup  # isort: skip


# setup.py requires it only on Windows.
LIBRARIES = ["-lws2_32"]
VERSION = "".join(map(str, sys.version_info[:2]))


def extensions():
    """Return what setup.py compiles; each module's source is already translated to C."""
    sys.argv[1:] = []
    project = run_setup("setup.py", stop_after="init")
    build = project.get_command_obj("build_ext")
    for extension in project.ext_modules:
        extension.sources = [build.translated(extension)]
    return project.ext_modules


def copy_checkout(home):
    """Copy the files that git tracks or would add, without an earlier build's files."""
    shutil.rmtree(home, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(os.path.isfile, names):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, home / name)


def copy_headers(target):
    """Copy this Python's headers, which include the pyconfig.h beside them."""
    shutil.copytree(sysconfig.get_path("include"), target, dirs_exist_ok=True)
    shutil.copy2(Path(__file__).with_name("pyconfig.h"), target)


def import_library(dll, folder):
    """Make a linker's import library of a DLL."""
    definition, library = folder / f"{dll.stem}.def", folder / f"lib{dll.stem}.a"
    write_definition(definition, dll.name, exports_of(dll))
    zig("dlltool", "-m", "i386:x86-64", "-d", definition, "-l", library)
    return library


def compile_extension(extension, home, headers, library):
    """Compile an extension module into the package."""
    folders = [Path(name) for name in extension.include_dirs if not os.path.isabs(name)]
    compile_dll(
        home / f"{extension.name.replace('.', '/')}.cp{VERSION}-win_amd64.pyd",
        *extension.extra_compile_args,
        *(f"-I{folder}" for folder in [*headers, *folders]),
        *(f"-D{name}={value}" for name, value in extension.define_macros),
        *(f"-U{name}" for name in extension.undef_macros),
        *extension.sources,
        library,
        *LIBRARIES,
    )


def main(folder):
    """Copy the checkout, and compile each extension module into the copy."""
    drive, build = folder / "prefix" / "drive_c", folder / "build"
    build.mkdir(exist_ok=True)
    copy_checkout(drive / "cseq")
    copy_headers(build / "include")
    library = import_library(drive / "python" / f"python{VERSION}.dll", build)
    numpy = drive / "python" / "Lib" / "site-packages" / "numpy" / "_core" / "include"
    headers = [build / "include", numpy]
    compiled = partial(compile_extension, home=drive / "cseq", headers=headers, library=library)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compiled, extensions()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
