"""torchtitan's own trainer on the CPU, with ranks connected by gloo.

``titan_legs.py LEG`` runs a config of the module `configs` in the current folder, from its newest
checkpoint. It prints each rank's training batches, or null if rank 0 has killed itself. LEG and the
output are JSON.
"""

import json
import os
import sys
from typing import NamedTuple

import legs
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_mask

MODULE, ROW, STEPS = "configs", 64, 100


def replace_cuda():
    """Let torchtitan, which requires CUDA, train on the CPU; this precedes its other imports."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu

    class Properties:
        name, total_memory = "cpu", 2**34

    lacking = {
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: Properties,
    }
    for name, function in lacking.items():
        setattr(torch.cpu, name, getattr(torch.cpu, name, function))
    torch.cpu.current_device = lambda: 0
    divide = FSDPModule.set_gradient_divide_factor

    def divide_sums(module, factor):
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_sums


def attend(q, k, v, *, block_mask=None, **options):
    """Replace flex attention, which has no backward on the CPU."""
    mask = None
    if block_mask is not None:
        sizes = block_mask.shape[0], None, q.shape[-2], k.shape[-2]
        mask = create_mask(block_mask.mask_mod, *sizes, "cpu")
    named = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **named)
    if options.get("return_aux") is None:
        return out
    return out, AuxOutput(lse=torch.zeros(q.shape[:-1]))


class Leg(NamedTuple):
    """A run: its ranks, each one's rows in a batch, and the step in which rank 0 kills itself."""

    ranks: int = 2
    rows: int = 2
    kill_at: int | None = None
    workers: int = 1
    config: str = "pretrain"


def arguments(leg):
    """Return the arguments after `torchrun -m torchtitan.train`."""
    if IS_NEW:
        sizes = {
            "max_context_length": ROW,
            "num_tokens_per_microbatch_per_dp_rank": leg.rows * ROW,
            "num_tokens_per_train_step": leg.rows * ROW * leg.ranks,
        }
    else:
        sizes = {"seq_len": ROW, "local_batch_size": leg.rows}
    given = {f"training.{name}": value for name, value in sizes.items()}
    given |= {"training.steps": STEPS, "checkpoint.interval": 3, "hf_assets_path": "tokenizer"}
    given |= {"dataloader.num_workers": leg.workers, "dump_folder": "dump", "module": MODULE}
    given["debug.seed"] = 3
    pairs = [f"--{name}={value}" for name, value in given.items()]
    flags = ["--checkpoint.enable", "--training.disable_cuda_graphs", "--dataloader.no-repeat"]
    return ["train", f"--config={leg.config}", *pairs, *flags]


def train(leg):
    """Run torchtitan's `main`; return this rank's training batches."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    record = {"batches": [], "losses": {}, "validation": []}
    generate, log = Trainer.batch_generator, MetricsProcessor.log
    log_validation = MetricsProcessor.log_validation

    def recording(self, data):
        for inputs, labels in generate(self, data):
            if self.step == leg.kill_at:
                legs.os.kill(os.getpid(), legs.signal.SIGKILL)
            assert set(inputs) == {"input", "positions"}
            shape = list(labels.shape)
            rows = [part.view(-1, ROW).tolist() for part in (*inputs.values(), labels)]
            record["batches"].append({"step": self.step, "shape": shape, "rows": rows})
            yield inputs, labels

    def logged(self, step, average, *args, **options):
        record["losses"][step] = average.hex()
        log(self, step, average, *args, **options)

    def validated(self, loss, step):
        record["validation"].append((step, loss.hex()))
        log_validation(self, loss=loss, step=step)

    Trainer.batch_generator, MetricsProcessor.log = recording, logged
    MetricsProcessor.log_validation = validated
    sys.argv = arguments(leg)
    titan.main()
    record["left"] = [process.pid for process in legs.multiprocessing.active_children()]
    return record


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    replace_cuda()
    from torchtitan import train as titan
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import TrainingConfig
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.trainer import Trainer

    IS_NEW = hasattr(TrainingConfig, "max_context_length")
    FlexAttention.compiled_flex_attn = staticmethod(attend)
    given = Leg(**json.loads(sys.argv[1]))
    print(json.dumps(legs.on_ranks(given.ranks, train, given)))
