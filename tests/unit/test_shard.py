"""Which rank this is: given, from torch, from launchers; and what contradicts itself."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from indexers import Indices1

import cseq
from cseq.order import shard

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip


def shard_of(value: Any) -> tuple[int, int]:
    """Resolve the argument."""
    return (shard.given(value) or shard.resolve())[:2]


def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Set these of all launchers' variables, without torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for key in VARIABLES:
        monkeypatch.delenv(key, raising=False)
    for key, value in values.items():
        monkeypatch.setenv(key, value)


def process_group(monkeypatch: pytest.MonkeyPatch, *, initialised: bool) -> None:
    """Put a torch in place that is, or is not, rank 2 of 3."""
    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        get_rank=lambda: 2,
        get_world_size=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed))


def test_shard_given() -> None:
    """None is everything; a pair is itself."""
    assert shard_of(None) == (0, 1)
    assert shard_of((1, 3)) == (1, 3)
    assert shard_of([np.int64(0), np.uint8(1)]) == (0, 1)
    with pytest.raises(
        ValueError, match=r"shard=\(2, 2\): rank 2 is not .* count from 0, .* most 1"
    ):
        shard_of((2, 2))


def test_shard_auto_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """'auto' takes torchrun's environment, also beside a torch without a process group."""
    environment(monkeypatch, RANK="1", WORLD_SIZE="4")
    assert shard_of("auto") == (1, 4)
    process_group(monkeypatch, initialised=False)
    assert shard_of("auto") == (1, 4)


def ray_train(monkeypatch: pytest.MonkeyPatch, ranks: int | None) -> None:
    """Put a ray.train in place that is rank 1 of some, or says that it is not in a worker."""

    def get_context() -> Any:
        if ranks is None:
            raise RuntimeError("this is no worker")
        return types.SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: ranks)

    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=get_context))


def test_shard_auto_from_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """'auto' asks Ray Train first; outside of its workers, it goes on."""
    environment(monkeypatch, RANK="3", WORLD_SIZE="4")
    process_group(monkeypatch, initialised=True)
    ray_train(monkeypatch, 5)
    assert shard_of("auto") == (1, 5)
    ray_train(monkeypatch, None)
    assert shard_of("auto") == (2, 3)
    ray_train(monkeypatch, 1)
    assert shard_of("auto") == (2, 3)


@pytest.mark.parametrize(
    ("rank", "world_size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0"), ("", "1")]
)
def test_shard_auto_with_a_bad_environment(
    monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    """An environment that makes no sense is an error that shows it."""
    environment(monkeypatch, RANK=rank, WORLD_SIZE=world_size)
    with pytest.raises(ValueError, match=f"RANK='{rank}' and WORLD_SIZE='{world_size}'"):
        shard_of("auto")


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"NODE_RANK": "0", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (1, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"}, (3, 5)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "5"}, (0, 1)),  # a batch script, without srun
        (
            {"RANK": "6", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            (6, 8),
        ),
    ],
)
def test_launchers(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], want: tuple[int, int]
) -> None:
    """Each launcher's variables are known, the innermost first."""
    environment(monkeypatch, **values)
    assert shard_of("auto") == want


@pytest.mark.parametrize("more", [{}, {"NODE_RANK": "1", "LOCAL_RANK": "0"}])
def test_a_world_size_without_a_rank(monkeypatch: pytest.MonkeyPatch, more: dict[str, str]) -> None:
    """Several ranks, and no word of which this is: an error, and no duplication."""
    environment(monkeypatch, WORLD_SIZE="4", **more)
    with pytest.raises(ValueError, match=r"WORLD_SIZE='4'.*no rank"):
        shard_of("auto")


def make(**options: Any) -> Any:
    """Make a manager of ten samples in test mode's pool."""
    options = {"seed": 1, "batch_size": 1, "out_type": "null", "shard": "auto"} | options
    return cseq.MTSequence(Indices1, 10, 1, **options)


def test_nothing_is_asked_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructor and properties ask nothing; `len`, `sampler` and a start do, and remember."""
    environment(monkeypatch)
    managers = [make() for _ in range(3)]
    for m in managers:
        assert (m.dset_size, m.batch_size, m.epoch, m.state_dict()["world_size"]) == (10, 1, 0, 1)
    environment(monkeypatch, RANK="1", WORLD_SIZE="5")
    assert [len(managers[0]), managers[1].length, len(managers[2].sampler)] == [2, 2, 2]
    assert managers[0].state_dict()["world_size"] == 5
    with managers[0].start_test() as m:
        order = cseq.permutation(10, 1, 0).tolist()
        assert [int(b[0]) for b in m] == [order[1], order[6]]
    environment(monkeypatch)  # what is silent contradicts nothing
    assert len(managers[0]) == 2
    with managers[0].start_test() as m:
        assert len(list(m)) == 2


@pytest.mark.parametrize("asked", ["len", "start", "iter"])
def test_a_group_that_comes_later(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Wherever it is noticed, it is an error that tells both, and what to do."""
    environment(monkeypatch)
    m = make()
    if asked == "iter":
        iter(m.start_test())
    else:
        assert len(m) == 10
    process_group(monkeypatch, initialised=True)
    again = {"len": lambda: len(m), "start": m.start_test, "iter": lambda: next(iter(m))}[asked]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 0 of 1 .*rank 2 of 3 \(torch's process group"):
            again()
    m.finish()


def test_a_group_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group that torchrun's variables announced is no contradiction."""
    environment(monkeypatch, RANK="2", WORLD_SIZE="3")
    m = make(batch_size=2)
    assert len(m) == 2
    process_group(monkeypatch, initialised=True)
    with m.start_test():
        assert len(list(m)) == 2


def test_ranks_need_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said when the ranks are known; a state's seed is one that all of them have."""
    with pytest.raises(ValueError, match="seed"):
        make(seed=None, shard=(0, 2))
    state = make().state_dict()
    environment(monkeypatch, RANK="1", WORLD_SIZE="2")
    m = make(seed=None)
    for ask in (lambda: len(m), m.start, m.start_test):
        with pytest.raises(ValueError, match=r"rank 1 of 2 .*seed"):
            ask()
    m.load_state_dict(state)
    assert len(m) == 5
    assert len(make(seed=None, shuffle=False)) == 5


def test_alone_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That shard='auto' found nothing is a warning in the log, once in the life of a process."""
    environment(monkeypatch)
    shard.warn_alone.cache_clear()
    for _ in range(2):
        assert len(make()) == 10
    assert [r.levelname for r in caplog.records if "shard='auto'" in r.getMessage()] == ["WARNING"]
    caplog.clear()
    assert len(make(shard=None)) == 10
    assert not caplog.records
