"""Batches from other machines: threads that each ask a Ray actor for one.

``ray``   a fleet, as its users see it; its actors; the threads that ask them
``wire``  the connection between a thread and an actor
"""

from __future__ import annotations

from cseq.arguments import MAX_RESTARTS, WorkerOptions

__all__ = ["refuse"]


def refuse(options: WorkerOptions, *, seed_globals: bool, given: bool) -> None:
    """Refuse what a sequence is told of worker processes that Ray starts; `given`: has started."""
    plain = WorkerOptions(None, MAX_RESTARTS, None, "raise", options.memory_limit, 1, None)
    told = {**options._asdict(), "seed_globals": seed_globals}
    for name, default in {**plain._asdict(), "seed_globals": True}.items():
        own = name in ("timeout", "threads", "seed_globals")
        if told[name] != default and (given or not own):
            to_do = "give it to the fleet" if own else "Ray starts these; see RayFleet"
            raise TypeError(f"{name}={told[name]!r} concerns a fleet's workers: {to_do}")
