"""The trainer's part at a ring alone, where tests need no feed."""

from __future__ import annotations

from typing import Any

from cseq._core import Ring, ring_bytes
from cseq._memory import Block
from cseq._work import Runner


def make_ring(cells: int = 4, size: int = 2, runners: int = 3, calls: int = 0) -> Ring:
    """Make a ring in private memory."""
    return Ring(Block(ring_bytes(cells, size, runners), zero=True), cells, size, runners, calls)


def post(
    ring: Ring, cell: int, ticket: int, epoch: int, batch: int, count: int, start: int = 0
) -> None:
    """Post a ticket in a free cell."""
    ring.offer(cell, ticket, epoch, batch, count, start, 0)


def claim(ring: Ring, owner: int = 1, stage: int = 0, *, last: bool = True) -> Runner:
    """Take a runner and a ticket."""
    runner = Runner(ring, stage, owner, last=last)
    assert runner.claim() is True
    return runner


def tickets(ring: Ring) -> list[tuple[int, int]]:
    """List number and cell of each ticket in a ring, the oldest first."""
    words = [(ring.token(cell), cell) for cell in range(ring.capacity)]
    return sorted((word >> 24, cell) for word, cell in words if word & 0xFF)


def vacant(ring: Ring) -> int:
    """Return a free cell, or -1."""
    taken = {cell for _, cell in tickets(ring)}
    return next((cell for cell in range(ring.capacity) if cell not in taken), -1)


def take(ring: Ring, *, ordered: bool = True) -> tuple[Any, ...] | None:
    """Take the oldest ticket, or (unordered) any one: its cell, and what was answered."""
    for ticket, cell in tickets(ring)[: 1 if ordered else None]:
        answer = ring.peek(cell, ticket)
        if answer:
            ring.retire(cell)
            return cell, *answer
    return None


def wait(ring: Ring, seen: int) -> None:
    """Wait for the oldest ticket: first awake, as `Feed` does."""
    cells = [cell for _, cell in tickets(ring)]
    last = cells[min(max(ring.apart, 1), len(cells)) - 1]
    if not ring.expect(cells[0], last, seen):
        ring.wait(seen, cells[0])
