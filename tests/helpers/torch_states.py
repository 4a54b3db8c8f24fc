"""A data set with a state, and loaders that stop and resume."""

import pickle

import pytest

torch = pytest.importorskip("torch")

from kinds import QUICKEST  # noqa: E402
from torch_data import Plain, same, seed_all  # noqa: E402

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


def left_and_resumed(make, count):
    """Return an epoch's rest, the same rest from a new loader, and the state in between."""
    seed_all()
    made = make()
    iterator = iter(made)
    taken(iterator, count)
    state = pickle.loads(pickle.dumps(made.state_dict()))
    rest = list(iterator)
    # The second loader resumes with other seeds.
    seed_all(99)
    made = make()
    made.load_state_dict(state)
    assert same(made.state_dict(), state)
    return rest, list(made), state


class Tally(Plain):
    """Its state is the number of samples that it was asked for."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def failures(cases, first, count):
    """Run `count` seeds of each kind of case from `first` on; return how many fail."""
    failed = 0
    for seed in range(first, first + count):
        for case in cases:
            try:
                case(seed).run()
            except Exception as error:  # noqa: BLE001 - the next one is tried
                failed += 1
                print(f"{seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{count} seeds, {failed} cases failed")
    return failed
