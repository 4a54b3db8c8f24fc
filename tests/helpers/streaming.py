"""What tests of streams look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cseq.stream import Streams


def lost_slots(s: Streams) -> set[int]:
    """Slots that are in use for nothing; all of them if any is leased."""
    pool: Any = s._run.pool
    slots = pool.supervisor.arena.slots
    every = range(slots.capacity)
    if slots.leased:
        return set(every)
    in_use = set().union(*(consumer.taken_slots() for consumer in pool.consumers))
    return {slot for slot in every if slots.is_taken(slot)} - in_use
