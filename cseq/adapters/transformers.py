"""Hugging Face Trainer support: data sets, exact resumption, and a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from cseq.adapters import needs
from cseq.adapters.torch.order import Layers, seed_from
from cseq.check import integer
from cseq.measure.stats import Every, counting

with needs("transformers", "'transformers[torch]'"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from cseq.adapters.torch.stateful import Stateful

    class Args(Protocol):
        """The TrainingArguments attributes used here."""

        ignore_data_skip: bool
        seed: int
        data_seed: int | None

    class Progress(Protocol):
        """The TrainerState attributes used here."""

        epoch: float | None
        global_step: int
        stateful_callbacks: dict[str, dict[str, dict[str, Any]]]

    class Control(Protocol):
        """The TrainerControl attribute used here."""

        should_log: bool

    class Logs(Protocol):
        """The Trainer method used here."""

        def log(self, figures: dict[str, float]) -> object: ...


__all__ = ["BatchTrainer", "Monitor", "SaveState", "SeedEpochs"]


class BatchTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose `train_dataset` and `eval_dataset` are started managers."""

    def get_train_dataloader(self) -> Any:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Monitor):
                callback.trainer = self
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        # A string selects one of several data sets.
        if isinstance(eval_dataset, str):
            return self.eval_dataset[eval_dataset]
        return self.eval_dataset if eval_dataset is None else eval_dataset

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return test_dataset


class SaveState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback that saves the state of the training loader in every checkpoint.

    ``trainer.train(resume_from_checkpoint=…)`` then continues with the next batch. The state is
    stored in `trainer_state.json`.
    """

    batches: Stateful | None = None
    saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        state = None if self.batches is None else self.batches.state_dict()
        return {"args": {}, "attributes": {"saved": state}}

    def on_train_begin(self, args: Args, state: Progress, control: Control, **kwargs: Any) -> None:
        if not args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=False makes the Trainer skip batches that SaveState has already "
                "skipped; pass TrainingArguments(ignore_data_skip=True)"
            )
        batches: Stateful = kwargs["train_dataloader"]
        self.batches = batches
        kept = state.stateful_callbacks.get("SaveState")
        if kept is None:
            raise ValueError(
                "this checkpoint was saved without SaveState, so it does not record which batches "
                "remain; use one that was saved with SaveState, or omit resume_from_checkpoint"
            )
        saved: dict[str, Any] | None = kept["attributes"]["saved"]
        if saved is not None:
            batches.load_state_dict(saved)


class SeedEpochs(TrainerCallback):  # type: ignore[misc]
    """A callback that makes mid-epoch resumes exact with any sampler.

    A resumed Trainer draws the epoch's keys again, but only its default sampler draws the same
    keys. This callback seeds the generators of the loader and the sampler at the start of each
    epoch, with the epoch number and the run's `data_seed` or `seed`.
    """

    def on_train_begin(self, args: Args, state: Progress, control: Control, **kwargs: Any) -> None:
        self._epoch = int(state.epoch or 0)

    def on_epoch_begin(self, args: Args, state: Progress, control: Control, **kwargs: Any) -> None:
        prepared: DataLoader[Any] = kwargs["train_dataloader"]
        loader: DataLoader[Any] = getattr(prepared, "base_dataloader", prepared)
        layers = Layers(loader._index_sampler)
        seed = args.seed if args.data_seed is None else args.data_seed
        drawings: list[Any] = [loader] if layers.seed is not None else [loader, layers.inner]
        for number, drawing in enumerate(drawings):
            if hasattr(drawing, "generator"):
                generator = torch.Generator()
                drawing.generator = generator.manual_seed(seed_from(seed, self._epoch, number))
        # When accelerate skips batches, it does not pass the epoch to the sampler.
        set_epoch: Callable[[int], object] | None = getattr(prepared, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        self._epoch += 1


class Monitor(TrainerCallback):  # type: ignore[misc]
    """A callback that logs a manager's metrics with `Trainer.log`.

    The metrics come from `Stats.as_dict` and cover the batches since the previous log entry. They
    are sent to all integrations in `report_to`, and cover rank 0 only.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        The manager to measure. Defaults to the Trainer's training loader.
    every : int
        How often to log metrics, in Trainer steps.
    trainer : Trainer, optional
        The Trainer to log with. `BatchTrainer` sets this.
    """

    def __init__(
        self, manager: object = None, every: int = 50, trainer: Logs | None = None
    ) -> None:
        self.trainer = trainer
        self._manager = None if manager is None else counting(manager)
        self._n = integer("every", every)

    def on_train_begin(self, args: Args, state: Progress, control: Control, **kwargs: Any) -> None:
        if self.trainer is None:
            raise ValueError(
                "Monitor has no Trainer, so it cannot log; after you create the Trainer, call "
                "trainer.add_callback(Monitor(manager, trainer=trainer))"
            )
        loader: object = kwargs["train_dataloader"] if self._manager is None else self._manager
        self._every = Every(loader, self._n)

    def on_step_end(self, args: Args, state: Progress, control: Control, **kwargs: Any) -> None:
        figures = self._every.at(state.global_step)
        if figures and self.trainer is not None:
            # `log` cancels a pending request to log this step's loss.
            wanted = control.should_log
            self.trainer.log(figures)
            control.should_log = wanted
