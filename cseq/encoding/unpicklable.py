"""Which part of an object cannot be pickled, and how to say so."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

__all__ = ["UnpicklableError", "unpicklable"]

MOST_LEVELS = 24  # how deep the search goes
MOST_PROBES = 4000  # how many objects it tries to pickle

_Parts: TypeAlias = Iterator[tuple[str, object]]


class UnpicklableError(TypeError):
    """Something cannot be pickled for another process."""


def unpicklable(
    obj: object,
    name: str,
    error: Exception,
    *,
    probe: Callable[[object], object],
    known: Callable[[Any], bool],
    remedy: str,
) -> UnpicklableError:
    """Make the error that says which part of an object cannot be pickled, and what to do.

    Parameters
    ----------
    name : str
        The object's name in the message.
    error : Exception
        What pickling the object has raised.
    probe : callable
        Pickles a part, to see whether that raises.
    known : callable
        Whether a class or function goes by reference, so that its parts do not matter.
    remedy : str
        What to do, in a sentence.
    """
    path, error = _Search(probe, known).find(obj, name, error)
    return UnpicklableError(f"{path}: {str(error) or type(error).__name__}. {remedy}")


class _Search:
    """Finds the innermost part of an object that cannot be pickled."""

    def __init__(self, probe: Callable[[object], object], known: Callable[[Any], bool]) -> None:
        self._probe = probe
        self._known = known
        self._failing: set[int] = set()
        self._alive: list[object] = []  # keeps parts alive, so that no id is used again
        self._probes = 0

    def find(self, obj: object, path: str, error: Exception) -> tuple[str, Exception]:
        """Return the path of the innermost part that fails, and what pickling it raised."""
        self._failing.add(id(obj))
        return self._descend(obj, path, error, 0) or (path, error)

    def _descend(
        self, obj: object, path: str, error: Exception, level: int
    ) -> tuple[str, Exception] | None:
        innermost = True
        for step, part in self._parts(obj, level):
            if id(part) in self._failing:  # seen already, or a cycle
                innermost = False
                continue
            failure = self._try(part)
            if failure is None:
                continue
            innermost = False
            self._failing.add(id(part))
            found = self._descend(part, path + step, failure, level + 1)
            if found is not None:
                return found
        return (path, error) if innermost else None

    def _parts(self, obj: object, level: int) -> Iterator[tuple[str, object]]:
        """Parts of an object, as long as the search is within its bounds."""
        if level >= MOST_LEVELS:
            return
        for step, part in _parts(obj, self._known):
            self._probes += 1
            if self._probes > MOST_PROBES:
                return
            self._alive.append(part)
            yield step, part

    def _try(self, obj: object) -> Exception | None:
        """Return what pickling an object raises."""
        try:
            self._probe(obj)
        except Exception as error:  # noqa: BLE001 - it is looked at, whatever it is
            return error.with_traceback(None)  # it keeps all frames alive
        return None


def _parts(obj: object, known: Callable[[Any], bool]) -> _Parts:
    """List the parts that an object's pickle consists of, each with its step in the path."""
    if isinstance(obj, types.FunctionType):
        return iter(()) if known(obj) else _parts_of_function(obj)
    if isinstance(obj, type):
        return iter(()) if known(obj) else _parts_of_class(obj)
    if isinstance(obj, functools.partial):
        return _attributes(obj, ("func", "args", "keywords"))
    if isinstance(obj, types.MethodType):
        return _attributes(obj, ("__self__", "__func__"))
    if isinstance(obj, (staticmethod, classmethod)):
        return _attributes(obj, ("__func__",))
    if isinstance(obj, property):
        return _attributes(obj, ("fget", "fset", "fdel"))
    return itertools.chain(_parts_of_container(obj), _parts_of_instance(obj))


def _attributes(obj: object, names: Iterable[str]) -> _Parts:
    """Attributes by name."""
    return ((f".{name}", getattr(obj, name)) for name in names)


def _items(step: str, items: Iterable[tuple[Any, object]]) -> _Parts:
    """Items of something like a dictionary."""
    return ((f"{step}[{reprlib.repr(key)}]", value) for key, value in items)


def _parts_of_container(obj: object) -> _Parts:
    """List the items of the standard containers and of arrays of objects."""
    if isinstance(obj, dict):
        return itertools.chain(_items("", obj.items()), ((" key", key) for key in obj))
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):  # a named one
        return _attributes(obj, obj._fields)
    if isinstance(obj, (list, tuple, collections.deque)):
        return _items("", enumerate(obj))
    if isinstance(obj, (set, frozenset)):
        return ((f"{{{reprlib.repr(item)}}}", item) for item in obj)
    if isinstance(obj, np.ndarray) and obj.dtype == object:
        return _items(".flat", enumerate(obj.flat))
    return iter(())


def _parts_of_function(function: types.FunctionType) -> _Parts:
    """List what a function that goes by value takes with it."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" variable {name!r}", cell.cell_contents
    yield from _items(".__defaults__", enumerate(function.__defaults__ or ()))
    yield from _items(".__kwdefaults__", (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(function).items())
    for name in code.co_names:
        if name in function.__globals__:
            yield f" global {name!r}", function.__globals__[name]


def _parts_of_class(cls: type) -> _Parts:
    """List what a class that goes by value takes with it."""
    own = ("__dict__", "__weakref__", "__module__", "__doc__")
    yield from ((f".{name}", value) for name, value in vars(cls).items() if name not in own)
    yield from _items(".__bases__", enumerate(cls.__bases__))


def _parts_of_instance(obj: object) -> _Parts:
    """List what an object's own way of pickling puts into the pickle."""
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - then this object itself is the one to blame
        return
    if isinstance(reduced, str):
        return
    args: Iterable[object] = reduced[1]
    state = reduced[2] if len(reduced) > 2 else None
    states = state if isinstance(state, tuple) else (state,)
    for part in states:  # a dictionary, or a pair of them where there are __slots__
        if isinstance(part, dict):
            yield from ((f".{name}", value) for name, value in part.items())
        elif part is not None:
            yield ".__getstate__()", part
    yield from _items(".__reduce__()", enumerate(args))
