"""Ignite: a monitor for the loggers of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.adapters.figures import Windows, needs

with needs("ignite", "pytorch-ignite"):
    from ignite.engine import Events

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["Monitor"]


class Monitor:
    """Puts a manager's figures among the metrics of a trainer, where Ignite's loggers find them.

    Those of `Stats.as_dict`, for the batches since the last time. Attach the loggers after it.

    Parameters
    ----------
    manager : manager or DataLoader, optional
        None: what the trainer trains with.
    every : int
        Iterations from one time to the next.

    Examples
    --------
    >>> Monitor(manager).attach(trainer)  # doctest: +SKIP
    >>> logger.attach_output_handler(  # doctest: +SKIP
    ...     trainer, Events.ITERATION_COMPLETED(every=50), tag="training", metric_names="all"
    ... )
    """

    def __init__(self, manager: Any = None, every: int = 50) -> None:
        self._windows = Windows(manager, every)

    def attach(self, engine: Engine) -> None:
        """Measure this trainer from its next start on."""
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._measure)

    def _begin(self, engine: Engine) -> None:
        self._windows.begin(engine.state.dataloader)

    def _measure(self, engine: Engine) -> None:
        engine.state.metrics.update(self._windows.at(engine.state.iteration))
