"""Lightning trains on cseq's batches: its epochs, its limits, its validation, its monitor."""

import pytest
from recipes import EPOCHS, LENGTH, Read, Record, figures_of, record_torch, stream

pytest.importorskip("lightning")

import lightning
import with_lightning
from lightning.pytorch.loggers import CSVLogger

from cseq.adapters.lightning import DataModule, Monitor

from data import batches


def fit(monkeypatch, **options):
    """Run the recipe; return its training batches and its held-out ones."""
    record, held_out = Record(), Record()
    with monkeypatch.context() as patch:
        record_torch(patch, record, held_out)
        with_lightning.train(logger=False, enable_progress_bar=False, **options)
    return record, held_out


def test_its_epochs_are_ours(monkeypatch):
    """Three epochs train on epochs 0 to 2; a check of two batches and three epochs are held out."""
    record, held_out = fit(monkeypatch)
    order = stream(0, shuffle=False)
    assert record == stream(0, 1, 2)
    assert held_out == order[:2] + order * 3


def test_a_limit_ends_epochs_early(monkeypatch):
    """`limit_train_batches` trains on the beginning of each epoch, even after a resume."""
    limits = {"limit_train_batches": 7, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    record, held_out = fit(monkeypatch, every=3, **limits)
    expected = [batch for epoch in range(EPOCHS) for batch in stream(epoch)[:7]]
    assert record == expected
    assert held_out == stream(0, shuffle=False)[:2] * 3
    for taken in (9, 15):
        rest, _ = fit(monkeypatch, ckpt_path=f"checkpoints/step={taken}.ckpt", every=3, **limits)
        assert rest == expected[taken:]


def test_the_monitor_logs_beside_the_loss(monkeypatch):
    """Every fifth batch has the figures of stats() since the last ones, at the step of its loss."""
    logged = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

    class Module(with_lightning.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("training_loss", loss)
            return loss

    read = Read()

    def make():
        read.manager = batches(shard="auto")
        return read.manager

    # Lightning counts steps from 0.
    steps = [step - 1 for step in range(5, EPOCHS * LENGTH + 1, 5)]
    for manager in (None, read):
        logged.clear()
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=Logger("logs"),
            log_every_n_steps=5,
            enable_progress_bar=False,
            callbacks=[Monitor(manager, every=5)],
        )
        trainer.fit(Module(), DataModule(make))
        figures = [(step, found) for step, metrics in logged if (found := figures_of(metrics))]
        assert [step for step, _ in figures] == steps
        assert [step for step, metrics in logged if "training_loss" in metrics] == steps
        # The manager has finished.
        with pytest.raises(UserWarning, match="was not started"):
            next(iter(read.manager))
    assert [found for _, found in figures] == read.figures()


def test_a_loader_that_does_not_count():
    """An object without figures is refused, and so is a manager instead of a function."""
    with pytest.raises(TypeError, match=r"manager=\[\] has no stats\(\); pass a cseq manager"):
        Monitor([])
    with pytest.raises(ValueError, match="every=0 is below 1"):
        Monitor(every=0)
    with pytest.raises(TypeError, match="train=3 is not callable"):
        DataModule(3)
