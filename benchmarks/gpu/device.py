"""The device to measure: CUDA, or the CPU as a substitute.

If the CPU stands in, cseq runs its whole CUDA path (converters, slots, batches that are kept until
they are copied) with `tests/helpers/rehearsal.py`. All programs run to the end, but the figures say
nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
from harness import usage

DEVICE = os.environ.get(gpu.DEVICE, "cuda")
STANDS_IN = DEVICE == "cpu"
ASKED = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max")


def prepare() -> None:
    """Initialise the device before anything is timed or started."""
    import torch

    if STANDS_IN:
        sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
        importlib.import_module("rehearsal").install()
        # OpenMP's threads busy-wait, and the workers need the cores.
        torch.set_num_threads(1)
        return
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()


def synchronize() -> None:
    """Wait until the device has done all its work."""
    if not STANDS_IN:
        import torch

        torch.cuda.synchronize()


def page_locked(tensor: Any) -> Any:
    """Return a copy of a CPU tensor in page-locked memory."""
    return tensor.clone() if STANDS_IN else tensor.pin_memory()


def send(tensor: Any) -> Any:
    """Start copying a CPU tensor to the device, even if that is the CPU."""
    return tensor.clone() if STANDS_IN else tensor.to(DEVICE, non_blocking=True)


def used_bytes() -> float:
    """Memory of all processes on the device, or of our processes on the CPU."""
    if STANDS_IN:
        return usage.memory_bytes(os.getpid())
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def scaled_to(cuda: int, cpu: int) -> int:
    """Return the amount of work, which is smaller if the CPU stands in."""
    return cpu if STANDS_IN else cuda


# -- in the results


def describe() -> dict[str, Any]:
    """Name the device and its driver, in a process that measures nothing."""
    import torch

    about = {"stands_in": STANDS_IN, "torch_cuda": torch.version.cuda}
    if STANDS_IN:
        return about | {"name": "none"}
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} (CUDA: {torch.version.cuda}) finds no CUDA device. With a "
            "GPU, run make check-gpu TORCH=... to install a CUDA build of torch. Without one, "
            "make check-gpu DEVICE=cpu uses the CPU instead, to check that everything runs"
        )
    found = torch.cuda.get_device_properties(0)
    return about | {
        "name": found.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(found.total_memory / 2**30, 1),
        "capability": f"{found.major}.{found.minor}",
        **driver(),
    }


def driver() -> dict[str, str]:
    """Ask nvidia-smi, if it exists, for what torch does not know."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            values = done.stdout.strip().split(", ")
            return dict(zip(ASKED, values, strict=False))
    return {}
