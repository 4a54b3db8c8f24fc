"""The Hugging Face Trainer with `cseq.DataLoader`."""

from transformers import Trainer, TrainingArguments

from cseq.adapters.torch import install

from samples import Net, Samples


def train(resume=None, **options):
    args = TrainingArguments(
        "checkpoints",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        save_steps=5,
        use_cpu=True,
        report_to="none",
        **options,
    )
    trainer = Trainer(Net(), args, train_dataset=Samples(), eval_dataset=Samples())
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    install()
    train()
    train("checkpoints/checkpoint-20")  # goes on in mid-epoch
