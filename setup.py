"""The extension modules of cseq; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import PlatformError

# CSEQ_DEBUG=1 checks bounds and invariants. C files are kept per mode; a new mode recompiles them.
DEBUG = os.environ.get("CSEQ_DEBUG", "0") not in ("", "0")
# CSEQ_LINETRACE=1 reports each line to a tracer, for `make check-coverage`.
TRACE = os.environ.get("CSEQ_LINETRACE", "0") not in ("", "0")
MODE = "trace" if TRACE else "debug" if DEBUG else "release"
WINDOWS = sys.platform == "win32"

UNIX_FLAGS = ["-std=c11", "-fvisibility=hidden", "-Werror=implicit-function-declaration"]
# Cython generates constants that are never used.
UNIX_FLAGS += ["-Wno-unused-const-variable"]
UNIX_FLAGS += ["-O0", "-g"] if DEBUG else ["-O2", "-g0"]
WINDOWS_FLAGS = ["/std:c11", "/utf-8", "/volatile:ms"] + (["/Od"] if DEBUG else ["/O2"])

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": True,
    "embedsignature": True,
    "auto_pickle": False,
    "cdivision": True,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "linetrace": TRACE,
}


def mode_file() -> str:
    """Return a file that is rewritten when the build mode, the flags or NumPy's version change."""
    path = Path("build", "mode")
    path.parent.mkdir(exist_ok=True)
    flags = WINDOWS_FLAGS if WINDOWS else UNIX_FLAGS
    mode = f"{MODE}, numpy {np.__version__}, {' '.join(flags)}"
    if not path.exists() or path.read_text(encoding="ascii") != mode:
        path.write_text(mode, encoding="ascii")
    return str(path)


def c_folder() -> str | None:
    """Return the folder for Cython's C files, emptied if they were made with another NumPy."""
    if TRACE:
        # Cython.Coverage looks for the C files beside the sources.
        return None
    folder = Path("build", MODE)
    numpy = folder / "numpy"
    if not numpy.exists() or numpy.read_text(encoding="ascii") != np.__version__:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        numpy.write_text(np.__version__, encoding="ascii")
    return folder.as_posix()


# Matches the cseq modules that a .pyx or .pxd file cimports.
CIMPORTED = re.compile(r"^ *from (cseq\.[\w.]+) cimport ", re.MULTILINE)


def sources_of(path: Path) -> set[Path]:
    """Return a .pyx file, its .pxd file, and all .pxd files that they cimport, even indirectly."""
    found, left = set(), [path, path.with_suffix(".pxd")]
    while left:
        one = left.pop()
        if one not in found and one.exists():
            found.add(one)
            text = one.read_text(encoding="utf-8")
            left += [Path(*name.split(".")).with_suffix(".pxd") for name in CIMPORTED.findall(text)]
    return found


def is_current(target: Path, sources: set[Path]) -> bool:
    """Return whether a file is newer than all of its sources."""
    made = target.stat().st_mtime if target.exists() else 0
    return all(source.stat().st_mtime < made for source in sources)


