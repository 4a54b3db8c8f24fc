"""A sequence on a fleet: agents come, go, die, stop; the stream is that of test mode."""

from __future__ import annotations

import json
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fleets import LocalFleet
from indexers import Indices1
from kinds import assert_same
from waiting import until

import cseq
from cseq.arguments import WorkerOptions
from cseq.fleet import dispatch, ledger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SAMPLES, SIZE = 700, 4
BATCHES = SAMPLES // SIZE
OPTIONS: dict[str, Any] = {"batch_size": SIZE, "seed": 3, "out_type": "null"}


class Draws:
    """Draws from all generators; batches have different sizes."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        drawn = cseq.rng().integers(1000, size=len(indices))
        large = np.arange(int(indices[0]) % 9 * 3000)
        return indices, drawn, np.random.randint(1000), random.random(), large  # noqa: NPY002


class Fails(Draws):
    """Raises for one sample in fifty."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        if 0 in indices % 50:
            raise LookupError("no such sample")
        return super().__getitem__(indices)


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        raise FileNotFoundError(2, "no such file")


class Dies(Draws):
    """Ends its process in one batch."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        if 77 in indices:
            os._exit(5)
        return super().__getitem__(indices)


@pytest.fixture
def fleet() -> Iterator[LocalFleet]:
    """Two agents with a worker each."""
    with LocalFleet(Draws) as fleet:
        yield fleet


def sequence(fleet: Any, **options: Any) -> Any:
    """Make a sequence on a fleet."""
    return cseq.RaySequence(fleet, SAMPLES, 2, **OPTIONS | options)


def in_test_mode(worker: Any = Draws, epochs: int = 1, **options: Any) -> list[Any]:
    """List the batches that test mode makes."""
    manager = cseq.MPSequence(worker, SAMPLES, **OPTIONS | options)
    with manager.start_test() as batches:
        return [batch for _ in range(epochs) for batch in batches]


def test_the_stream_is_that_of_test_mode(fleet: LocalFleet) -> None:
    """Over three epochs, bit for bit."""
    with sequence(fleet).start() as batches:
        got = [batch for _ in range(3) for batch in batches]
    assert_same(got, in_test_mode(epochs=3))


def test_two_sequences_share_a_fleet(fleet: LocalFleet) -> None:
    """With other seeds and batch sizes, at the same time."""
    options: dict[str, Any] = {"seed": 2**64 - 1, "batch_size": 7}
    with sequence(fleet).start() as one, sequence(fleet, **options).start() as other:
        got = list(zip(one, other, strict=False))
    assert_same([pair[0] for pair in got], in_test_mode()[: len(got)])
    assert_same([pair[1] for pair in got], in_test_mode(**options)[: len(got)])


def test_room_that_the_loop_makes_is_used_at_once(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all tickets are posted, and nothing wakes the dispatcher; copies are counted."""
    monkeypatch.setattr(dispatch, "LOOK", 3600.0)
    with sequence(fleet, memory_limit=2 * 10**6).start() as running:
        batches, got = iter(running), []
        for left in range(BATCHES, 0, -5):
            until(lambda left=left: running.stats().depths[2] >= min(5, left))
            got += [next(batches) for _ in range(min(5, left))]
        assert running.stats().copies > 0  # all are held
    assert_same(got, in_test_mode())


def test_unordered_batches_come_once_each(fleet: LocalFleet) -> None:
    """In the order in which they are finished."""
    with sequence(fleet, ordered=False).start() as batches:
        got = sorted(batches, key=lambda batch: int(batch[0][0]))
    assert_same(got, sorted(in_test_mode(), key=lambda batch: int(batch[0][0])))


def test_batches_become_tensors_of_the_type_asked_for(fleet: LocalFleet) -> None:
    """The trainer casts: two sequences on one fleet may want different types."""
    torch = pytest.importorskip("torch")
    for dtype in ("float16", None):
        options = {"out_type": "cpu", "dtype": dtype}
        with sequence(fleet, **options).start() as batches:
            got = list(batches)
        want = in_test_mode(**options)
        assert all(
            one.dtype == other.dtype and torch.equal(one, other)
            for a, b in zip(got, want, strict=True)
            for one, other in zip((a[0], a[1], a[4]), (b[0], b[1], b[4]), strict=True)
        )


def test_an_exception_names_its_agent_and_costs_its_batch_alone() -> None:
    """Raised in the place of the batch, with its own type; the next call goes on."""
    with LocalFleet(Fails) as fleet, sequence(fleet).start() as batches:
        iterator, got, notes = iter(batches), [], []
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                break
            except LookupError as error:
                notes.append("".join(error.__notes__))
    want = [one for one in in_test_mode() if 0 not in one[0] % 50]
    assert_same(got, want)
    assert len(notes) == BATCHES - len(want)
    assert all("made by agent" in note and "epoch 0, batch" in note for note in notes)


