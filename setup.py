"""The extension module cseq._core; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

# CSEQ_DEBUG=1 checks bounds and invariants; each mode has its own C file, and a switch rebuilds.
DEBUG = os.environ.get("CSEQ_DEBUG", "0") not in ("", "0")
MODE = "debug" if DEBUG else "release"
WINDOWS = sys.platform == "win32"

UNIX_FLAGS = ["-std=c11", "-fvisibility=hidden", "-Werror=implicit-function-declaration"]
UNIX_FLAGS += ["-O1", "-g"] if DEBUG else ["-O3", "-g0"]
WINDOWS_FLAGS = ["/std:c11"] + (["/Od"] if DEBUG else ["/O2"])


def mode_file() -> str:
    """Name a file that is as new as the last change between debug and release builds."""
    path = Path("build", "mode")
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="ascii") != MODE:
        path.write_text(MODE, encoding="ascii")
    return str(path)


core = Extension(
    "cseq._core",
    sources=["cseq/_core.pyx"],
    depends=[mode_file(), *map(str, sorted(Path("cseq", "include").glob("*.h")))],
    include_dirs=["cseq/include", np.get_include()],
    define_macros=[  # numpy 1.25 is the oldest that pyproject.toml allows at run time
        ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
    ]
    + [("CSEQ_DEBUG", "1")] * DEBUG,
    undef_macros=["NDEBUG"] * DEBUG,
    libraries=["ws2_32"] if WINDOWS else [],
    extra_compile_args=WINDOWS_FLAGS if WINDOWS else UNIX_FLAGS,
    extra_link_args=[] if WINDOWS else ["-pthread"],
)

setup(
    ext_modules=cythonize(
        [core],
        build_dir=f"build/{MODE}",
        compiler_directives={
            "language_level": 3,
            "freethreading_compatible": True,
            "embedsignature": True,
            "cdivision": True,
            "boundscheck": DEBUG,
            "wraparound": DEBUG,
            "initializedcheck": DEBUG,
            "nonecheck": DEBUG,
        },
    )
)
