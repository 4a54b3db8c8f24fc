"""Gives numpy the complex functions that Wine's C runtime lacks.

    python tests/platforms/wine/complex.py HOME        HOME: the folder of the Windows python.exe

Wine's ucrtbase.dll (8.0, 10.0) only has stubs of them, which end the process; numpy calls one while
it is imported. Every extension module that imports one of them gets a DLL of ours instead of their
part of the runtime, "api-ms-win-crt-math". That DLL has the complex functions, and forwards all
others to ucrtbase.dll. The module's list of imports gets another name, since Wine looks up names
that begin with "api-ms-win" in a table, and searches for no file.
"""

import re
import sys
from pathlib import Path

from dll import compile_dll, imports_of, write_definition

# Both names have the same length.
RUNTIME, OURS = "api-ms-win-crt-math-l1-1-0.dll", "cseqms-win-crt-math-l1-1-0.dll"
SOURCE = Path(__file__).with_suffix(".c")


def own_functions():
    """Return the names of the functions in the source."""
    kinds = re.findall(r"TO_(?:REAL|COMPLEX)\((c\w+)\)", SOURCE.read_text(encoding="ascii"))
    return {f"{name}{suffix}" for name in [*kinds, "cpow"] for suffix in ("f", "", "l")}


def main(home):
    """Make the DLL beside python.exe, and make extension modules import it."""
    own, names = own_functions(), set[str]()
    for path in (home / "Lib" / "site-packages").rglob("*.pyd"):
        imported = imports_of(path).get(RUNTIME, set())
        if imported & own:
            path.write_bytes(path.read_bytes().replace(RUNTIME.encode(), OURS.encode()))
            names |= imported
    exports = [f"{name} = own_{name}" for name in sorted(own & names)]
    exports += [f"{name} = ucrtbase.{name}" for name in sorted(names - own)]
    definition = home / "complex.def"
    write_definition(definition, OURS, exports)
    compile_dll(home / OURS, "-O2", "-fno-builtin", SOURCE, definition)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
