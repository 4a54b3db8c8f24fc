"""What DLLs import and export, and the making of them, by pefile and zig."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pefile

if TYPE_CHECKING:
    from pathlib import Path


def zig(*words: object) -> None:
    """Run a command of zig."""
    subprocess.run([sys.executable, "-m", "ziglang", *map(str, words)], check=True)


def compile_dll(target: Path, *words: object) -> None:
    """Compile a DLL, or an extension module, for 64-bit Windows with the runtime of CPython."""
    zig(
        "cc", "-target", "x86_64-windows-gnu", "-shared", "-s", "-fno-sanitize=all",
        *words, "-o", target,
    )  # fmt: skip


def imports_of(path: Path) -> dict[str, set[str]]:
    """Return the names that a file imports from each DLL; these in lower case."""
    with pefile.PE(str(path), fast_load=True) as image:
        image.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
        return {
            entry.dll.decode().lower(): {
                symbol.name.decode() for symbol in entry.imports if symbol.name
            }
            for entry in getattr(image, "DIRECTORY_ENTRY_IMPORT", ())
        }


def exports_of(path: Path) -> list[str]:
    """Return the names that a DLL exports."""
    with pefile.PE(str(path), fast_load=True) as image:
        image.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"]])
        symbols = image.DIRECTORY_ENTRY_EXPORT.symbols
        return [symbol.name.decode() for symbol in symbols if symbol.name]


def write_definition(path: Path, dll: str, exports: list[str]) -> None:
    """Write the file that tells a linker what a DLL exports."""
    path.write_text("\n".join([f'LIBRARY "{dll}"', "EXPORTS", *exports, ""]), encoding="ascii")
