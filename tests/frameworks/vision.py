"""Stands in for torchvision, which Composer imports, which the recipes use nothing of, and which
would have to be built for the torch that is there. What Composer imports of it is made up.
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
