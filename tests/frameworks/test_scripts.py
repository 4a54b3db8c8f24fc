"""The recipes as a user runs them: each file of the pages as a script, to its end."""

from importlib.util import find_spec

import pytest
from recipes import CSEQ_RUN, TORCHRUN, run

# The script, its library, and its launcher. Composer needs a torchvision that fits.
SCRIPTS = [
    ("loader_accelerate", "accelerate", CSEQ_RUN),
    ("loader_accelerate", "accelerate", (*TORCHRUN, *CSEQ_RUN)),
    ("loader_accelerate_state", "accelerate", ()),
    ("loader_fabric", "lightning", ()),
    ("loader_lightning", "lightning", ()),
    ("loader_transformers", "transformers", ()),
    ("with_accelerate", "accelerate", ()),
    ("with_accelerate", "accelerate", TORCHRUN),
    ("with_ddp", "torch", TORCHRUN),
    ("with_fastai", "fastai", ()),
    ("with_ignite", "ignite", ()),
    ("with_jax", "flax", ()),
    ("with_keras", "keras", ()),
    ("with_lightning", "lightning", ()),
    ("with_opentelemetry", "opentelemetry", ()),
    ("with_prometheus", "prometheus_client", ()),
    ("with_skorch", "skorch", ()),
    ("with_transformers", "transformers", ()),
]


@pytest.mark.parametrize(("name", "library", "launcher"), SCRIPTS)
def test_script(name, library, launcher, recipes, folder, monkeypatch):
    """It succeeds, and so does its resume."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    run([*launcher, str(recipes / f"{name}.py")], folder, recipes)
