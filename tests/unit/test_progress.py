"""The bar says how much the loop waits, and costs nothing without a viewer."""

import io
import re
import sys
import threading

import numpy as np
import pytest
from indexers import Indices1

import cseq

tqdm = pytest.importorskip("tqdm")


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch):
    """Keep tqdm from a thread and a lock in shared memory, which it never frees."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    tqdm.tqdm.set_lock(threading.RLock())


def drawn(loader, **options):
    """Iterate with a bar drawn at every batch; return the batches, and the bars."""
    to = io.StringIO()
    bar = cseq.progress(
        loader, file=to, disable=False, mininterval=0, miniters=1, ncols=120, **options
    )
    return list(bar), to.getvalue()


def test_the_share_of_waiting():
    """Before the first batch, the bar says so; later it has the share, over epochs and bars."""
    with cseq.MTSequence(Indices1, 640, 2, out_type="null", seed=1).start() as batches:
        for _ in range(2):
            got, text = drawn(batches)
            assert sorted(np.concatenate(got)) == list(range(640))
            assert "20/20" in text
            assert re.findall(r"waits \d+ %", text)
    to = io.StringIO()
    with cseq.MTSequence(Indices1, 640, 2, out_type="null", seed=1).start() as batches:
        cseq.progress(batches, file=to, disable=False).close()
    assert "starting" in to.getvalue()


def test_a_cause_is_named(monkeypatch):
    """The advice's word is next to the share, except for words that add nothing."""

    class Loader:
        cause = "stragglers"

        def __iter__(self):
            return iter(range(3))

        def stats(self):
            return cseq.Stats(batches=9, loop_waited=3.0, elapsed=10.0, num_workers=1)

    monkeypatch.setattr(cseq.Stats, "bottleneck", property(lambda _: Loader.cause))
    monkeypatch.setattr(cseq.Stats, "since", lambda self, _: self)
    assert "waits 30 %: stragglers" in drawn(Loader())[1]
    Loader.cause = "loop"
    assert "waits 30 %]" in drawn(Loader())[1]


def test_a_loop_that_makes_its_batches_itself():
    """It waits for nothing that could be measured; without figures, the bar says nothing."""
    manager = cseq.MTSequence(Indices1, 640, 0, out_type="null", seed=1)
    with manager.start() as batches:
        text = drawn(batches)[1]
    assert "num_workers=0" in text
    assert "waits" not in text

    class Loader:
        def __iter__(self):
            return iter(range(3))

        def stats(self):
            raise RuntimeError("there are none")

    assert "starting" not in drawn(Loader())[1].splitlines()[-1].rpartition("3batch")[2]


def test_a_manager_that_is_started_again():
    """A bar that outlives a start counts from the new start."""
    manager = cseq.MTSequence(Indices1, 640, 2, out_type="null", seed=1)
    with manager.start() as batches:
        list(batches)
        bar = cseq.progress(batches, file=io.StringIO(), disable=False, mininterval=0, miniters=1)
    with manager.start():
        assert len(list(bar)) == 20


def test_any_loader():
    """A loader without stats gets tqdm's own bar, and options are tqdm's."""
    got, text = drawn(range(5), desc="numbers", initial=2, total=7)
    assert got == list(range(5))
    assert "numbers" in text
    assert "7/7" in text
    assert "waits" not in text


def test_nothing_is_drawn_without_a_terminal(capfd):
    """A job's log file stays clean."""
    with cseq.MTSequence(Indices1, 64, 2, out_type="null", seed=1).start() as batches:
        assert len(list(cseq.progress(batches))) == 2
    assert capfd.readouterr() == ("", "")


def test_without_tqdm(monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        cseq.progress(range(3))
