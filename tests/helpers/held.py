"""The slots that a running manager, loader or `Streams` uses, and its ready workers."""

from typing import NamedTuple

from cseq.memory._slots import TRAINER
from cseq.testing import supervisor_of


class Slots(NamedTuple):
    """The counts of slots of shared memory at one moment.

    The loop holds the data of leased slots. Taken slots hold batches that wait for the loop, or
    requests to workers. Owned slots hold batches that are being made, and arrays that an indexer
    keeps.
    """

    leased: int
    taken: int
    owned: int
    total: int


def slots(running):
    """Count the slots of shared memory; the total excludes slots without memory."""
    shared = supervisor_of(running).shared
    made = shared.slots
    published = set().union(*(ring.slots() for ring in shared.rings))
    free = leased = taken = owned = 0
    # The first slot is the table's.
    for slot, owner in [*enumerate(made.owners())][1:]:
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
    """Return, for each worker, whether it is ready: its indexer is made, and it has not ended."""
    supervisor = supervisor_of(running)
    return [supervisor.is_ready(owner) for owner in supervisor.wanted()]
