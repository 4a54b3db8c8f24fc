"""Random settings of Lightning: a run that is killed and resumes; see `legs`."""

import warnings
from pathlib import Path

import legs
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler

import cseq
from cseq.adapters.lightning import SaveState

EPOCHS = 3
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(lightning.LightningModule):
    """Has the training loaders with the given options, and the validation loaders."""

    def __init__(self, net, samples, options, held_out, own):
        super().__init__()
        self.net, self.options, self.held_out, self.own = net, options, held_out, own
        self.data, self.collator = legs.Augmented(samples), legs.Collator()

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if not self.trainer.sanity_checking:
            self.net(**batch)

    def loader(self, seed, **options):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return cseq.DataLoader(self.data, generator=generator, rng="batch", **options)

    def train_dataloader(self):
        sampler = None
        if self.own:
            ranks = self.trainer.world_size
            sampler = DistributedSampler(self.data, ranks, self.global_rank, seed=4)
        shuffle = None if self.own else True
        options = {**self.options, "shuffle": shuffle, "sampler": sampler}
        return self.loader(7, collate_fn=self.collator, **options)

    def val_dataloader(self):
        return [self.loader(**options, collate_fn=legs.Collator()) for options in self.held_out]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(samples, loaders, saver, options, resume, kill_at):
    """Train; return the data of `legs.wrong_with`, in which the training's batches count."""
    warnings.simplefilter("ignore")
    lightning.seed_everything(3, verbose=False)
    module = Module(net := legs.Net(0.0, kill_at), samples, *loaders)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[SaveState(), ModelCheckpoint("checkpoints", "{step}", save_top_k=-1, **saver)],
        **QUIET,
        **options,
    )
    trainer.fit(module, ckpt_path=resume)
    return net.seen, module.collator.made.value, legs.count(*net.seen[True])


def leg(chosen, ranks):
    """Train, die, and resume from one of the checkpoints.

    Checkpoints between two steps of the optimiser are avoided, as they lack gradients.
    """
    samples, batch = chosen.randint(30, 70), chosen.choice((4, 8))
    workers = chosen.choice((0, 2))
    drop_last, own = chosen.random() < 0.3, chosen.random() < 0.3
    loader = {
        "batch_size": batch,
        "num_workers": workers,
        "drop_last": drop_last,
        "persistent_workers": workers > 0 and chosen.random() < 0.5,
    }
    share = -(-samples // ranks)
    length = share // batch if drop_last else -(-share // batch)
    accumulate = chosen.choice((1, 1, 2, 3))
    options = {"accumulate_grad_batches": accumulate}
    if ranks > 1:
        options |= {"strategy": "ddp", "devices": ranks, "use_distributed_sampler": not own}
    if chosen.random() < 0.25 and length > 2:
        length = chosen.randint(2, length)
        options["limit_train_batches"] = length
    steps = -(-length // accumulate)
    held_out = [{"seed": None, "batch_size": 8, "num_workers": workers}]
    held_out.append({**held_out[0], "seed": 8, "shuffle": True})
    held_out = held_out[: chosen.randint(0, 2)]
    if held_out:
        limits = [{}, {"val_check_interval": min(length, accumulate * chosen.randint(1, steps))}]
        limits += [{"check_val_every_n_epoch": 2}, {"limit_val_batches": 2}]
        options |= chosen.choice(limits)
    savers = [{"every_n_train_steps": 1}] * 2 + [{"save_on_train_epoch_end": True}, {}]
    savers += [{"save_on_train_epoch_end": False}] * len(held_out)
    saver = chosen.choice(savers)
    run = train, samples, [loader, held_out, own], saver, options
    kill_at = chosen.randint(2 * length, EPOCHS * length - 1)
    if legs.on_ranks(ranks, *run, None, kill_at) is not None:
        return f"{run[1:]}", ["it was not killed"]
    paths = sorted(Path("checkpoints").iterdir())
    ends = [path for path in paths if int(path.stem[5:].split("-")[0]) % steps == 0]
    path = chosen.choice(ends if ends and chosen.random() < 0.4 else paths)
    epochs, more = divmod(int(path.stem[5:].split("-")[0]), steps)
    taken = epochs * length + more * accumulate
    setting = f"{path}, {steps} steps an epoch, {taken} batches, killed at {kill_at}, {run[1:]}"
    kept = path.rename(path.name)
    legs.shutil.rmtree("checkpoints")
    whole = legs.on_ranks(ranks, *run, None, None)
    legs.shutil.rmtree("checkpoints")
    rest = legs.on_ranks(ranks, *run, str(kept), None)
    assert whole is not None
    assert rest is not None
    if len(whole[0][0][True]) != EPOCHS * length:
        return setting, [f"{len(whole[0][0][True])} batches, not {EPOCHS * length}"]
    # Lightning has prefetched this for an abandoned epoch, or before it loads a state.
    epochs = EPOCHS if "limit_train_batches" in options else int(more == 0)
    return setting, legs.wrong_with(whole, rest, taken, 2 * workers * batch * epochs)


if __name__ == "__main__":
    legs.main(leg)
