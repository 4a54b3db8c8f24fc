"""Support for stateful samplers, data sets and their iterators."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import TypeGuard

    class Stateful(Protocol):
        """An object with a state."""

        def state_dict(self) -> State: ...
        def load_state_dict(self, state: State, /, **options: bool) -> object: ...


__all__ = ["DatasetState", "is_stateful", "left_by"]

State = dict[str, Any]


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Return True if `thing` has `load_state_dict` and `state_dict` without required arguments."""
    ask = getattr(thing, "state_dict", None)
    if not (callable(ask) and callable(getattr(thing, "load_state_dict", None))):
        return False
    try:
        inspect.signature(ask).bind()
    except TypeError:
        return False
    # C functions may not have a signature.
    except ValueError:
        pass
    return True


def left_by(state: State) -> State:
    """Return the state of a data set after an epoch, without its iterator."""
    return {"dataset": state.get("iterator" if state.get("is_own") else "dataset"), "made": 0}


class DatasetState:
    """The states of a data set and of its iterator, which torch's `fetcher` holds."""

    def __init__(self, dataset: object, fetcher: object) -> None:
        iterator: object = getattr(fetcher, "dataset_iter", None)
        # `iter` may reset a data set that is its own iterator, so restore it afterwards.
        self._is_own = iterator is dataset
        parts = {"dataset": None if self._is_own else dataset, "iterator": iterator}
        self._fetcher = fetcher
        self._stateful = {name: part for name, part in parts.items() if is_stateful(part)}

    def __bool__(self) -> bool:
        return bool(self._stateful)

    def after(self, made: int) -> State:
        """Return the current state, including `made`, the number of batches made so far."""
        state = {name: part.state_dict() for name, part in self._stateful.items()}
        ended: bool = getattr(self._fetcher, "ended", False)
        return {**state, "made": made, "ended": ended, "is_own": self._is_own}
