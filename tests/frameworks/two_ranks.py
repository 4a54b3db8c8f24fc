"""Run a recipe in a process group, and write each rank's training batches.

``two_ranks.py MODULE ARGUMENTS`` calls ``MODULE.train(**ARGUMENTS)`` and writes ``rank0.json``,
``rank1.json``.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import recipes

import net


def main(module, arguments):
    """Train, and write."""
    record = recipes.Record()
    forward = net.Net.forward

    def recording(self, x):
        if self.training:
            record.add(x)
        return forward(self, x)

    net.Net.forward = recording
    if module == "with_ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    importlib.import_module(module).train(**json.loads(arguments))
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    Path(f"rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
