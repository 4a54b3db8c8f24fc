"""What has a state of its own: samplers, data sets, and their iterators."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["DatasetState", "Stateful", "is_stateful", "left_by"]

State = dict[str, Any]


class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> State:
        """Return it."""

    def load_state_dict(self, state: State, /, **options: bool) -> object:
        """Set it."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether something has a state that can be asked for, without arguments, and set."""
    ask = getattr(thing, "state_dict", None)
    if not (callable(ask) and callable(getattr(thing, "load_state_dict", None))):
        return False
    try:
        inspect.signature(ask).bind()
    except TypeError:  # it is for those who know what to give
        return False
    except ValueError:  # of C, which does not tell
        pass
    return True


def left_by(state: State) -> State:
    """Return the state of a data set as an epoch has left it, whose iterator is over."""
    return {"dataset": state.get("iterator" if state.get("is_own") else "dataset"), "made": 0}


class DatasetState:
    """What has a state in a data set that is being read: itself, and its iterator.

    Parameters
    ----------
    dataset : object
    fetcher : object
        torch's fetcher of it.
    """

    def __init__(self, dataset: object, fetcher: object) -> None:
        iterator: object = getattr(fetcher, "dataset_iter", None)
        # One that is both is set as an iterator: `iter` may begin it anew.
        self._is_own = iterator is dataset
        own = None if self._is_own else dataset
        found = {"dataset": own, "iterator": iterator}
        self._fetcher = fetcher
        self._stateful = {name: each for name, each in found.items() if is_stateful(each)}

    def __bool__(self) -> bool:
        return bool(self._stateful)

    def take(self, made: int) -> State:
        """Return the present state, after so many batches."""
        state = {name: each.state_dict() for name, each in self._stateful.items()}
        ended: bool = getattr(self._fetcher, "ended", False)
        return {**state, "made": made, "ended": ended, "is_own": self._is_own}
