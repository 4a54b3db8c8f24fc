"""The Hugging Face Trainer with `cseq.MPSequence`."""

from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from cseq.adapters.transformers import BatchTrainer, Monitor, SaveState

from data import batches
from inputs import Inputs
from net import Net


class Model(Net):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def train(resume=None, **options):
    args = TrainingArguments(
        "checkpoints",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        # The state has the position, so there is nothing to skip.
        ignore_data_skip=True,
        use_cpu=True,
        report_to="none",
        **{"save_strategy": "steps", "save_steps": 5, **options},
    )
    with (
        batches(Inputs, shard="auto").start() as training,
        batches(Inputs, shard="auto", shuffle=False).start() as held_out,
    ):
        trainer = BatchTrainer(
            Model(),
            args,
            train_dataset=training,
            eval_dataset=held_out,
            callbacks=[SaveState(), Monitor(every=50)],
        )
        trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train("checkpoints/checkpoint-20")