def test_failing_batches_are_left_out() -> None:
    """With on_error='skip'."""
    with LocalFleet(Fails) as fleet, sequence(fleet, on_error="skip").start() as batches:
        got = list(batches)
        assert batches.stats().skips == BATCHES - len(got)
    assert_same(got, [one for one in in_test_mode() if 0 not in one[0] % 50])


def test_agents_that_are_lost_and_come_back_change_nothing(fleet: LocalFleet) -> None:
    """One of them, then the other, then both at once."""
    one, other = fleet.agents.values()
    got = []
    with sequence(fleet, buffer=16).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k < 100:
                one.is_lost, other.is_lost = 20 <= k < 60, 70 <= k < 90
            if k == 100:  # both are lost: nothing comes until one is back
                one.is_lost = other.is_lost = True
                threading.Timer(0.3, setattr, (other, "is_lost", False)).start()
        assert batches.stats().lost > 0
    assert_same(got, in_test_mode())


def test_agents_come_and_go_in_the_middle_of_an_epoch(fleet: LocalFleet) -> None:
    """What an agent had that has left is made by others; a new one gets work."""
    got = []
    with sequence(fleet, buffer=16).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 40:
                fleet.remove(1)
            if k == 80:
                fleet.add()
            if k == 120:
                fleet.remove(2)
        assert batches.stats().agents == 1
    assert_same(got, in_test_mode())


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A rank that has the second of two agents, and the third of three."""
    monkeypatch.setattr(ledger, "FEWEST", 1)
    monkeypatch.setattr(ledger, "SHARES", 1)
    assert [ledger.chosen(6, 8, names) for names in ("12", "123")] == [["2"], ["3"]]
    return {"shard": (6, 8), "batch_size": 1}


def test_of_many_agents_a_rank_has_few(fleet: LocalFleet, one_of_two: dict[str, Any]) -> None:
    """Here one: the second, then a new one until that is gone, and again the second one."""
    one, other = fleet.agents.values()
    got = []
    with sequence(fleet, buffer=4, **one_of_two).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 20:
                third = fleet.add()
                until(lambda agent=third: agent.pongs > 0)
            if k == 40:
                before = other.parcels
            if k == 60:
                assert [third.parcels > 0, other.parcels] == [True, before]
                fleet.remove(3)
        assert batches.stats().agents == 1
    assert [one.parcels, other.parcels > before] == [0, True]
    assert_same(got, in_test_mode(**one_of_two))


def test_an_agent_that_is_leaving_a_rank_comes_back(
    fleet: LocalFleet, one_of_two: dict[str, Any]
) -> None:
    """While it still has a parcel: the one that took its place is gone again."""
    one, other = fleet.agents.values()

    def come_and_go() -> None:
        until(lambda: other.parcels > other.answers)
        third = fleet.add()
        until(lambda: third.pongs > 0)
        fleet.remove(3)
        other.go()

    thread = threading.Thread(target=come_and_go)
    got = []
    with sequence(fleet, buffer=4, **one_of_two).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 20:
                other.stop()
                thread.start()
        thread.join()
        assert batches.stats().agents == 1
    assert one.parcels == 0
    assert_same(got, in_test_mode(**one_of_two))


def test_what_a_stopped_agent_has_is_made_by_others(fleet: LocalFleet) -> None:
    """Its late answers are dropped."""
    got = []
    with sequence(fleet, buffer=16).start() as batches:
        for k, batch in enumerate(batches):
            got.append(batch)
            if k == 30:
                fleet.agents[1].stop()
            if k == 130:
                fleet.agents[1].go()
        assert batches.stats().hedged > 0
    assert_same(got, in_test_mode())


def test_a_loop_that_leaves_waits_for_no_agent(fleet: LocalFleet) -> None:
    """All agents are stopped, and hold all tickets: break, set_epoch, iter and finish return."""
    manager = sequence(fleet, buffer=16)
    with manager.start() as batches:
        for k, _ in enumerate(batches):
            if k == 3:
                break
        for agent in fleet.agents.values():
            agent.stop()
        iter(manager)
        manager.set_epoch(7)
        iter(manager)
        for agent in fleet.agents.values():
            agent.go()
        manager.set_epoch(1)
        got = list(manager)
        for agent in fleet.agents.values():
            agent.stop()
        iter(manager)
    for agent in fleet.agents.values():
        agent.go()
    assert_same(got, in_test_mode(epochs=2)[BATCHES:])


def test_an_epoch_that_is_half_done_goes_on_elsewhere(fleet: LocalFleet) -> None:
    """Half on a fleet, a quarter in processes, a quarter in threads: the stream of test mode."""
    kinds = [
        (sequence(fleet), BATCHES // 2),
        (cseq.MPSequence(Draws, SAMPLES, 2, **OPTIONS), BATCHES // 4),
        (cseq.MTSequence(Plain, SAMPLES, 2, **OPTIONS), None),
    ]
    got, state = [], None
    for manager, most in kinds:
        if state is not None:
            manager.load_state_dict(state)
        with manager.start() as batches:
            for k, batch in enumerate(batches):
                got.append(batch[:2])
                if k + 1 == most:
                    break
            state = manager.state_dict()
    assert_same(got, [batch[:2] for batch in in_test_mode()])


class Plain(Draws):
    """Draws from `cseq.rng` alone: threads share the other generators with the loop."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        return indices, cseq.rng().integers(1000, size=len(indices))


