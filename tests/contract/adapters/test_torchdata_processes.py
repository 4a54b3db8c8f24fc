"""Processes of `cseq.adapters.torchdata` on every system: starts, deaths, the relay's callers."""

import multiprocessing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from counting import Numbers
from killing import WORDS, kill
from torchdata.datapipes.iter import IterableWrapper
from torchdata_graphs import MULTI, QUICK, dispatched, double, loader, numbers, with_pid

import cseq
from cseq.adapters.torchdata import relay
from cseq.stream import Streams

METHODS = multiprocessing.get_all_start_methods()


@pytest.mark.parametrize("context", [None, *METHODS])
def test_start_methods(context):
    branches = dispatched(6).map(double).zip(numbers(6))
    with loader(branches, 2, context) as loaded:
        assert list(loaded) == [(2 * n, n) for n in range(6)]


FAR = IterableWrapper(range(100_000)).map(with_pid).sharding_round_robin_dispatch(MULTI)


@pytest.mark.parametrize(
    ("pipe", "named"),
    [
        (numbers(1000).map(with_pid), WORDS),
        (dispatched(1000).map(with_pid), WORDS),
        (FAR, "the dispatching process"),
    ],
)
def test_a_killed_process(pipe, named):
    """Without `max_restarts`, its death is an error that says so."""
    with loader(pipe) as loaded:
        items = iter(loaded)
        kill(next(items)[1])
        with pytest.raises(cseq.WorkerDied, match=named):
            list(items)


AT_EXIT = """
from cseq.adapters.torchdata import MultiProcessingReadingService
from cseq.processes.launcher import start_methods
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

multi = SHARDING_PRIORITIES.MULTIPROCESSING
pipe = IterableWrapper(range(100)).sharding_round_robin_dispatch(multi)
service = MultiProcessingReadingService(2, start_methods()[-1])
loader = DataLoader2(pipe, reading_service=service)
for item in loader:
    break
print(item)
"""


def test_a_script_that_just_ends(run_prepared):
    """A script needs no `shutdown`, and no `if __name__ == "__main__"`."""
    done = run_prepared(AT_EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_caller_that_does_not_know_the_secret():
    """Any process of this user can call the relay, which rejects it and serves the next caller."""
    made = relay.Relay(Streams(Numbers, 1, start_method=QUICK), 1)
    address, secret = made.address
    made.open()
    try:
        with pytest.raises(AuthenticationError):
            Client(address, authkey=b"a guess")
        with Client(address, authkey=secret) as caller:
            # No epoch has begun.
            caller.send((0, 1))
            assert caller.recv() == ([], False)
    finally:
        made.close()
