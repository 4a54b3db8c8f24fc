"""Converters that die or are interrupted: each batch comes once, in order, and no file remains."""

import gc
import os
import signal

import exports as exporting
import held
import pytest
import rehearsal
from adverse import Squares, converted, digest, manager
from killing import await_death
from waiting import until

from cseq import testing

pytestmark = pytest.mark.needs("Linux")


@pytest.fixture
def converters_on_the_cpu(monkeypatch):
    """Make 'cuda' run its whole path with the CPU in the role of the device."""
    pytest.importorskip("torch")
    rehearsal.install(monkeypatch.setattr)


@pytest.mark.usefixtures("converters_on_the_cpu")
@pytest.mark.parametrize("compat", [None, False])
def test_converters_give_what_test_mode_gives(compat):
    """The second stage, in threads and in processes, changes neither order nor values."""
    m = manager(out_type="cuda", num_converters=2)
    with m.start(compat=compat):
        assert len(testing.pids(m)) == (3 if compat is None else 5)
        assert digest(m) == converted()
        # A converter thread publishes the result before it releases its batch.
        until(lambda: held.slots(m).taken == 0)


@pytest.mark.usefixtures("converters_on_the_cpu")
def test_a_dead_converter_is_replaced():
    """A killed converter process is replaced like any worker."""
    m, got = manager(out_type="cuda", num_converters=1), []
    with m.start(compat=False):
        for number, batch in enumerate(m):
            got += digest([batch])
            if number in (3, 20):
                # The converter comes after the three workers.
                testing.kill(m, 3)
        assert m.stats().restarts >= 1
    assert got == converted()


@pytest.fixture
def exports(tmp_path, monkeypatch):
    """Make converter processes export their tensors as if to a device."""
    pytest.importorskip("torch")
    (tmp_path / "exported").mkdir()
    made = []

    def make(**options):
        made.append(exporting.Exports(tmp_path / "exported", **options))
        made[0].install(monkeypatch)
        return made[0]

    yield make
    made[0].close()


def test_batches_of_a_dead_converter_are_converted_again(exports):
    """Finished batches that the loop has not taken die with the converter, and are made again."""
    theirs = exports(die_at=6)
    m = manager(out_type="cuda", num_converters=1)
    with m.start(compat=False):
        iterator = iter(m)
        # Five batches are ready, and the sixth is nearly so.
        await_death(theirs.heard())
        assert digest(iterator) == converted()
        stats = m.stats()
    assert (stats.restarts, stats.retries) == (1, 6)
    left = {name.partition("-")[0] for name in theirs.left()}
    assert len(left) == 1


@pytest.mark.parametrize("large", [True, False])
def test_converters_get_the_memory_of_cancelled_batches_back(exports, large):
    """When an epoch is abandoned, each tensor of its converted batches is released once."""
    theirs = exports(tell_at=10)
    m = manager(Squares if large else Small, out_type="cuda", num_converters=1)
    with m.start(compat=False):
        iterator = iter(m)
        first = digest([next(iterator)])
        theirs.heard()
        for _ in range(2):
            for _, _batch in zip(range(3), m, strict=False):
                pass
        list(m)
        assert theirs.left() == []
        assert m.stats().retries == 0
    m.set_epoch(0)
    with m.start_test("cpu"):
        assert digest([next(iter(m))]) == first


class Small(Squares):
    """Batches that are copied from their slots."""

    def __getitem__(self, indices):
        return {"indices": indices, "text": [str(index) for index in indices]}


def test_an_interrupted_import_is_made_again(exports, monkeypatch):
    """After Ctrl-C while a batch leaves a converter process, the next batch is the same one."""
    theirs = exports()
    strikes, calls = {3, 30, 31, 55}, []
    open_once = exporting.open_once

    def strike(*place):
        calls.append(place)
        if len(calls) in strikes:
            signal.default_int_handler(signal.SIGINT, None)
        return open_once(*place)

    # A handle looks for this name.
    strike.__qualname__ = "open_once"
    strike.__module__ = "exports"

    monkeypatch.setattr(exporting, "open_once", strike)
    m = manager(out_type="cuda", num_converters=1)
    got = []
    with m.start(compat=False):
        iterator = iter(m)
        while True:
            try:
                got += digest([next(iterator)])
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
    assert len(calls) > max(strikes)
    assert got == converted()
    assert not [name for name in theirs.left() if name.startswith("twice")]


@pytest.mark.parametrize("how", ["finish", "drop"])
def test_converters_leave_no_counts_in_dev_shm(exports, how):
    """Torch's files of reference counts go with their converters, unless these are killed."""
    theirs = exports(tell_at=10)
    m = manager(out_type="cuda", num_converters=1)
    m.start(compat=False)
    iterator = iter(m)
    pid = theirs.heard()
    assert counts_of(pid)
    if how == "drop":
        del iterator, m
        gc.collect()
    else:
        m.finish()
    await_death(pid)
    assert not counts_of(pid)


def counts_of(pid):
    """Return the names of a converter's files of reference counts."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]
