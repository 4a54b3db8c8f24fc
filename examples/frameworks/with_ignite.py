"""Ignite with `cseq.MPSequence`."""

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

import cseq

from data import batches
from net import Net


def train(resume=None, every=5):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    with batches().start() as manager:
        trainer = Engine(step)
        parts = {
            "trainer": trainer,
            "net": net,
            "optimizer": optimizer,
            "batches": manager,
        }
        saver = Checkpoint(
            parts, DiskSaver("checkpoints", require_empty=False), n_saved=None
        )
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), saver)
        figures = cseq.Stats.every(5, manager)

        # Loggers that are attached later log these figures with the metrics.
        @trainer.on(Events.ITERATION_COMPLETED)
        def add_figures(engine):
            engine.state.metrics.update(figures.at(engine.state.iteration))

        if resume:
            Checkpoint.load_objects(parts, torch.load(resume))
        trainer.run(manager, max_epochs=3)
        return trainer


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/checkpoint_20.pt")
