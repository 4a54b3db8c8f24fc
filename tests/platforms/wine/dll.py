"""The imports and exports of DLLs, and new DLLs, with pefile and zig."""

import subprocess
import sys

import pefile


def zig(*words):
    """Run a command of zig."""
    subprocess.run([sys.executable, "-m", "ziglang", *map(str, words)], check=True)


def compile_dll(target, *words):
    """Compile a DLL, or an extension module, for 64-bit Windows with the runtime of CPython."""
    zig(
        "cc", "-target", "x86_64-windows-gnu", "-shared", "-s", "-fno-sanitize=all",
        *words, "-o", target,
    )  # fmt: skip


def imports_of(path):
    """Return the names that a file imports from each DLL, whose name is in lower case."""
    with pefile.PE(str(path), fast_load=True) as image:
        image.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
        return {
            entry.dll.decode().lower(): {
                symbol.name.decode() for symbol in entry.imports if symbol.name
            }
            for entry in getattr(image, "DIRECTORY_ENTRY_IMPORT", ())
        }


def exports_of(path):
    """Return the names that a DLL exports."""
    with pefile.PE(str(path), fast_load=True) as image:
        image.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"]])
        symbols = image.DIRECTORY_ENTRY_EXPORT.symbols
        return [symbol.name.decode() for symbol in symbols if symbol.name]


def write_definition(path, dll, exports):
    """Write the file that tells a linker what a DLL exports."""
    path.write_text("\n".join([f'LIBRARY "{dll}"', "EXPORTS", *exports, ""]), encoding="ascii")
