"""The Trainer trains on cseq's batches: its epochs, its evaluation, its monitor."""

import pytest
from recipes import LENGTH, Read, Record, figures_of, record_torch, recorded, stream

# Their warnings must not fail the imports below.
pytest.importorskip("transformers.trainer")

import with_transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from cseq.adapters.torch import installed
from cseq.adapters.transformers import BatchTrainer, Monitor, SaveState

from data import batches
from inputs import Inputs
from samples import Net, Samples


def arguments(**options):
    """Make the arguments of a Trainer on the CPU that reports to nothing."""
    return TrainingArguments("checkpoints", use_cpu=True, report_to="none", **options)


def test_its_epochs_are_ours(monkeypatch):
    """Three epochs train on cseq's epochs 0, 1 and 2, with an evaluation after each."""
    record, held_out = Record(), Record()
    with monkeypatch.context() as patch:
        record_torch(patch, record, held_out)
        with_transformers.train(eval_strategy="epoch", save_strategy="no")
    assert record == stream(0, 1, 2)
    assert held_out == stream(0, shuffle=False) * 3


def test_accumulated_gradients(monkeypatch):
    """A resume between steps of several batches loses no batch that was read ahead."""
    options = {"gradient_accumulation_steps": 4, "save_steps": 2}
    assert recorded(monkeypatch, with_transformers, **options) == stream(0, 1, 2)
    path = "checkpoints/checkpoint-2"
    rest = recorded(monkeypatch, with_transformers, resume=path, **options)
    assert rest == stream(0, 1, 2)[8:]


def test_the_monitor_logs_beside_the_loss():
    """Every fifth step has the figures of stats() since the last ones; the step's loss stays."""
    logged = []

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            logged.append((state.global_step, dict(logs)))

    args = arguments(num_train_epochs=3, logging_steps=5, save_strategy="no")
    steps = list(range(5, 3 * LENGTH + 1, 5))
    for late in (False, True):
        logged.clear()
        with batches(Inputs).start() as manager:
            read = Read(manager)
            callbacks = [Logger()] if late else [Logger(), Monitor(read, every=5)]
            model = with_transformers.Model()
            trainer = BatchTrainer(model, args, train_dataset=manager, callbacks=callbacks)
            if late:
                trainer.add_callback(Monitor(read, every=5, trainer=trainer))
            trainer.train()
        figures = [(step, found) for step, logs in logged if (found := figures_of(logs))]
        assert [step for step, _ in figures] == steps
        assert [found for _, found in figures] == read.figures()
        assert [step for step, logs in logged if "loss" in logs] == steps
        history = [found for logs in trainer.state.log_history if (found := figures_of(logs))]
        assert history == read.figures()


@pytest.mark.parametrize("persistent", [False, True])
def test_the_monitor_of_a_trainer_with_its_own_loaders(persistent):
    """The Trainer's own loader, wrapped by accelerate, counts once cseq is installed."""
    args = arguments(
        num_train_epochs=3,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        dataloader_persistent_workers=persistent,
        save_strategy="no",
    )
    with installed():
        trainer = Trainer(Net(), args, train_dataset=Samples())
        trainer.add_callback(Monitor(every=5, trainer=trainer))
        trainer.train()
    history = [(logs["step"], figures_of(logs)) for logs in trainer.state.log_history]
    figures = [(step, found) for step, found in history if found]
    assert [step for step, _ in figures] == list(range(5, trainer.state.max_steps + 1, 5))
    assert len(figures) > 3
    assert all(found["cseq/batches_per_s"] > 0 for _, found in figures)


def test_what_does_not_fit_together_is_refused():
    """A monitor lacks a Trainer, batches are skipped twice, or a checkpoint lacks a state."""

    class Own(Trainer):
        def get_train_dataloader(self):
            return self.train_dataset

    def train(kind, callback, resume=False, **options):
        args = arguments(max_steps=2, save_steps=1, **options)
        with batches(Inputs).start() as manager:
            trainer = kind(with_transformers.Model(), args, train_dataset=manager)
            if callback is not None:
                trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=resume)

    with pytest.raises(ValueError, match="Monitor has no Trainer"):
        train(Own, Monitor())
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        train(BatchTrainer, SaveState())
    train(BatchTrainer, None, ignore_data_skip=True)
    with pytest.raises(ValueError, match="was saved without SaveState"):
        train(BatchTrainer, SaveState(), resume=True, ignore_data_skip=True)
