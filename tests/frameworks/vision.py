"""Replaces torchvision, which Composer imports, which the recipes do not use, and which would have
to be built for the installed torch. What Composer imports of it is invented.
"""

import importlib.machinery
import sys
from unittest import mock

MODULES = ["datasets", "models", "models.resnet", "ops", "utils"]
MODULES += ["transforms", "transforms.functional"]


class Vision(mock.MagicMock):
    """torchvision, and each of its modules."""

    VisionDataset = type("VisionDataset", (), {})
    __spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    __path__ = ()


vision = Vision()
vision.datasets = vision
sys.modules["torchvision"] = vision
sys.modules.update({f"torchvision.{name}": vision for name in MODULES})
