"""What a fleet is to the trainer: agents, which make the batches of parcels.

An agent is a `TicketServer` on some machine, at the other end of a transport. `cseq.fleet.ray` has
agents that are actors of Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union

from cseq.arguments import MAX_RESTARTS, WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Agent", "Failed", "Fleet", "Land", "Lost", "Outcome", "refuse"]


class Lost(NamedTuple):
    """An agent is gone, or cannot be reached: all that it has is to be made by others."""

    cause: str
    final: bool = False  # it will not come back


class Failed(NamedTuple):
    """What no agent can make good, such as an indexer that cannot be made: raised in the loop."""

    packed: bytes  # `failure.pack`


Outcome = Union["list[NDArray[Any]]", Lost, Failed]  # of a parcel; a list is its answer
Land = Callable[[int], "NDArray[np.uint8]"]  # makes room for so many bytes of an answer


class Agent(Protocol):
    """Makes the batches of parcels. Its methods return at once, and call `done` on any thread."""

    name: str  # where it is, for messages

    def send(self, request: NDArray[np.int64], done: Callable[[Outcome], None], land: Land) -> None:
        """Send a parcel; `done` is called once, with what becomes of it.

        The parts of its answer after the first one may be received in what `land` returns.
        """

    def ping(self, done: Callable[[Lost | Failed | None], None]) -> None:
        """Ask for a sign of life; `done` is called with None once it comes."""


class Fleet(Protocol):
    """The agents that there are."""

    @property
    def workers(self) -> int:
        """Worker processes of all agents."""

    @property
    def over(self) -> str:
        """Why there will be no agents any more; empty: there may be."""

    @property
    def waits_for(self) -> str:
        """What agents wait for that are not there yet, for the log."""

    def meter(self) -> Callable[[dict[str, float], int], None]:
        """Return what exports the counts of a sequence so far, and how many agents it has."""

    def attach(self, notify: Callable[[], None]) -> Mapping[int, Agent]:
        """Return the present agents, by number: a view that changes with them.

        `notify` is called after each change, on any thread, until `detach`. An agent that is
        replaced has a new number.
        """

    def detach(self, notify: Callable[[], None]) -> None:
        """Do not call `notify` any more."""


def refuse(options: WorkerOptions, *, seed_globals: bool) -> None:
    """Refuse what a sequence is told of workers, where a fleet has them."""
    plain = WorkerOptions(None, MAX_RESTARTS, None, "raise", options.memory_limit, 1, None)
    names = (*options._fields, "seed_globals")
    for name, given, default in zip(names, (*options, seed_globals), (*plain, True), strict=True):
        if given != default:
            raise TypeError(f"{name}={given!r} concerns the fleet's workers: give it to the fleet")
