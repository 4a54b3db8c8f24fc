"""What a new process can import, and which classes and functions have a name here.

What cannot be imported has to travel by value: everything in ``__main__`` (scripts, notebooks),
classes and functions defined inside functions, and modules that the import system would not find
again.
"""

from __future__ import annotations

import operator
import os
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["MAIN", "Importable", "named_here", "promise"]

MAIN = ("__main__", "__mp_main__")  # the user's script, here and in multiprocessing's children

STANDARD = (BuiltinImporter, FrozenImporter, PathFinder)

# Folders of packages, and of what a runtime_env of Ray's brings.
INSTALLED = ("site-packages", "dist-packages", "working_dir_files", "py_modules_files")

# Modules that worker processes will have although no finder finds them.
_promised: set[str] = set()


def promise(module: str) -> None:
    """Say that worker processes will have a module that they cannot import by themselves.

    Its classes and functions then go by reference. The caller ensures that the module is there
    before the rest of a pickle is read.
    """
    _promised.add(module)


class Importable:
    """Which modules a new process can import; each is looked for once.

    Parameters
    ----------
    elsewhere : bool
        The process is on another machine. This has the standard library, what is installed, cseq,
        and what Ray has brought to all its machines (a `runtime_env`), but no file of the user's.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self._findable: dict[str, bool] = {}
        self._elsewhere = elsewhere

    def findable(self, name: str) -> bool:
        """Whether a new process would find this module, and would find the same one."""
        if name not in self._findable:
            self._findable[name] = self._find(name)
        return self._findable[name]

    def importable(self) -> tuple[str, ...]:
        """Those that were asked for and are found, in the order of asking; parents come first."""
        return tuple(
            name for name, found in self._findable.items() if found and name not in _promised
        )

    def _find(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None or name in MAIN:
            return False
        if name in _promised:
            return True
        parent = name.rpartition(".")[0]
        if not parent:
            spec = find_spec(name, None)
            return _is_same(module, spec) and (not self._elsewhere or _is_installed(spec))
        if not self.findable(parent):
            return False
        path = getattr(sys.modules[parent], "__path__", None)
        # A part of a module that is no package was made by that module, and will be again.
        return path is None or _is_same(module, find_spec(name, path))


def named_here(obj: Any) -> bool:
    """Whether a class or function has a name in this process, importable or not."""
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):
        return False


def find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec that a new process would find for this name.

    It has the standard finders, and those of editable installs.
    """
    for finder in sys.meta_path:
        if finder in STANDARD or "editable" in (getattr(finder, "__module__", None) or ""):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def _is_installed(spec: ModuleSpec | None) -> bool:
    """Whether machines that are set up alike have a module that is not inside another one."""
    if spec is None or spec.name == "cseq" or spec.origin in ("built-in", "frozen"):
        return spec is not None
    import sysconfig

    place = os.path.realpath(spec.origin or next(iter(spec.submodule_search_locations or [""])))
    standard = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return any(place.startswith(os.path.join(folder, "")) for folder in standard) or any(
        part in INSTALLED for part in place.split(os.sep)
    )


def _is_same(module: types.ModuleType, spec: ModuleSpec | None) -> bool:
    """Whether a spec is that of the file which this module was imported from."""
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    here = getattr(module, "__file__", None)
    if here is None or spec.origin is None:  # a folder without __init__.py
        return here is spec.origin and hasattr(module, "__path__")
    return bool(os.path.realpath(here) == os.path.realpath(spec.origin))
