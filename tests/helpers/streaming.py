"""State of streams that their tests inspect."""

from cseq.engine._streams import Request
from cseq.memory._slots import TRAINER

# Where a signal handler may raise in a stream's calls.
STEPS = ("stream.py", "engine/", "runs.py", "encoding/", "memory/arena.py")


def lost_slots(s):
    """Return the slots in use without a purpose, or all slots if any is leased."""
    pool = s._run.pool
    if pool.supervisor is None:
        # Threads have no supervisor.
        return set()
    slots = pool.supervisor.shared.slots
    if slots.leased:
        return set(range(1, len(slots.owners())))
    kept = [one for ring in pool.rings for there in ring.kept if there for one in there]
    requests = {one for one in [*kept, *pool.tickets.assignments] if isinstance(one, Request)}
    in_use = {request.slot for request in requests}.union(*(ring.slots() for ring in pool.rings))
    return {k for k, owner in enumerate(slots.owners()) if k and owner == TRAINER} - in_use
