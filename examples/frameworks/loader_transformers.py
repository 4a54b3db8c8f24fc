"""The Hugging Face Trainer with `cseq.DataLoader`."""

from transformers import Trainer, TrainingArguments, set_seed

from cseq.adapters.torch import defaults, install

from samples import Net, Samples


def train(resume=None, every=5, **options):
    set_seed(7)
    args = TrainingArguments(
        "checkpoints",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        save_steps=every,
        use_cpu=True,
        report_to="none",
        **options,
    )
    trainer = Trainer(Net(), args, train_dataset=Samples(), eval_dataset=Samples())
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    install()
    # This keeps the augmentation the same after a resume.
    defaults.rng = "batch"
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/checkpoint-20")
