"""Lightning trains on cseq's batches: its epochs, its resumes, its validation, its ranks."""

import pytest
from recipes import (
    EPOCHS,
    LENGTH,
    Interrupted,
    Read,
    Record,
    figures_of,
    on_two_ranks,
    record_torch,
    stream,
)

pytest.importorskip("lightning")


def fit(monkeypatch, stop_after=None, **options):
    """Run the recipe; return its training batches and its held-out ones."""
    import with_lightning

    record, held_out = Record(stop_after), Record()
    with monkeypatch.context() as patch:
        record_torch(patch, record, held_out)
        options = {"logger": False, "enable_progress_bar": False, **options}
        if stop_after is None:
            with_lightning.train(**options)
        else:
            with pytest.raises(Interrupted):
                with_lightning.train(**options)
    return record, held_out


def test_its_epochs_are_ours(monkeypatch):
    """Three epochs train on epochs 0 to 2; a check of two batches and three epochs are held out."""
    record, held_out = fit(monkeypatch)
    order = stream(0, shuffle=False)
    assert record == stream(0, 1, 2)
    assert held_out == order[:2] + order * 3


@pytest.mark.parametrize("taken", [5, 15, LENGTH, 2 * LENGTH])
def test_a_resume_gives_the_rest(monkeypatch, taken):
    """It continues from a checkpoint in mid-epoch, or with an epoch's last batch."""
    every = taken if taken % LENGTH == 0 else 5
    first, _ = fit(monkeypatch, stop_after=taken + 2, every=every)
    assert first == stream(0, 1, 2)[: taken + 2]
    rest, _ = fit(monkeypatch, ckpt_path=f"checkpoints/step={taken}.ckpt", every=every)
    assert rest == stream(0, 1, 2)[taken:]


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


def test_two_ranks(recipes, folder):
    """With `strategy="ddp"`, each rank trains on its own shard, before and after a resume."""
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    arguments = {"strategy": "ddp", "devices": 2, "every": 1, "logger": False}
    assert on_two_ranks("with_lightning", arguments, folder, recipes, launcher=()) == ranks
    # These are in mid-epoch, and after two epochs of seven batches each.
    for taken in (9, 14):
        arguments["ckpt_path"] = f"checkpoints/step={taken}.ckpt"
        rest = on_two_ranks("with_lightning", arguments, folder, recipes, launcher=())
        assert rest == [rank[taken:] for rank in ranks]


def test_the_monitor_logs_beside_the_loss(monkeypatch):
    """Every fifth batch has the figures of stats() since the last ones, at the step of its loss."""
    import lightning
    import with_lightning
    from lightning.pytorch.loggers import CSVLogger

    from cseq.adapters.lightning import DataModule, Monitor

    from data import batches

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


def test_a_loader_that_does_not_count(folder):
    """An object without figures is refused, and so is a manager instead of a function."""
    from cseq.adapters.lightning import DataModule, Monitor

    with pytest.raises(TypeError, match=r"manager=\[\] has no stats\(\); pass a cseq manager"):
        Monitor([])
    with pytest.raises(ValueError, match="every=0 is below 1"):
        Monitor(every=0)
    with pytest.raises(TypeError, match="train=3 is not callable"):
        DataModule(3)
