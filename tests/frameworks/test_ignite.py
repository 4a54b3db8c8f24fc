"""Ignite trains on cseq's batches, and its checkpoints hold cseq's state."""

from __future__ import annotations

import pytest
from recipes import LENGTH, Read, recorded, stream

pytest.importorskip("ignite")


def test_its_epochs_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs train on ours 0, 1 and 2."""
    import with_ignite

    assert recorded(monkeypatch, with_ignite.train) == stream(0, 1, 2)


@pytest.mark.parametrize("taken", [5, 20, LENGTH, 2 * LENGTH])
def test_a_resume_gives_the_rest(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Interrupted after a checkpoint in mid-epoch or at an epoch's end, it goes on."""
    import with_ignite

    first = recorded(monkeypatch, with_ignite.train, stop_after=taken + 2, every=taken)
    assert first == stream(0, 1, 2)[: taken + 2]
    path = f"checkpoints/checkpoint_{taken}.pt"
    rest = recorded(monkeypatch, with_ignite.train, resume=path, every=taken)
    assert rest == stream(0, 1, 2)[taken:]


def test_the_monitor_puts_figures_among_the_metrics() -> None:
    """Every fifth iteration, what stats() says of those since: a logger attached later has them."""
    from data import batches
    from ignite.engine import Engine, Events
    from ignite.handlers.base_logger import BaseLogger, BaseOutputHandler

    from cseq.adapters.ignite import Monitor

    logged = []

    class Output(BaseOutputHandler):
        def __call__(self, engine: Engine, logger: BaseLogger, event_name: object) -> None:
            found = self._setup_output_metrics_state_attrs(engine, log_text=False)
            logged.append((engine.state.iteration, found))

    class Logger(BaseLogger):
        def _create_output_handler(self, *args: object, **kwargs: object) -> Output:
            return Output(*args, **kwargs)

        def _create_opt_params_handler(self, *args: object, **kwargs: object) -> None:
            raise NotImplementedError

    with batches().start() as manager:
        for given in (Read(manager), None):
            logged.clear()
            trainer = Engine(lambda engine, batch: None)
            Monitor(given, every=5).attach(trainer)
            Logger().attach_output_handler(
                trainer, Events.ITERATION_COMPLETED(every=5), tag="x", metric_names="all"
            )
            trainer.run(manager, max_epochs=3)
            steps = list(range(5, 3 * LENGTH + 1, 5))
            assert [step for step, _ in logged] == steps
            if given is not None:
                expected = given.figures()
                names = list(expected[0])
                for (_, found), figures in zip(logged, expected, strict=True):
                    assert found == {("x", name): figures[name] for name in names}
