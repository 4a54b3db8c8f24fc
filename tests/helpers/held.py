"""What the workers of a running manager, loader or `Streams` hold, and which of them are ready."""

from __future__ import annotations

from typing import NamedTuple

from cseq.memory._slots import TRAINER
from cseq.testing import supervisor_of


class Slots(NamedTuple):
    """Slots of shared memory, at one moment: with data that the loop holds, of the trainer, of all.

    Those that are taken hold batches that wait for the loop, or requests to workers; those that are
    owned, batches that are being made and arrays that an indexer keeps.
    """

    leased: int
    taken: int
    owned: int
    total: int


def slots(running):
    """Count the slots of shared memory; those that occupy none are not in the total."""
    shared = supervisor_of(running).shared
    made = shared.slots
    published = set().union(*(ring.slots() for ring in shared.rings))
    free = leased = taken = owned = 0
    for slot, owner in [*enumerate(made.owners())][1:]:  # the first one is that of the table
        if not owner:
            free += made.nbytes(slot) > 0
        elif made.is_leased(slot):
            leased += 1
        elif owner == TRAINER or slot in published:
            taken += 1
        else:
            owned += 1
    return Slots(leased, taken, owned, free + leased + taken + owned)


def ready(running):
    """Tell which workers are ready: their indexers are made, and they have not ended."""
    supervisor = supervisor_of(running)
    return [supervisor.is_ready(owner) for owner in supervisor.wanted()]
