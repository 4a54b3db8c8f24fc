"""What tests of streams look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq._slots import TRAINER

if TYPE_CHECKING:
    from cseq.stream import Streams


def lost_slots(s: Streams) -> set[int]:
    """Slots that are in use for nothing; all of them if any is leased."""
    pool: Any = s._run.pool
    slots = pool.supervisor.shared.arena.slots
    if slots.leased:
        return set(range(1, slots.capacity))
    in_use = set().union(*(consumer.taken_slots() for consumer in pool.consumers))
    return {k for k, owner in enumerate(slots.owners()) if k and owner == TRAINER} - in_use
