"""The recipes as a user runs them: each file of the pages as a script, to its end."""

from importlib.util import find_spec

import pytest
from recipes import CSEQ_RUN, RECIPES, TORCHRUN, run

# Composer needs a torchvision that fits, and torchtitan an environment of its own.
NAMES = sorted(path.stem for path in RECIPES.glob("*_*.py"))
NAMES = [name for name in NAMES if not name.endswith(("_composer", "_torchtitan"))]
# Packages whose names differ from the scripts' names.
LIBRARIES = {
    "accelerate_state": "accelerate",
    "ddp": "torch",
    "fabric": "lightning",
    "jax": "flax",
    "prometheus": "prometheus_client",
}
LAUNCHERS = {
    "loader_accelerate": [CSEQ_RUN, (*TORCHRUN, *CSEQ_RUN)],
    "with_accelerate": [(), TORCHRUN],
    "with_ddp": [TORCHRUN],
}


@pytest.mark.parametrize(
    ("name", "launcher"), [(name, each) for name in NAMES for each in LAUNCHERS.get(name, [()])]
)
def test_script(name, launcher, monkeypatch):
    """It succeeds, and so does its resume."""
    framework = name.partition("_")[2]
    library = LIBRARIES.get(framework, framework)
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    run([*launcher, RECIPES / f"{name}.py"])
