"""What a running manager has done so far, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """Counted since `start`, over all epochs.

    Attributes
    ----------
    batches, samples : int
        Finished and taken for the loop (test mode counts batches alone).
    nbytes : int
        Bytes of shared memory that those batches took.
    restarts : int
        Worker processes that were replaced.
    retries : int
        Batches that were made again after their worker had died.
    skips : int
        Batches left out because their indexer raised (``on_error='skip'``).
    copies : int
        Batches that were copied out of shared memory because too many were held.
    depths : (int, int, int)
        Tickets waiting at this moment for an indexer, for a converter, for the loop.
    loop_waited : float
        Seconds that the loop waited for batches.
    workers_waited : float
        Seconds that indexers waited for tickets, summed over all of them.
    """

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    restarts: int = 0
    retries: int = 0
    skips: int = 0
    copies: int = 0
    depths: tuple[int, int, int] = (0, 0, 0)
    loop_waited: float = 0.0
    workers_waited: float = 0.0

    @property
    def bottleneck(self) -> str:
        """Who is waited for: the loop itself, or the workers."""
        return "workers" if self.loop_waited > self.workers_waited else "loop"

    def __str__(self) -> str:
        waiting, middle, ready = self.depths
        return (
            f"{self.batches} batches, {self.samples} samples, {self.nbytes / 1e6:.1f} MB; "
            f"queues {waiting} in, {middle} middle, {ready} out; "
            f"the loop waited {self.loop_waited:.3f} s, workers {self.workers_waited:.3f} s "
            f"(bottleneck: {self.bottleneck}); "
            f"{self.restarts} restarts, {self.retries} retries, {self.skips} skips, "
            f"{self.copies} copies"
        )
