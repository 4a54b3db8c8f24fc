"""Keras support (torch and JAX backends): a data adapter and checkpoints."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from cseq.adapters import needs
from cseq.check import integer

with needs("keras", "keras"):
    from keras.callbacks import Callback
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

if TYPE_CHECKING:
    from cseq.sequence import MSequence

__all__ = ["Batches", "SaveState"]


class Batches(DataAdapter):  # type: ignore[misc]
    """Adapts a started manager for `fit`. `SaveState` sets the manager's epoch.

    Parameters
    ----------
    manager : manager
        A manager with ``out_type="null"``, or ``"cpu"`` for the torch backend.
    """

    def __init__(self, manager: MSequence[Any]) -> None:
        if not hasattr(manager, "_sampler"):
            raise TypeError(
                f"manager={manager!r} is not a cseq manager; pass a manager such as MPSequence"
            )
        self._manager = manager

    @property
    def num_batches(self) -> int | None:
        # With None, Keras ends each epoch after `steps_per_epoch` batches and keeps the iterator.
        return len(self._manager) if self._manager._sampler.repeat == 1 else None

    def get_numpy_iterator(self) -> MSequence[Any]:
        return self._manager

    get_jax_iterator = get_torch_dataloader = get_numpy_iterator


class SaveState(Callback):  # type: ignore[misc]
    """A callback that saves and restores the model and a manager's state.

    If the folder contains a checkpoint, `fit` resumes with the next batch. Checkpoints are replaced
    atomically.

    Parameters
    ----------
    manager : manager
        The manager that `fit` trains on.
    folder : str
        The checkpoint folder, created if necessary.
    every : int
        The number of batches between checkpoints within an epoch.
    """

    def __init__(self, manager: MSequence[Any], folder: str, every: int) -> None:
        super().__init__()
        self._manager, self._folder, self._every = manager, folder, integer("every", every)
        # The name of the weights file in the latest checkpoint.
        self._weights: str | None = None

    def on_train_begin(self, logs: object = None) -> None:
        try:
            with open(os.path.join(self._folder, "batches.json"), encoding="utf-8") as file:
                saved = json.load(file)
        except FileNotFoundError:
            return
        self._weights = saved["weights"]
        self.model.load_weights(os.path.join(self._folder, saved["weights"]))
        self._manager.load_state_dict(saved["batches"])
        self.model._initial_epoch = self._manager.epoch

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        # Keras takes a batch to build the model. Setting the epoch also puts that batch back.
        self._manager.set_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if (batch + 1) % self._every == 0:
            self.save()

    def save(self) -> None:
        """Save a checkpoint, replacing the previous one."""
        state = self._manager.state_dict()
        os.makedirs(self._folder, exist_ok=True)
        # Keep the previous weights file until batches.json names the new one.
        weights = "b.weights.h5" if self._weights == "a.weights.h5" else "a.weights.h5"
        self.model.save_weights(os.path.join(self._folder, weights))
        path = os.path.join(self._folder, "batches.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({"weights": weights, "batches": state}, file)
        os.replace(f"{path}.new", path)
        self._weights = weights
