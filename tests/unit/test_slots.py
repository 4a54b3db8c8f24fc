"""The table of slots: who takes which, and the leases on them."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
from slots import MOST, PAGE, WIDTH, commit_ticket, file_of, lease, shared

from cseq._memory import TRAINER, Lease, Mapping, SlotTable


def test_many_slots() -> None:
    """The table grows; when all slots are in use, that is a MemoryError."""
    _, slots = shared(2000)
    assert slots.capacity == 1024
    assert [slots.take() for _ in range(1999)] == list(range(1, 2000))
    with pytest.raises(MemoryError, match="all 1999 slots"):
        slots.take()
    slots.free(7)
    assert slots.take() == 7


def test_each_process_has_the_slots_that_it_takes() -> None:
    """A worker's slot is its own until it frees it, or a ticket that lies there leaves the ring."""
    file, trainer = shared()
    worker = 3
    slots = SlotTable(file.fd, WIDTH, MOST, worker)
    assert [slots.take(), trainer.take(), slots.take()] == [1, 2, 3]
    assert trainer.owners()[:5] == [TRAINER, worker, TRAINER, worker, 0]
    with pytest.raises(RuntimeError, match="slot 2 is not taken"):
        slots.free(2)
    slots.free(1)
    commit_ticket(trainer, 3, 0)
    with pytest.raises(RuntimeError, match="slot 3 is not taken"):
        slots.free(3)
    assert trainer.owners()[:4] == [TRAINER, 0, TRAINER, 0]
    slots.resize(1, PAGE)
    assert trainer.nbytes(1) == PAGE


def test_slots_are_not_released_twice() -> None:
    """A slot that is not taken cannot be released or leased; one that does not exist neither."""
    _, slots = shared()
    with file_of(PAGE) as fd:
        mapping = Mapping(fd, 0, PAGE)
    for use in (slots.free, lambda slot: lease(slots, slot, mapping)):
        with pytest.raises(RuntimeError, match="slot 1"):
            use(1)
        for slot in (-1, 0, 2**40):
            with pytest.raises(IndexError, match=str(slot)):
                use(slot)
    held = lease(slots, slots.take(), mapping)
    with pytest.raises(RuntimeError, match="not taken"):
        lease(slots, 1, mapping)
    del held
    with pytest.raises(TypeError):
        lease(slots, slots.take(), None)  # type: ignore[arg-type]


def test_a_lease_frees_its_slot() -> None:
    """A slot is free again when the last view on its lease is gone, and counted until then."""
    _, slots = shared()
    with file_of(PAGE) as fd:
        mapping = Mapping(fd, 0, PAGE)
    memoryview(mapping)[:] = b"\7" * PAGE
    held = lease(slots, slots.take(), mapping)
    assert isinstance(held, Lease)
    view = held.view(0, np.dtype("u1"), (PAGE,))
    part = view[10:][::2][:3]
    assert (slots.leased, slots.leased_bytes) == (1, PAGE)
    del held, view, mapping
    assert (slots.leased, slots.take()) == (1, 2)
    assert part.tolist() == [7, 7, 7]
    del part
    assert (slots.leased, slots.leased_bytes, slots.take()) == (0, 0, 1)


def test_the_lowest_free_slot_is_found_again_and_again() -> None:
    """Whatever was freed since: first, last, again, or new slots; also where the search is long."""
    rng = random.Random(7)
    _, slots = shared()
    taken: set[int] = set()
    for step in range(4000):
        few = step % 800 < 400  # half the time many are taken, then nearly none
        if taken and rng.random() < (0.1 if few else 0.9):
            slot = rng.choice(sorted(taken))
            slots.free(slot)
            taken.remove(slot)
        else:
            slot = next(slot for slot in itertools.count(1) if slot not in taken)
            assert slots.take() == slot
            taken.add(slot)


def test_slots_freed_on_other_threads_are_found() -> None:
    """A search that goes on meanwhile passes none of them for good."""
    _, slots = shared()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine: list[int] = []
        for _ in range(20000):
            if mine and rng.random() < 0.5:
                slots.free(mine.pop(rng.randrange(len(mine))))
            else:
                mine.append(slots.take())
        for slot in mine:
            slots.free(slot)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [slots.take() for _ in range(65)] == list(range(1, 66))
