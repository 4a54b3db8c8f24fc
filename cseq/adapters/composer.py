"""Composer: the state of a manager in its checkpoints, and a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.adapters.figures import Windows, needs

with needs("composer", "mosaicml"):
    from composer import Callback

if TYPE_CHECKING:
    from composer import Logger, State

__all__ = ["Monitor", "SaveState"]


class SaveState(Callback):  # type: ignore[misc]
    """Keeps the state of a manager in Composer's checkpoints.

    Give ``spin_dataloaders=False`` to the Trainer: the state knows the place, and Composer has
    nothing to skip.

    Parameters
    ----------
    manager : manager
        Which the Trainer trains with.
    """

    def __init__(self, manager: Any) -> None:
        if not hasattr(manager, "load_state_dict") or not hasattr(manager, "epoch"):
            raise TypeError(f"manager={manager!r} has no state and epoch; give a manager of cseq")
        self._manager = manager

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._manager.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._manager.load_state_dict(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._manager.epoch > int(state.timestamp.epoch):  # saved with an epoch's last batch
            state.timestamp = state.timestamp.to_next_epoch()


class Monitor(Callback):  # type: ignore[misc]
    """Hands a manager's figures to Composer's loggers.

    Those of `Stats.as_dict`, for the batches since the last time. Each rank measures its own
    manager; Composer's loggers write those of rank 0.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        None: what the Trainer trains with.
    every : int
        Batches from one time to the next.
    """

    def __init__(self, manager: Any = None, every: int = 50) -> None:
        self._windows = Windows(manager, every)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._windows.begin(state.train_dataloader)

    def batch_end(self, state: State, logger: Logger) -> None:
        figures = self._windows.at(int(state.timestamp.batch))
        if figures:
            logger.log_metrics(figures)
