"""Torch's DataLoader with one fault each that another engine may have; all must be found.

`MUTANTS` has a case for each that shows it; `run_differential.py --mutants` searches for others.
"""

import warnings

import torch
from torch.utils.data.dataloader import DataLoader, _DatasetKind, _MultiProcessingDataLoaderIter


class NoBaseSeed(DataLoader):
    """Draws no base seed: the trainer's generator does not move."""

    def _get_iterator(self):
        generator = self.generator or torch.default_generator
        state = generator.get_state()
        iterator = super()._get_iterator()
        generator.set_state(state)
        return iterator


class FartherAhead(DataLoader):
    def _get_iterator(self):
        given = self.prefetch_factor
        if given is not None:
            self.prefetch_factor = given + 1
        try:
            return super()._get_iterator()
        finally:
            self.prefetch_factor = given


class WrongLen(DataLoader):
    """Counts a last short batch despite drop_last, for an IterableDataset."""

    def __len__(self):
        iterable = self._dataset_kind == _DatasetKind.Iterable and self.batch_size
        return -(-len(self.dataset) // self.batch_size) if iterable else super().__len__()


class Changed(DataLoader):
    """Has an iterator with a change, if there are workers."""

    def _get_iterator(self):
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return self.iterator(self)


class Silent(Changed):
    class iterator(_MultiProcessingDataLoaderIter):
        def __next__(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return super().__next__()


class ErrorEnds(Changed):
    class iterator(_MultiProcessingDataLoaderIter):
        failed = False

        def __next__(self):
            if self.failed:
                raise StopIteration
            try:
                return super().__next__()
            except StopIteration:
                raise
            except Exception:
                self.failed = True
                raise


class ErrorOfAnotherType(Changed):
    class iterator(_MultiProcessingDataLoaderIter):
        def __next__(self):
            try:
                return super().__next__()
            except StopIteration:
                raise
            except Exception as error:
                raise RuntimeError(str(error)) from None


class Narrowed(Changed):
    """Returns float32 for float64."""

    class iterator(_MultiProcessingDataLoaderIter):
        def _next_data(self):
            data = super()._next_data()
            is_wide = isinstance(data, torch.Tensor) and data.is_floating_point()
            return data.float() if is_wide else data


class MemoryReused(Changed):
    """Returns each batch in the memory of the previous one, if it has the same shape."""

    class iterator(_MultiProcessingDataLoaderIter):
        memory = None

        def _next_data(self):
            data = super()._next_data()
            if not isinstance(data, torch.Tensor):
                return data
            if self.memory is None or self.memory.shape != data.shape:
                self.memory = data
            return self.memory.copy_(data)


class WrittenOut(Changed):
    """Returns each tensor in the order of its dimensions."""

    class iterator(_MultiProcessingDataLoaderIter):
        def _next_data(self):
            data = super()._next_data()
            return [each.contiguous() if isinstance(each, torch.Tensor) else each for each in data]


class LeafOverwritten(Changed):
    """Writes a batch over the rest of the one before the last."""

    class iterator(_MultiProcessingDataLoaderIter):
        older = ()

        def _next_data(self):
            data = super()._next_data()
            for each in self.older[:-1]:
                each.zero_()
            self.older = (*self.older[-1:], data[-1])
            return data


class BeginsAnew(Changed):
    class iterator(_MultiProcessingDataLoaderIter):
        ended = False

        def __next__(self):
            if self.ended:
                self.ended = False
                return self.last
            try:
                self.last = super().__next__()
            except StopIteration:
                self.ended = hasattr(self, "last")
                raise
            return self.last


class Resuming(DataLoader):
    """Has a correct state: the number of batches."""

    latest, skip = None, 0

    def _get_iterator(self):
        self.latest = super()._get_iterator()
        for _ in range(self.skip):
            next(self.latest)
        return self.latest

    def state_dict(self):
        falls_back = type(self.multiprocessing_context).__name__ == "Context"
        return {} if falls_back else {"yielded": [self.latest._num_yielded]}

    def load_state_dict(self, state):
        [self.skip] = state["yielded"]


class GoesOnLater(Resuming):
    """Skips a batch at a resume."""

    def load_state_dict(self, state):
        self.skip = state["yielded"][0] + 1


class BeginsAgain(Resuming):
    """Has a state of torch's own iterator, which says that nothing was taken."""

    def state_dict(self):
        return super().state_dict() or {"yielded": [0]}


class ChangesState(Resuming):
    """Later changes a state that was given to it."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        state["yielded"].append(0)


class AsksSampler(Changed):
    """Asks a sampler for its state with each batch."""

    class iterator(_MultiProcessingDataLoaderIter):
        def _next_index(self):
            index = super()._next_index()
            asked = getattr(self._index_sampler, "sampler", self._index_sampler)
            getattr(asked, "state_dict", dict)()
            return index


FAILING = {"where": "sample", "at": 1, "type": "ValueError"}

MUTANTS = {
    "NoBaseSeed": {},
    "FartherAhead": {"num_workers": 1, "sampler": "own", "length": 12},
    "WrongLen": {"dataset": "counted", "drop_last": True, "steps": ["len"]},
    "Silent": {"num_workers": 1, "dataset": "counted", "batch_size": 1, "steps": ["len", "epoch"]},
    "ErrorEnds": {"num_workers": 1, "error": FAILING},
    "ErrorOfAnotherType": {"num_workers": 1, "error": FAILING},
    "Narrowed": {"num_workers": 1, "item": "double"},
    "MemoryReused": {"num_workers": 1, "item": "tensor"},
    "WrittenOut": {
        "num_workers": 1, "item": "tensor", "collate": "same", "layout": "channels last",
    },
    "LeafOverwritten": {"num_workers": 1, "kept": True},
    "BeginsAnew": {"num_workers": 1},
    "GoesOnLater": {"steps": ["resume 1"]},
    "BeginsAgain": {"num_workers": 1, "context": True, "steps": ["resume 1"]},
    "ChangesState": {"steps": ["resume 1"]},
    "AsksSampler": {"num_workers": 1, "length": 12, "sampler": "own", "stateful": True},
}  # fmt: skip
