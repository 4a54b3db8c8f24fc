"""Replaces torchvision, which Composer imports, which the recipes do not use, and which would have
to be built for the installed torch. What Composer imports of it is invented.
"""

from __future__ import annotations

import importlib.machinery
import sys
from typing import Any
from unittest import mock

MODULES = (
    "datasets",
    "models",
    "models.resnet",
    "ops",
    "transforms",
    "transforms.functional",
    "utils",
)


class Vision(mock.MagicMock):
    """torchvision, and each of its modules."""

    VisionDataset = type("VisionDataset", (), {})
    __spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    __path__: tuple[str, ...] = ()


vision: Any = Vision()
vision.datasets = vision
sys.modules["torchvision"] = vision
sys.modules.update({f"torchvision.{name}": vision for name in MODULES})