class BuildCore(build_ext):
    """Compiles the core on all CPU cores. If a tool is missing, the error message names it."""

    # Cython translates one module at a time, while other modules are being compiled.
    cython = threading.Lock()

    def finalize_options(self) -> None:
        """Compile as many modules at a time as there are CPU cores."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        """Check for a missing compiler or missing headers, then compile."""
        # The MSVC class lacks this attribute, because it looks for the compiler later.
        command = getattr(self.compiler, "compiler_so", None)
        headers = sysconfig.get_path("include")
        if command and shutil.which(command[0]) is None:
            raise PlatformError(
                "cseq-loader is compiled when it is installed from source, and the C compiler "
                f"{command[0]!r} was not found: install one (Debian, Ubuntu: apt install "
                "build-essential; Fedora: dnf install gcc; macOS: xcode-select --install), "
                "or set CC to the path of your compiler"
            )
        if command and not Path(headers, "Python.h").exists():
            raise PlatformError(
                "cseq-loader is compiled when it is installed from source, and Python's headers "
                f"are not in {headers}: install them (Debian, Ubuntu: apt install python3-dev; "
                "Fedora: dnf install python3-devel)"
            )
        due = [one.name for one in self.extensions if not self.is_built(one)]
        if due:
            names = ", ".join(name.removeprefix("cseq.") for name in due)
            told = f"cseq: compiling {len(due)} of {len(self.extensions)} modules: {names}\n"
            sys.stdout.write(told)
            sys.stdout.flush()
        super().build_extensions()

    def is_built(self, extension: Extension) -> bool:
        """Return whether the module is newer than its sources and the headers."""
        sources = sources_of(Path(extension.sources[0])) | {*map(Path, extension.depends)}
        return is_current(Path(self.get_ext_fullpath(extension.name)), sources)

    def build_extension(self, extension: Extension) -> None:
        """Translate and compile a module."""
        extension.sources = [self.translated(extension)]
        super().build_extension(extension)

    def translated(self, extension: Extension) -> str:
        """Return a module's C file, generated again if it is older than its sources.

        Cython's own check includes installed `.pxd` files, which are newer in a new environment.
        """
        pyx = Path(extension.sources[0])
        with self.cython:
            folder = c_folder()
            target = Path(folder or ".", pyx).with_suffix(".c")
            if not is_current(target, {*sources_of(pyx), Path("setup.py")}):
                cythonize(
                    [extension],
                    build_dir=folder,
                    force=True,
                    quiet=True,
                    compiler_directives=DIRECTIVES,
                )
        return target.as_posix()


class WriteSources(sdist):
    """Writes reproducible archives if SOURCE_DATE_EPOCH is set."""

    def make_archive(self, base_name: str, *arguments: Any, **options: Any) -> str:
        """Write the archive. With SOURCE_DATE_EPOCH, also normalize its metadata."""
        name = super().make_archive(base_name, *arguments, **options)
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is not None and name.endswith(".tar.gz"):
            normalise(Path(name), int(epoch))
        return name


def normalise(archive: Path, epoch: int) -> None:
    """Rewrite a compressed archive with sorted files, one modification time and no owners."""
    with tarfile.open(archive) as old:
        members = [(one, old.extractfile(one)) for one in sorted(old, key=attrgetter("name"))]
        with io.BytesIO() as plain:
            with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
                for member, content in members:
                    member.mtime, member.uid, member.gid = epoch, 0, 0
                    member.uname = member.gname = ""
                    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                    member.pax_headers = {}
                    new.addfile(member, content)
            packed = gzip.compress(plain.getvalue(), mtime=epoch)
    archive.write_bytes(packed)


def description() -> str:
    """Return README.md for a package index, where all links must be absolute."""
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    urls = dict(re.findall(r'^(\w+) = "(https:.+?)/?"$', project, re.MULTILINE))
    raw = urls["Source"].replace("github.com", "raw.githubusercontent.com")
    page = r"\]\(docs/([\w/-]+)\.(?:md|rst)\b"
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()", rf"\1{raw}/main/", text)
    text = re.sub(page, rf"]({urls['Documentation']}/stable/\1.html", text)
    return re.sub(r"\]\((?!https:)", f"]({urls['Source']}/blob/main/", text)


# The extension modules, lowest layer first.
MODULES = ["_memory", "_core", "_lock", "_work", "memory._slots", "measure._trace"]
MODULES += ["encoding._plan", "encoding._room", "encoding._codec"]
MODULES += ["order._readers", "order._source", "engine._streams", "engine._feed", "tokens._fill"]

# CSEQ_PREBUILT=1 installs the modules that `build_ext --inplace` has compiled. Otherwise, an
# editable installation would compile them again in a temporary folder.
core = [
    Extension(
        f"cseq.{name}",
        sources=[f"cseq/{name.replace('.', '/')}.pyx"],
        depends=[mode_file(), *map(str, sorted(Path("cseq", "include").glob("*.h")))],
        include_dirs=["cseq/include", np.get_include()],
        # pyproject.toml requires numpy 1.25 or newer at run time.
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
        ]
        + [("CSEQ_DEBUG", "1")] * DEBUG
        + [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")] * TRACE,
        undef_macros=["NDEBUG"] * DEBUG,
        libraries=["ws2_32"] if WINDOWS else [],
        # Loops over tokens benefit from vectorization, which gcc performs at -O3.
        extra_compile_args=WINDOWS_FLAGS
        if WINDOWS
        else UNIX_FLAGS + ["-O3"] * (name == "tokens._fill" and not DEBUG),
        extra_link_args=[] if WINDOWS else ["-pthread"],
    )
    for name in ([] if os.environ.get("CSEQ_PREBUILT") else MODULES)
]
setup(
    cmdclass={"build_ext": BuildCore, "sdist": WriteSources},
    ext_modules=core,
    long_description=description(),
    long_description_content_type="text/markdown",
)
