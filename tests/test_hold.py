"""Locks that are given back wherever a signal handler raises."""

from __future__ import annotations

import ast
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import PACKAGE, first_hits, interrupted

import cseq
from cseq._hold import Hold
from cseq._run import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

LOCKS = [threading.Lock, threading.RLock, Lock]


def is_free(lock: Any) -> bool:
    """Tell whether another thread can take a lock."""
    found = []

    def look() -> None:
        found.append(lock.acquire(timeout=0))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found.pop()


@pytest.mark.parametrize("make", LOCKS)
def test_it_holds_a_lock_for_a_block(make: Callable[[], Any]) -> None:
    """Also when the block raises."""
    lock = make()
    with Hold(lock) as hold:
        assert hold.mine
        assert not is_free(lock)
    assert not hold.mine
    assert is_free(lock)
    with pytest.raises(KeyError), Hold(lock):
        raise KeyError
    assert is_free(lock)


@pytest.mark.parametrize("make", LOCKS)
def test_it_gives_back_when_it_is_dropped(make: Callable[[], Any]) -> None:
    """Once: not again after its block."""
    lock = make()
    hold = Hold(lock)
    assert not is_free(lock)
    del hold
    assert is_free(lock)
    with Hold(lock) as hold:
        pass
    with Hold(lock):
        del hold
        assert not is_free(lock)


@pytest.mark.parametrize("make", LOCKS)
def test_a_time_limit(make: Callable[[], Any]) -> None:
    """A lock that it could not take stays another one's."""
    lock, has, leave = make(), threading.Event(), threading.Event()

    def work() -> None:
        with lock:
            has.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    has.wait()
    with Hold(lock, 0.01) as hold:
        assert not hold.mine
    assert not is_free(lock)
    leave.set()
    thread.join()
    with Hold(lock, 5.0) as hold:
        assert hold.mine
        assert not is_free(lock)
    assert is_free(lock)


def test_what_is_no_lock() -> None:
    """What its `acquire` raises comes out, and nothing is released."""
    with pytest.raises(AttributeError, match="acquire"):
        Hold(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Hold()  # type: ignore[call-arg]


METHODS: dict[str, Callable[[Any], object]] = {
    "start": lambda m: m.start(),
    "finish": lambda m: m.finish(),
    "iter": iter,
    "repr": repr,
    "set_epoch": lambda m: m.set_epoch(m.epoch + 1),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(
        {**m.state_dict(), "epoch": m.epoch + 1, "position": 0}
    ),
    "skipped": lambda m: m.skipped,
    "stats": lambda m: m.stats(),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_lock_is_left_taken(method: str) -> None:
    """Wherever in a manager's method a signal handler raises, other threads can go on."""
    made = []

    def strike(countdown: int) -> bool:
        m = cseq.MTSequence(np.arange(8), 4, out_type="null", seed=1)
        made.append(m)
        if method != "start":
            m.start()
        run = m._run
        with interrupted(countdown, "sequence.py", "run.py") as struck:
            METHODS[method](m)
        assert is_free(m._lock)
        assert run is None or is_free(run.lock)
        m.finish()
        return struck.is_set()

    assert first_hits(strike) > 2


@pytest.mark.skipif(sys.version_info < (3, 14), reason="`with` begins by a call from 3.14 on")
def test_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that the tests send leaves a lock taken by a bare ``with``, and none by a Hold."""
    script = tmp_path / "script.py"
    script.write_text(
        "def bare(lock, hold):\n    with lock:\n        pass\n"
        "def held(lock, hold):\n    with hold(lock):\n        pass\n",
        encoding="utf-8",
    )
    monkeypatch.setattr("interrupting.PACKAGE", str(tmp_path))
    functions: dict[str, Any] = {}
    exec(compile(script.read_text(encoding="utf-8"), script, "exec"), functions)

    def left(name: str) -> int:
        """Count the places where it leaves the lock taken."""
        count = 0

        def strike(countdown: int) -> bool:
            nonlocal count
            lock = threading.Lock()
            with interrupted(countdown) as struck:
                functions[name](lock, Hold)
            count += lock.locked()
            return struck.is_set()

        first_hits(strike)
        return count

    assert left("bare") > 0
    assert left("held") == 0


def test_every_lock_of_the_package_is_held_so() -> None:
    """No module in Python takes a lock by a bare ``with``."""
    bare = [
        f"{path.relative_to(PACKAGE)}:{item.context_expr.lineno}"
        for path in sorted(Path(PACKAGE).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.With)
        for item in node.items
        if ast.unparse(item.context_expr).rpartition(".")[2].endswith(("lock", "guard", "changed"))
    ]
    assert bare == []
