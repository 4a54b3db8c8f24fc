"""Lightning: a data module that starts managers, exact resumes, and a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cseq.adapters import needs
from cseq.adapters.torch import DataLoader
from cseq.adapters.torch.order import inner_of, seed_from
from cseq.check import count
from cseq.measure.stats import Every, counting

with needs("lightning", "lightning"):
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.utilities import CombinedLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

    from cseq.sequence import MSequence

__all__ = ["DataModule", "Monitor", "SaveState"]


class DataModule(LightningDataModule):  # type: ignore[misc]
    """Starts managers when Lightning asks for them, and finishes them after the training.

    Parameters
    ----------
    train : callable
        Called without arguments in each process of the group, when training begins: makes a
        manager, which is not started yet. Give it ``shard="auto"``.
    val, test, predict : callable, optional
        Make the managers for validation, test and prediction.

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
                    f"{name}={make!r} is not callable; give a function: lambda: manager"
                )
        self._managers: dict[str, MSequence[Any]] = {}

    def train_dataloader(self) -> Any:
        return self._started("train")

    def val_dataloader(self) -> Any:
        return self._started("val")

    def test_dataloader(self) -> Any:
        return self._started("test")

    def predict_dataloader(self) -> Any:
        return self._started("predict")

    def _started(self, name: str) -> Any:
        """Start a new manager in the place of the former one; nothing: there is none of it."""
        make = self._makers[name]
        if make is None:
            return []
        if name in self._managers:  # Lightning reloads
            self._managers.pop(name).finish()
        manager = self._managers[name] = make()
        return manager.start()

    def teardown(self, stage: str) -> None:
        """Finish the managers; Lightning calls this after an exception, too."""
        while self._managers:
            self._managers.popitem()[1].finish()


class SaveState(Callback):  # type: ignore[misc]
    """Makes a resume exact where Lightning saves no state of cseq's DataLoaders.

    What validation loaders draw depends on a seed, which each checkpoint has, and on the number of
    batches trained with. A checkpoint with the last batch of an epoch has the training loaders at
    the beginning of the next one.

    Examples
    --------
    >>> trainer = lightning.Trainer(callbacks=[SaveState(), ModelCheckpoint()])  # doctest: +SKIP
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._state = {"seed": trainer.strategy.broadcast(torch.initial_seed()), "train": []}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        trainer = self._trainer
        is_over = trainer.is_last_batch and not trainer.reload_dataloaders_every_n_epochs
        loaders = loaders_in(trainer.train_dataloader) if is_over else []
        train = [loader.state_dict(next_epoch=True) for loader in loaders]
        return {"seed": self._state["seed"], "train": train}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop, states = trainer.fit_loop, self._state["train"]
        loaders = loaders_in(trainer.train_dataloader) if states else []
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
            sampler = inner_of(loader._index_sampler)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(trainer.current_epoch)
        # Lightning has begun to iterate. After a validation at the last batch it does so once more.
        if states and not loop.epoch_loop.restarted_on_last:
            iter(loop._data_fetcher)
        if trainer.val_dataloaders is None:
            loop.epoch_loop.val_loop.setup_data()
        self._seed_validation(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._seed_validation(trainer)

    def _seed_validation(self, trainer: Trainer) -> None:
        """Seed the next validation: Lightning draws for it before it calls a hook."""
        for number, loader in enumerate(loaders_in(trainer.val_dataloaders)):
            if loader.generator is None:
                loader.generator = torch.Generator()
            key = self._state["seed"], number, trainer.fit_loop.total_batch_idx + 1
            loader.generator.manual_seed(seed_from(*key))


def loaders_in(found: Any) -> list[DataLoader[Any]]:
    """Return the loaders of cseq's in a collection of Lightning's."""
    return [each for each in CombinedLoader(found).flattened if isinstance(each, DataLoader)]


class Monitor(Callback):  # type: ignore[misc]
    """Hands a manager's figures to the trainer's loggers.

    They are `Stats.as_dict` of the batches since the last time. Each rank measures its own
    manager; Lightning's loggers write rank 0's.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        None: what the trainer trains with.
    every : int
        Batches of training from one time to the next.
    """

    def __init__(self, manager: Any = None, every: int = 50) -> None:
        self._manager = None if manager is None else counting(manager)
        self._n = count("every", every)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader if self._manager is None else self._manager
        self._every = Every(loader, self._n)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        figures = self._every.at(loop.total_batch_idx + 1)
        for logger in trainer.loggers if figures else ():
            # The step that Lightning's own callbacks give: the figures lie beside the loss.
            logger.log_metrics(figures, step=loop._batches_that_stepped)
