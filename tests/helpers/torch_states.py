"""Data sets and samplers with states, and loaders that stop and resume."""

import pickle

import pytest

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import (  # noqa: E402
    same,
    seed_all,
)

import cseq  # noqa: E402


def loader(dataset, num_workers=2, **options):
    """Make a cseq loader that keeps the states of data sets."""
    context = QUICKEST.start_method if num_workers else None
    return cseq.StatefulDataLoader(
        dataset, num_workers=num_workers, multiprocessing_context=context, **options
    )


def taken(iterator, count):
    """Take the given number of batches."""
    return [next(iterator) for _ in range(count)]


def left_and_resumed(make, count, again=None):
    """Return an epoch's rest, the same rest from a new loader, and the state in between."""
    seed_all()
    made = make()
    iterator = iter(made)
    taken(iterator, count)
    state = pickle.loads(pickle.dumps(made.state_dict()))
    rest = list(iterator)
    # The second loader resumes with other seeds.
    seed_all(99)
    made = (again or make)()
    made.load_state_dict(state)
    assert same(made.state_dict(), state)
    return rest, list(made), state


class Cycle(data.Sampler[int]):
    def __init__(self, length):
        self.length = length
        self.at = 0

    def __len__(self):
        return self.length

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield 7 * (self.at - 1) % self.length
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
