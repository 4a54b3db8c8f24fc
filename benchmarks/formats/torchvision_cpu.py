"""Make the torchvision of this environment importable beside a torch without CUDA.

On Linux the package index has torchvision for CUDA alone. Beside a CPU torch its compiled operators
cannot load, and the import fails at two functions about them. This declares these operators at the
top of the installed package; the transforms, which are all that the benchmark uses, are Python. It
does nothing where torchvision can be imported. Run with the Python of the environment.
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
    """Declare the operators if the import fails without. Return 1 if it still fails."""
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
    """Whether torchvision can be imported, in a fresh interpreter."""
    script = "from torchvision.transforms import v2"
    return not subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
