"""Replaces a library's loader class, in each interpreter that a test starts.

`CSEQ_STAND_IN=library=module:Class` names the place and the new class, and `CSEQ_ENTERED` a file
that gets a line each time the library's own multiprocessing engine is entered.
`site/sitecustomize.py` calls `install` when an interpreter starts; nothing happens in one that
never imports the library.

The class is installed when the library is imported. If the module of the class is imported first
(for example in the workers of its own engine) and itself imports the library, the class does not
exist yet; it is installed when its module is complete.
"""

import functools
import importlib
import importlib.util
import os
import sys
from typing import NamedTuple

STAND_IN = "CSEQ_STAND_IN"
ENTERED = "CSEQ_ENTERED"

STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"


class Library(NamedTuple):
    # The class, as module:name.
    places: list[str]
    # What is called once for each iterator, or worker, of its own, as module:name.
    engines: list[str]


ENGINE = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__"
LIBRARIES = {
    "torch": Library(
        ["torch.utils.data:DataLoader", "torch.utils.data.dataloader:DataLoader"],
        [ENGINE, "torch.utils.data._utils.worker:_worker_loop"],
    ),
    "torchdata.stateful_dataloader": Library(
        ["torchdata.stateful_dataloader:StatefulDataLoader", f"{STATEFUL}:StatefulDataLoader"],
        [ENGINE, f"{STATEFUL}:_StatefulMultiProcessingDataLoaderIter.__init__"],
    ),
}


def owner(path):
    """Return the owner of an attribute module:name.name, and the attribute's name."""
    module, _, name = path.partition(":")
    *outer, name = name.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def count(path):
    """Make each call of a function write a line to the file: the function, and the test."""
    where, name = owner(path)
    old = getattr(where, name)

    @functools.wraps(old)
    def counted(*args, **kwargs):
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").partition(" ")[0]
        # One write, so that the lines of several processes do not mix.
        with open(os.environ[ENTERED], "a") as file:
            file.write(f"{path} {test}\n")
        return old(*args, **kwargs)

    setattr(where, name, counted)


class Imported:
    """A finder that calls `act` after one of some modules was executed, and finds nothing."""

    def __init__(self, names, act):
        self.names, self.act = names, act
        self.executing = set()

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        # The search that follows must skip this finder.
        self.names.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                self.executing.add(name)
                execute(module)
                self.executing.remove(name)
                self.act()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install():
    """Install the class as soon as it and the library exist."""
    if STAND_IN not in os.environ:
        return
    library, _, path = os.environ[STAND_IN].partition("=")
    module = path.partition(":")[0]

    def act():
        if library not in sys.modules or finder.executing & {library, module}:
            return
        cls = getattr(*owner(path))
        for place in LIBRARIES[library].places:
            setattr(*owner(place), cls)
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
            for engine in LIBRARIES[library].engines:
                count(engine)

    finder = Imported({library, module}, act)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]


def standing():
    return getattr(*owner(LIBRARIES[os.environ[STAND_IN].partition("=")[0]].places[0]))
