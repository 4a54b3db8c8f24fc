"""Lightning support: a data module, a callback for exact resumes, and a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from cseq.adapters import needs
from cseq.adapters.torch import DataLoader
from cseq.adapters.torch.order import Layers, seed_from
from cseq.check import integer
from cseq.measure.stats import Every, counting

with needs("lightning", "lightning"):
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.utilities import CombinedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cseq.measure.stats import Counting
    from cseq.sequence import MSequence

    class Loop(Protocol):
        """The part of Lightning's loop API used here."""

        total_batch_idx: int
        restarted_on_last: bool
        epoch_loop: Loop
        val_loop: Loop
        _data_fetcher: Iterable[object]
        _batches_that_stepped: int

        def setup_data(self) -> object: ...

    class Strategy(Protocol):
        """The part of Lightning's strategy API used here."""

        def broadcast(self, number: int) -> int: ...

    class Logger(Protocol):
        """The part of Lightning's logger API used here."""

        def log_metrics(self, metrics: dict[str, float], step: int) -> object: ...

    class Trainer(Protocol):
        """The part of Lightning's Trainer API used here."""

        strategy: Strategy
        is_last_batch: bool
        reload_dataloaders_every_n_epochs: int
        train_dataloader: Counting
        val_dataloaders: object
        fit_loop: Loop
        current_epoch: int
        loggers: list[Logger]


__all__ = ["DataModule", "Monitor", "SaveState"]

State = dict[str, Any]


class DataModule(LightningDataModule):  # type: ignore[misc]
    """A data module that starts managers on demand and finishes them on teardown.

    Parameters
    ----------
    train : callable
        A function that returns an unstarted manager with ``shard="auto"``. It is called in every
        process when training starts.
    val, test, predict : callable, optional
        Like `train`, for validation, testing and prediction.

    Examples
    --------
    >>> data = DataModule(lambda: cseq.MPSequence(Images, 50_000, shard="auto", seed=7))
    >>> trainer.fit(module, data)  # doctest: +SKIP
    """

    def __init__(
        self,
        train: Callable[[], MSequence[Any]] | None = None,
        val: Callable[[], MSequence[Any]] | None = None,
        test: Callable[[], MSequence[Any]] | None = None,
        predict: Callable[[], MSequence[Any]] | None = None,
    ) -> None:
        super().__init__()
        self._makers = {"train": train, "val": val, "test": test, "predict": predict}
        for name, make in self._makers.items():
            if make is not None and not callable(make):
                raise TypeError(
                    f"{name}={make!r} is not callable; pass a function that returns a manager"
                )
        self._managers: dict[str, MSequence[Any]] = {}

    def train_dataloader(self) -> object:
        return self._started("train")

    def val_dataloader(self) -> object:
        return self._started("val")

    def test_dataloader(self) -> object:
        return self._started("test")

    def predict_dataloader(self) -> object:
        return self._started("predict")

    def _started(self, name: str) -> object:
        """Finish any previous manager and start a new one. Return [] if there is no function."""
        make = self._makers[name]
        if make is None:
            return []
        if name in self._managers:
            self._managers.pop(name).finish()
        manager = self._managers[name] = make()
        return manager.start()

    def teardown(self, stage: str) -> None:
        """Finish the managers. Lightning also calls this after an exception."""
        while self._managers:
            self._managers.popitem()[1].finish()


class SaveState(Callback):  # type: ignore[misc]
    """A callback that lets a run with a cseq DataLoader resume exactly.

    Validation loaders are seeded with the number of training batches so far and a seed from the
    checkpoint. A run resumed after the last batch of an epoch starts with the next epoch.

    Examples
    --------
    >>> trainer = lightning.Trainer(callbacks=[SaveState(), ModelCheckpoint()])  # doctest: +SKIP
    """

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        self._trainer = trainer
        self._seed, self._train = trainer.strategy.broadcast(torch.initial_seed()), list[State]()

    def state_dict(self) -> State:
        trainer = self._trainer
        is_over = trainer.is_last_batch and not trainer.reload_dataloaders_every_n_epochs
        loaders = loaders_in(trainer.train_dataloader) if is_over else []
        train = [loader.state_dict(next_epoch=True) for loader in loaders]
        return {"seed": self._seed, "train": train}

    def load_state_dict(self, state_dict: State) -> None:
        self._seed, self._train = state_dict["seed"], state_dict["train"]

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        loop, states = trainer.fit_loop, self._train
        loaders = loaders_in(trainer.train_dataloader) if states else []
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
            sampler = Layers(loader._index_sampler).inner
            set_epoch: Callable[[int], object] | None = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(trainer.current_epoch)
        # Lightning has called `iter`, and will call it again if it resumed from the last batch.
        if states and not loop.epoch_loop.restarted_on_last:
            iter(loop._data_fetcher)
        if trainer.val_dataloaders is None:
            loop.epoch_loop.val_loop.setup_data()
        self._seed_validation(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self._seed_validation(trainer)

    def _seed_validation(self, trainer: Trainer) -> None:
        """Seed validation loaders early: Lightning draws random numbers before calling hooks."""
        for number, loader in enumerate(loaders_in(trainer.val_dataloaders)):
            if loader.generator is None:
                loader.generator = torch.Generator()
            key = self._seed, number, trainer.fit_loop.total_batch_idx + 1
            loader.generator.manual_seed(seed_from(*key))


def loaders_in(collection: object) -> list[DataLoader[Any]]:
    """Return the cseq loaders in a Lightning collection."""
    loaders: list[object] = CombinedLoader(collection).flattened
    return [loader for loader in loaders if isinstance(loader, DataLoader)]


class Monitor(Callback):  # type: ignore[misc]
    """A callback that sends a manager's metrics to the trainer's loggers.

    The metrics come from `Stats.as_dict` and cover the batches since the previous log entry.
    Lightning's loggers write only the metrics of rank 0.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        The manager to measure. Defaults to the trainer's training loader.
    every : int
        How often to log metrics, in training batches.
    """

    def __init__(self, manager: object = None, every: int = 50) -> None:
        self._manager = None if manager is None else counting(manager)
        self._n = integer("every", every)

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        loader = trainer.train_dataloader if self._manager is None else self._manager
        self._every = Every(loader, self._n)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        loop = trainer.fit_loop.epoch_loop
        figures = self._every.at(loop.total_batch_idx + 1)
        for logger in trainer.loggers if figures else ():
            # Log at the same step as Lightning's callbacks, so that metrics line up with the loss.
            logger.log_metrics(figures, step=loop._batches_that_stepped)
