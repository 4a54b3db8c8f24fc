"""cseq.testing finds, kills and awaits workers, and counts what is held."""

import itertools
import os
import random
import signal

import numpy as np
import pytest
from counting import streams
from indexers import Broken
from waiting import until

import cseq
from cseq import testing

posix = pytest.mark.needs("fork")


class Wide:
    """Batches large enough to be leased that tell their worker."""

    def __getitem__(self, indices):
        info = cseq.worker_info()
        return np.repeat(indices, 1 << 13), info.number if info else None, os.getpid()


def manager(worker=Wide, **options):
    """Make a manager of two worker processes."""
    given = {"out_type": "null", "start_method": "fork", "seed": 1, "shuffle": False} | options
    return cseq.MPSequence(worker, 60, 2, batch_size=2, **given)


@posix
def test_a_killed_worker_is_the_one_of_that_number():
    """`kill` hits the process that `worker_info` and `pids` name, and the stream continues."""
    m = manager(buffer=1)
    with m.start() as batches:
        got = []
        for number, (indices, worker, pid) in enumerate(batches):
            got += indices[:: 1 << 13].tolist()
            assert pid == testing.pids(m)[worker] or number > 5
            if number == 5:
                before = testing.pids(m)
                assert testing.kill(m, 1) == before[1]
                until(lambda old=before[1]: testing.pids(m)[1] != old)
                testing.await_workers(m)
                assert testing.pids(m)[0] == before[0]
        assert got == list(range(60))
    assert m.stats().restarts == 1


@posix
def test_another_signal(caplog):
    """The caller chooses the signal."""
    m = manager()
    with m.start():
        testing.await_workers(m)
        testing.kill(m, 1, signal.SIGKILL)
        testing.kill(m, 0, signal.SIGALRM)
        assert len(list(m)) == 30
        # One worker may have made all batches.
        until(lambda: caplog.text.count("was killed by") >= 2)
    assert "worker 0 was killed by SIGALRM" in caplog.text
    assert "worker 1 was killed by SIGKILL" in caplog.text


class Late:
    def __init__(self):
        until(lambda: os.path.exists(os.environ["CSEQ_TESTS_GO"]))

    def __getitem__(self, indices):
        return indices


@posix
def test_workers_are_waited_for(tmp_path, monkeypatch):
    """The wait lasts until their indexers are made, and at most for the given time."""
    monkeypatch.setenv("CSEQ_TESTS_GO", str(tmp_path / "go"))
    with manager(Late).start() as m:
        with pytest.raises(TimeoutError, match=r"workers \[0, 1\] are not ready after 0.05 s"):
            testing.await_workers(m, 0.05)
        (tmp_path / "go").touch()
        testing.await_workers(m, None)
        assert len(list(m)) == 30


@posix
def test_what_keeps_workers_from_getting_ready_is_raised():
    """It is raised as the loop would raise it."""
    with manager(Broken).start() as m, pytest.raises(LookupError, match="no such data set"):
        testing.await_workers(m)


@pytest.mark.parametrize("worker", [-1, 2])
@posix
def test_no_such_worker(worker):
    """The error has the valid numbers."""
    with manager().start() as m, pytest.raises(ValueError, match=f"worker={worker} .* from 0 to 1"):
        testing.kill(m, worker)


def test_what_has_no_processes():
    """These are threads, test mode, a stopped manager, and any other object."""
    m = cseq.MTSequence(Wide, 4, 1, out_type="null")
    with pytest.raises(RuntimeError, match=r"not running; call start\(\)"):
        testing.kill(m, 0)
    for begin in (m.start, m.start_test):
        with begin(), pytest.raises(RuntimeError, match="by threads or in test mode"):
            testing.kill(m, 0)
    with pytest.raises(TypeError, match="ndarray has no workers"):
        testing.pids(np.arange(3))


@posix
def test_streams_that_were_closed():
    """Their workers can be found until then."""
    with streams() as s:
        testing.await_workers(s)
        assert testing.pids(s) == s.pids()
    with pytest.raises(RuntimeError, match="it was closed"):
        testing.pids(s)


@posix
def test_a_forked_process_has_no_workers():
    """Its parent's workers are out of reach."""
    with manager().start() as m:
        testing.await_workers(m)
        child = os.fork()
        if not child:
            try:
                testing.kill(m, 0)
            except RuntimeError as error:
                os._exit(0 if "forked this one" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(m)) == 30
    assert m.stats().restarts == 0


class Own(cseq.Order):
    """A correct order: rows of one and two samples in turn."""

    name = "own-v1"
    samples = 30
    units = 20
    room = 2

    def read(self, seed, epoch, start, count):
        rows = [
            [3 * (k // 2) + 2] if k % 2 else [3 * (k // 2), 3 * (k // 2) + 1] for k in range(20)
        ]
        chosen = [rows[(seed + epoch + k) % 20] for k in range(start, start + count)]
        return [index for row in chosen for index in row], [len(row) for row in chosen]


CALLS = itertools.count()


def remembering(order, seed, *asked):
    """Read other units at each call."""
    return Own.read(order, seed + next(CALLS), *asked)


def drawing(*asked):
    """Draw from a generator that is not its own."""
    random.random()
    return Own.read(*asked)


def own(**changed):
    """Make such an order with changes to the class."""
    return type("Own", (Own,), changed)()


def test_an_order_is_checked():
    """A correct order passes, of any size."""
    cseq.testing.check_order(Own(), most=3)
    cseq.testing.check_order(cseq.Shuffled(10**12))


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (own(read=remembering), "when read alone, but"),
        (own(read=drawing), "draws from a global generator"),
        (own(samples=29), r"samples from 0 to 29; return only samples in \[0, 29\)"),
        (own(name=""), "name=''"),
        (cseq.Shuffled(), "samples=None"),
        (own(facts=lambda self: {"name": self.name, "rows": (1, 2)}),
         "return values that JSON preserves"),
        (own(room=1), r"return one size in \[1, 1\] for each unit"),
        (own(read=lambda *asked: (Own.read(*asked)[0], None)), "no sizes; return the size"),
    ],
)  # fmt: skip
def test_what_an_order_must_not_do(order, text):
    """The message says what it did."""
    with pytest.raises(ValueError, match=text):
        cseq.testing.check_order(order)
