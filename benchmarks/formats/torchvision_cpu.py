"""Make this environment's torchvision importable with a CPU-only torch.

On Linux, the package index has torchvision only for CUDA. With a CPU-only torch, its compiled
operators cannot be loaded, and the import fails at two functions that refer to them. This script
declares these operators at the top of the installed package. The benchmark uses only the
transforms, which are Python. The script does nothing if torchvision can be imported. Run it with
the environment's Python.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DECLARATION = """\
import torch
_declared = torch.library.Library("torchvision", "DEF")  # see torchvision_cpu.py of cseq
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Declare the operators if the import fails without them. Return 1 if it still fails."""
    if imports():
        return 0
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        print("torchvision is not installed", file=sys.stderr)
        return 1
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    if DECLARATION not in text:
        path.write_text(DECLARATION + text, encoding="utf-8")
    return 0 if imports() else 1


def imports() -> bool:
    """Return True if a fresh interpreter can import torchvision."""
    script = "from torchvision.transforms import v2"
    return not subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
