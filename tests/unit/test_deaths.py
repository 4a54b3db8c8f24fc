"""How many deaths of workers are too many."""

from __future__ import annotations

import pytest

from cseq.processes import deaths as deaths_module
from cseq.processes.deaths import TRIES, Deaths, Held

FIRST = Held(1, 2, [4, 5], "epoch 1, batch 2, indices [4, 5]")


def others(count: int) -> list[Held]:
    """Give tickets that are all different."""
    return [Held(1, k, [k], f"batch {k}") for k in range(10, 10 + count)]


def test_the_budget_of_an_epoch() -> None:
    """One death more than `max_restarts` is too many; the next epoch has a budget of its own."""
    deaths = Deaths(2, 1, "batch", "look")
    for _ in range(2):
        deaths.begin()
        for held in others(2):
            assert deaths.count(0, -9, [held], was_ready=True) is None
    error = deaths.count(0, -9, [FIRST], was_ready=True)
    assert error is not None
    assert "max_restarts=2 allows no more" in str(error)
    assert (error.epoch, error.batch, error.indices) == (1, 2, [4, 5])
    assert (error.worker, error.exitcode) == (0, -9)
    assert deaths.restarts == 4


def test_a_batch_that_fails() -> None:
    """Its workers are replaced within the budget; what is no batch ends the run as ever."""
    deaths = Deaths(TRIES, 1, "batch", "look at it", fails=True)
    call = FIRST._replace(place="a call", is_batch=False)
    for held, fails in ((FIRST, True), (call, False)):
        deaths.begin()
        for _ in range(TRIES - 1):
            assert deaths.count(0, -11, [held], was_ready=True) is None
        assert deaths.count(0, -11, [held], was_ready=True) is not None
        assert deaths.has_failed == fails
    assert deaths.restarts == TRIES + TRIES - 1
    deaths.begin()
    deaths.count(0, -11, [], was_ready=True)
    for _ in range(TRIES):
        error = deaths.count(0, -11, [FIRST], was_ready=True)
    assert "max_restarts=3 allows no more" in str(error)
    assert not deaths.has_failed


def test_a_batch_that_takes_too_long_again_and_again() -> None:
    """The error says that the timeout has ended the worker, which a kill does not tell."""
    deaths = Deaths(0, 1, "batch", "look")
    error = deaths.count(3, -9, [FIRST], was_ready=True, is_overdue=True)
    assert str(error).startswith(
        f"worker 3 took longer than its timeout and was killed while making {FIRST.place}; "
    )


def test_workers_that_never_get_ready() -> None:
    """So many in a row mean that none can start; one that got ready resets the count."""
    deaths = Deaths(100, 2, "batch", "look")
    for _ in range(2 * TRIES - 1):
        assert deaths.count(0, 1, [], was_ready=False) is None
    assert deaths.count(0, 1, [], was_ready=True) is None
    for _ in range(2 * TRIES - 1):
        assert deaths.count(0, 1, [], was_ready=False) is None
    error = deaths.count(0, 1, [], was_ready=False)
    assert error is not None
    assert "died before they were ready" in str(error)


@pytest.mark.parametrize(("exitcode", "named"), [(-9, True), (-11, False)])
def test_kills_for_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, exitcode: int, named: bool
) -> None:
    """Where the system counts them, a death by SIGKILL has their number."""
    counts = iter([3, 5])
    monkeypatch.setattr(deaths_module, "oom_kills", lambda: next(counts))
    error = Deaths(0, 1, "batch", "look").count(0, exitcode, [], was_ready=True)
    assert error is not None
    assert ("out-of-memory kills counted by the cgroup meanwhile: 2" in str(error)) == named
    assert ("fewer workers or smaller batches" in str(error)) == named