def test_an_indexer_that_cannot_be_made_ends_the_loop() -> None:
    """With its own exception, at the first batch; it is not tried with other agents."""
    with LocalFleet(Refuses) as fleet, sequence(fleet).start() as batches:
        iterator = iter(batches)
        with pytest.raises(FileNotFoundError, match="no such file"):
            next(iterator)


def test_a_batch_that_kills_the_workers_of_an_agent_is_named() -> None:
    """As in processes."""
    with LocalFleet(Dies) as fleet, sequence(fleet, shuffle=False).start() as batches:
        iterator = iter(batches)
        with pytest.raises(cseq.WorkerDied, match="has ended 3 workers") as caught:
            list(iterator)
    assert caught.value.batch == 77 // SIZE
    assert 77 in caught.value.indices


def test_a_batch_that_is_lost_with_three_agents_is_named() -> None:
    """With the agents, and how the last one ended."""
    with LocalFleet(Draws, nodes=4) as fleet:
        for agent in fleet.agents.values():
            agent.stop()
        with sequence(fleet, shuffle=False, buffer=1).start() as batches:
            iterator = iter(batches)
            for agent in fleet.agents.values():
                agent.is_lost_in_work = True
                agent.go()
            with pytest.raises(cseq.WorkerDied, match="was lost with 3 agents") as caught:
                next(iterator)
    assert (caught.value.epoch, caught.value.batch) == (0, 0)


def test_no_more_is_made_ahead_than_memory_limit_has_room_for() -> None:
    """Batches that wait for the loop, and those that agents make."""
    with LocalFleet(Large, batch_size=1) as fleet:
        manager = cseq.RaySequence(
            fleet, 200, 2, batch_size=1, seed=3, out_type="null", memory_limit=20 << 20
        )
        most = 0
        with manager.start() as batches:
            for batch in batches:
                most = max(most, batches.stats().depths[2])
                assert batch.nbytes == 1 << 20
    assert most <= 21


class Large:
    """Makes a mebibyte."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        return np.full(1 << 20, indices[0], np.uint8)


def test_a_fleet_is_for_sequences_of_fleets() -> None:
    """Other kinds refuse it, and say what takes it."""
    fleet = LocalFleet(Draws, nodes=0)
    with pytest.raises(TypeError, match="is a fleet: give it to a RaySequence"):
        cseq.MPSequence(fleet, SAMPLES)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("start_method", "spawn"),
        ("max_restarts", 3),
        ("timeout", 5.0),
        ("on_timeout", "restart"),
        ("threads", 2),
        ("preload", False),
        ("seed_globals", False),
    ],
)
def test_options_of_workers_are_the_fleets(option: str, value: Any) -> None:
    """Beside a fleet they would do nothing, so they are refused."""
    with (
        LocalFleet(Indices1, 0) as fleet,
        pytest.raises(TypeError, match=f"{option}={value!r} concerns the fleet's workers"),
    ):
        cseq.RaySequence(fleet, 10, **{option: value})


def test_memory_is_limited_on_the_machine_that_has_it() -> None:
    """The default is a part of that machine's memory, not of this one's."""
    given = None, 100, None, "raise", None, 1, None
    assert WorkerOptions.checked(*given).memory_limit is None
    with pytest.raises(ValueError, match="memory_limit=-1"):
        WorkerOptions.checked(*given[:4], -1, *given[5:])


def test_counts_are_exported_while_a_loop_runs_and_at_its_end() -> None:
    """They are those of `stats`."""
    with LocalFleet(Draws) as fleet:
        manager = cseq.RaySequence(fleet, SAMPLES, batch_size=4, out_type="null")
        with manager.start() as batches:
            count = len(list(batches))
        stats = manager.stats()
        assert fleet.exported["batches"] == count
        assert fleet.exported["parcels"] == stats.parcels
        assert fleet.exported["received_bytes"] == stats.received
        assert fleet.exported["loop_waited_seconds"] > 0
        assert fleet.exported["agents"] == 2


def test_a_trace_has_when_batches_were_sent_and_there(fleet: LocalFleet, tmp_path: Path) -> None:
    """Each, from its carrier's claim to the arrival; several at the same time."""
    path = tmp_path / "run.json"
    with sequence(fleet).start(trace=path) as batches:
        assert len(list(batches)) == BATCHES
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    for phase in "be":
        names = [e["name"] for e in events if e["ph"] == phase]
        assert sorted(names) == sorted(f"remote 0/{batch}" for batch in range(BATCHES))
