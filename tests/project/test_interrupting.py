"""The Ctrl-C of the tests: it strikes where a signal handler could, and nowhere else."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from interrupting import interrupted

from cseq import system
from cseq.encoding import failure

if TYPE_CHECKING:
    import pytest


class Silent(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_it_does_not_strike_between_a_raise_and_its_handler() -> None:
    """No signal handler runs there, and no exception is taken for one in hand for ever."""
    for countdown in itertools.count(1):
        with interrupted(countdown, "encoding/failure.py") as struck:
            failure.str_of(Silent())
        assert sys.exc_info() == (None, None, None)
        if not struck.is_set():
            break
    assert countdown > 1


def test_it_does_not_strike_while_a_generator_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.12 ends one by an instruction that runs no signal handler, on no line."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_type))
    for countdown in itertools.count(1):
        with interrupted(countdown, "system.py") as struck:
            system.neighbours()
        if not struck.is_set():
            break
    assert countdown > 1
    assert ignored == []
