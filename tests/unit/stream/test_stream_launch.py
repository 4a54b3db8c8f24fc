"""Streams whose workers start with the first epoch: `launch="begin"`."""

import errno

import pytest
from counting import (
    METHODS,
    Numbers,
    in_process,
    plain,
    streams,
)

from cseq.processes.launcher import processes


@pytest.mark.parametrize("method", METHODS)
def test_begin_starts_the_workers(method):
    """The first epoch starts them; later epochs have the same workers."""
    with streams(start_method=method, launch="begin") as s:
        assert s.pids() == [None, None]
        assert s.begin([7, 5]) == [("begun", 0, 7), ("begun", 1, 5)]
        pids = s.ask("pid")
        assert plain(s) == in_process((7, 5))
        s.begin([2, 3])
        assert plain(s) == in_process((2, 3))
        assert s.ask("pid") == pids


def test_workers_that_are_never_started():
    """The end does not wait for them."""
    s = streams(launch="begin")
    s.close()
    assert s.pids() == [None, None]


class Level(Numbers):
    def make(self, key):
        return key


def test_keys_that_raise_before_workers_are_started():
    """Nothing has begun then, and the next call begins."""

    def keys():
        yield 1
        raise KeyError("no more")

    with streams(Level, launch="begin") as s:
        with pytest.raises(KeyError, match="no more"):
            s.begin([0, 0], keys())
        assert s.pids() == [None, None]
        s.begin([0, 0], iter(range(5)))
        assert list(s) == list(range(5))


@pytest.mark.needs("fork")
@pytest.mark.parametrize("launch", ["now", "begin"])
def test_a_fork_that_fails(launch, monkeypatch):
    """The call that starts the workers raises, even if the first one was forked."""
    fork, forked = processes.fork, []

    def full():
        if forked:
            raise OSError(errno.EAGAIN, "full")
        forked.append(True)
        return fork()

    monkeypatch.setattr(processes, "fork", full)
    with (
        pytest.raises(OSError, match="full"),
        streams(Level, start_method="fork", launch=launch) as s,
    ):
        assert launch == "begin"
        s.begin([0, 0], iter(range(5)))
    assert forked
