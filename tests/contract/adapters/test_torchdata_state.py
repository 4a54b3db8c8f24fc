"""States of a `DataLoader2` with cseq's workers."""

import itertools
import pickle

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata.dataloader2", exc_type=ImportError)

from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe
from torchdata_graphs import MULTI, Stays, draw, loader, numbers, service, shuffled

import cseq

# Many loaders start here, and their processes import torch: spawned, they would take minutes.
pytestmark = pytest.mark.needs("quick processes")


def restored(state, num_workers=2, **options):
    return DataLoader2.from_state(state, service(num_workers, **options))


def long_graph():
    return shuffled(40).map(draw)


def long_dispatched_graph():
    pipe = IterableWrapper(range(40)).shuffle().sharding_round_robin_dispatch(MULTI)
    return pipe.map(draw).batch(2)


def long_tail():
    return Stays(shuffled(40)).shuffle(buffer_size=7)


GRAPHS = [long_graph, long_dispatched_graph, long_tail]


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("taken", [0, 1, 13, None])
def test_state_within_and_after_an_epoch(make, taken):
    """A restored loader continues with the next item or epoch, then the same epochs."""
    with loader(make()) as loaded:
        loaded.seed(1)
        list(loaded)
        items = iter(loaded)
        list(itertools.islice(items, taken))
        state = pickle.loads(pickle.dumps(loaded.state_dict()))
        expected = [list(loaded if taken is None else items), list(loaded)]
    with restored(state) as loaded:
        assert [list(loaded), list(loaded)] == expected


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("taken", [None, 0, 5])
def test_state_replayed_from_the_start(make, taken):
    """`_restore_checkpoint_beginning_of_epoch` restores the start, as with torchdata."""
    with loader(make()) as loaded:
        loaded.seed(1)
        if taken is None:
            state = loaded.state_dict()
            got, items = [], loaded
        else:
            items = iter(loaded)
            got = list(itertools.islice(items, taken))
            state = loaded.state_dict()
        got += items
    with restored(state) as loaded:
        loaded._restore_checkpoint_beginning_of_epoch()
        assert list(loaded) == got


def test_state_of_a_loader_without_seed():
    """The rest of an epoch comes back even without a chosen seed."""
    with loader(long_graph()) as loaded:
        items = iter(loaded)
        list(itertools.islice(items, 9))
        state = loaded.state_dict()
        expected = list(items)
    with restored(state) as loaded:
        assert list(loaded) == expected
        assert len(list(loaded)) == 40


def test_state_of_a_restored_loader():
    """A restored loader can stop again, at once or later."""
    with loader(long_graph()) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        list(itertools.islice(items, 4))
        state = loaded.state_dict()
        expected = list(items)
    with restored(state) as loaded:
        items = iter(loaded)
        state = loaded.state_dict()
    with restored(state) as loaded:
        items = iter(loaded)
        assert list(itertools.islice(items, 6)) == expected[:6]
        state = loaded.state_dict()
    with restored(state) as loaded:
        assert list(loaded) == expected[6:]


def test_state_for_another_number_of_workers():
    """A position within an epoch is invalid for another number of workers; the error says so."""
    with loader(numbers()) as loaded:
        next(iter(loaded))
        state = loaded.state_dict()
    with restored(state, 3) as loaded, pytest.raises(ValueError, match="num_workers=2, but"):
        iter(loaded)


class Uneven(IterDataPipe):
    """A pipe whose number of items is its worker's number."""

    def __init__(self, counts):
        self.counts = counts

    def __iter__(self):
        number = cseq.worker_info().number
        yield from ((number, item) for item in range(self.counts[number]))


def test_state_of_a_graph_that_has_changed():
    """If a graph now has fewer items than were taken, the loop gets an error."""
    with loader(Uneven((5, 5))) as loaded:
        list(itertools.islice(iter(loaded), 8))
        state = loaded.state_dict()
    state["serialized_datapipe"] = pickle.dumps(Uneven((2, 2)))
    with restored(state) as loaded, pytest.raises(RuntimeError, match=r"after 8 items .* only 4"):
        list(loaded)


def test_state_when_epochs_repeat():
    """With `repeat_epochs`, a state has no position, as with torchdata."""
    with loader(long_graph(), repeat_epochs=True) as loaded:
        loaded.seed(1)
        items = iter(loaded)
        first = [next(items)]
        state = loaded.state_dict()
        first += items
    with restored(state, repeat_epochs=True) as loaded:
        assert list(loaded) == first
