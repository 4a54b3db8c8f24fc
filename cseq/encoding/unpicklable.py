"""Which part of an object cannot be pickled, and how to say so."""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UnpicklableError", "unpicklable"]

MOST_LEVELS = 24  # how deep the search goes
MOST_PARTS = 1000  # of an object that are tried


class UnpicklableError(TypeError):
    """Something cannot be pickled for another process."""


def unpicklable(
    obj: object, name: str, error: Exception, *, probe: Callable[[object], object], remedy: str
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
    remedy : str
        What to do, in a sentence.
    """
    above: list[object] = []
    while len(above) < MOST_LEVELS:
        above.append(obj)
        for step, part in _parts_of(obj)[:MOST_PARTS]:
            if any(part is each for each in above):
                continue
            try:
                probe(part)
            except Exception as failure:  # noqa: BLE001 - it is looked at, whatever it is
                error = failure.with_traceback(None)  # it keeps all frames alive
                name, obj = name + step, part
                break
        else:
            break
    return UnpicklableError(f"{name}: {str(error) or type(error).__name__}. {remedy}")


def _parts_of(obj: Any) -> list[tuple[str, object]]:
    """List the parts of an object that the search looks at, each with its step in the path."""
    if isinstance(obj, dict):
        return [(f"[{reprlib.repr(key)}]", value) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)) and not hasattr(obj, "_fields"):
        return [(f"[{k}]", value) for k, value in enumerate(obj)]
    if isinstance(obj, types.FunctionType):
        used = inspect.getclosurevars(obj)
        names = {**used.nonlocals, **used.globals}
        return [(f" variable {name!r}", value) for name, value in names.items()]
    if isinstance(obj, functools.partial):
        parts = {"func": obj.func, "args": obj.args, "keywords": obj.keywords}
    elif isinstance(obj, types.MethodType):
        parts = {"__self__": obj.__self__}
    elif isinstance(obj, type):
        parts = dict(vars(obj))
    elif isinstance(obj, tuple):
        parts = dict(zip(obj._fields, obj, strict=True))  # type: ignore[attr-defined]
    else:
        try:
            reduced = obj.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 - then this object itself is the one to blame
            return []
        parts = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
    own = ("__dict__", "__weakref__")  # of a class
    return [(f".{name}", value) for name, value in parts.items() if name not in own]
