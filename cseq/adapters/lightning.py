"""Lightning: a data module that starts managers, and a monitor for its loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.adapters import needs
from cseq.check import count
from cseq.measure.stats import Every, counting

with needs("lightning", "lightning"):
    from lightning.pytorch import Callback, LightningDataModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

    from cseq.sequence import MSequence

__all__ = ["DataModule", "Monitor"]


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
