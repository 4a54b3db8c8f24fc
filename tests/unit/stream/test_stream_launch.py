"""Streams whose workers are started with the first epoch: `launch="begin"`."""

from __future__ import annotations

import contextvars
import decimal
import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from counting import (
    METHODS,
    Numbers,
    in_process,
    plain,
    streams,
)
from killing import kill

from cseq.processes.launcher import direct

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("method", METHODS)
def test_begin_starts_the_workers(method: str) -> None:
    """The first epoch does; the next ones have the same workers."""
    with streams(start_method=method, launch="begin") as s:
        assert s.pids() == [None, None]
        assert s.begin([7, 5]) == [("begun", 0, 7), ("begun", 1, 5)]
        pids = s.ask("pid")
        assert plain(s) == in_process((7, 5))
        s.begin([2, 3])
        assert plain(s) == in_process((2, 3))
        assert s.ask("pid") == pids


def test_workers_that_are_never_started() -> None:
    """The end does not wait for them."""
    s = streams(launch="begin")
    s.close()
    assert s.pids() == [None, None]


class Level(Numbers):
    """Makes items of what this process has in `CHANGED`."""

    def make(self, key: int) -> Any:
        return key, list(CHANGED)


CHANGED: list[int] = []


@pytest.mark.needs("fork")
@pytest.mark.parametrize("launch", ["now", "begin"])
def test_what_the_keys_change_before_a_fork(launch: str) -> None:
    """Keys are drawn before workers are forked by `begin`, and behind it if by the constructor."""

    def keys() -> Iterator[int]:
        CHANGED.append(1)
        yield from range(5)

    CHANGED.clear()
    with streams(Level, start_method="fork", launch=launch) as s:
        s.begin([0, 0], keys())
        assert list(s) == [(k, CHANGED if launch == "begin" else []) for k in range(5)]


def test_keys_that_raise_before_workers_are_started() -> None:
    """Nothing is begun then, and the next call begins."""

    def keys() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with streams(Level, launch="begin") as s:
        with pytest.raises(KeyError, match="no more"):
            s.begin([0, 0], keys())
        assert s.pids() == [None, None]
        s.begin([0, 0], iter(range(5)))
        assert [key for key, _ in s] == list(range(5))


@pytest.mark.needs("fork")
@pytest.mark.parametrize("launch", ["now", "begin"])
def test_a_fork_that_fails(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that starts the workers raises it, also if the first of them was forked."""
    fork, forked = direct.fork, []

    def full() -> Any:
        if forked:
            raise OSError(errno.EAGAIN, "full")
        forked.append(True)
        return fork()

    monkeypatch.setattr(direct, "fork", full)
    with (
        pytest.raises(OSError, match="full"),
        streams(Level, start_method="fork", launch=launch) as s,
    ):
        assert launch == "begin"
        s.begin([0, 0], iter(range(5)))
    assert forked


class Surroundings(Numbers):
    """Tells what is set around it."""

    def make(self, key: int) -> Any:
        return os.getpid(), VARIABLE.get(), np.geterr()["divide"], decimal.getcontext().prec


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


@pytest.mark.needs("fork")
@pytest.mark.parametrize("launch", ["now", "begin"])
def test_a_forked_worker_has_the_context_of_its_thread(launch: str) -> None:
    """So has one that replaces it. numpy's and decimal's settings are in it."""
    got = []

    def work() -> None:
        VARIABLE.set(1)
        decimal.setcontext(decimal.Context(prec=5))
        with (
            np.errstate(divide="raise"),
            streams(Surroundings, start_method="fork", launch=launch) as s,
        ):
            for _ in range(2):
                s.begin([0, 0], iter(range(4)))
                got.extend(s)
                pid = s.pids()[1]
                assert pid is not None
                kill(pid)

    contextvars.copy_context().run(work)
    assert len({pid for pid, *_ in got}) == 3
    assert {tuple(rest) for _, *rest in got} == {(1, "raise", 5)}
