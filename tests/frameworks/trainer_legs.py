"""Random settings of the Trainer: a run that is killed and resumes; see `legs`.

The network has dropout, and the collator masks at random.
"""

import legs
from transformers import PrinterCallback, Trainer, TrainingArguments

from cseq.adapters.torch import defaults, install
from cseq.adapters.transformers import SeedEpochs

EPOCHS = 3
# How the Trainer draws, and whether that needs `SeedEpochs`.
SAMPLERS = [
    ({}, False),
    ({"data_seed": 5}, False),
    ({"train_sampling_strategy": "sequential"}, True),
    ({"train_sampling_strategy": "group_by_length"}, True),
    ({"accelerator_config": {"use_seedable_sampler": False}}, True),
    ({"accelerator_config": {"split_batches": True}}, False),
    ({"accelerator_config": {"dispatch_batches": True}}, True),
]


def train(samples, seeds, options, resume, kill_at):
    """Train; return the data of `legs.wrong_with`, in which all batches count."""
    args = TrainingArguments(
        "checkpoints",
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        save_steps=1,
        **options,
    )
    data, collator = legs.Augmented(samples), legs.Collator()
    trainer = Trainer(
        net := legs.Net(0.3, kill_at),
        args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator,
        callbacks=[SeedEpochs()] if seeds else [],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    had = legs.count(*net.seen[True], *net.seen[False])
    return net.seen, collator.made.value, had


def leg(chosen, ranks):
    """Train, die, and resume.

    Three settings are avoided. With `dispatch_batches` on several ranks, accelerate skips as many
    batches of all ranks as it should of each. After a checkpoint before the evaluation of an epoch,
    the Trainer does not evaluate again, so dropout has other draws. For evaluations in groups by
    length, the Trainer takes samples, and their draws.
    """
    sampler, seeds = chosen.choice(SAMPLERS[: len(SAMPLERS) - (ranks > 1)])
    is_divided = "split_batches" in sampler.get("accelerator_config", {})
    samples, batch = chosen.randint(30, 70), chosen.choice((4, 8))
    drop_last, accumulate = chosen.random() < 0.3, chosen.choice((1, 1, 2, 3))
    workers = chosen.choice((0, 2))
    options = {
        **sampler,
        "per_device_train_batch_size": batch,
        "dataloader_drop_last": drop_last,
        "gradient_accumulation_steps": accumulate,
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers > 0 and chosen.random() < 0.5,
        "eval_strategy": chosen.choice(("no", "steps", "epoch")),
        "eval_steps": chosen.randint(1, 4),
    }
    together = batch if is_divided else batch * ranks
    length = samples // together if drop_last else -(-samples // together)
    steps = -(-length // accumulate)
    # A third of the checkpoints come with the last batch of an epoch.
    step = chosen.randint(1, EPOCHS * steps - 1)
    if chosen.random() < 1 / 3:
        step = steps * chosen.randint(1, EPOCHS - 1)
    if "group_by_length" in sampler.values():
        options["eval_strategy"] = "no"
    if step % steps == 0 and options["eval_strategy"] == "epoch":
        options["save_strategy"] = "epoch"
    taken = step // steps * length + step % steps * accumulate
    kill_at = min(taken + chosen.randint(0, 3), EPOCHS * length - 1)
    run = train, samples, seeds or chosen.random() < 0.2, options
    setting = f"{samples} samples, step {step} of {steps}, killed at {kill_at}, {options}"
    whole = legs.on_ranks(ranks, *run, None, None)
    assert whole is not None
    if len(whole[0][0][True]) != EPOCHS * length:
        return setting, [f"{len(whole[0][0][True])} batches, not {EPOCHS * length}"]
    legs.shutil.rmtree("checkpoints")
    if legs.on_ranks(ranks, *run, None, kill_at) is not None:
        return setting, ["it was not killed"]
    rest = legs.on_ranks(ranks, *run, f"checkpoints/checkpoint-{step}", None)
    assert rest is not None
    return setting, legs.wrong_with(whole, rest, taken)


if __name__ == "__main__":
    install()
    defaults.rng = "batch"
    legs.main(leg)
