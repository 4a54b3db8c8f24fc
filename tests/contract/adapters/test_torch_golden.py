"""The current version reads the states that earlier versions of cseq wrote."""

import json
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402

FILE = Path(__file__).parents[2] / "golden" / "checkpoints.json"
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


def read(value):
    """Return a value of the file, with the state's tensors restored."""
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return torch.frombuffer(bytearray(b64decode(value["tensor"])), dtype=torch.uint8)
    return {k: read(v) for k, v in value.items()} if isinstance(value, dict) else value


def make(kind):
    """Make the loader or sampler of a state, with other generators."""
    if kind == "manager":
        return cseq.MTSequence(np.arange(24), batch_size=4, seed=3, out_type="null")
    options = {"shuffle": True}
    if kind == "distributed":
        dataset = range(24)
        options = {"sampler": data.DistributedSampler(dataset, 2, 1, seed=3)}
    return cseq.DataLoader(Plain(24), 4, generator=torch.Generator().manual_seed(9), **options)


@pytest.mark.parametrize(
    ("kind", "version"),
    [(kind, state["version"]) for kind in GOLDEN for state in GOLDEN[kind]["states"]],
)
def test_a_state_of_each_version(kind, version):
    """The rest of the epoch equals the rest in the run that wrote the state."""
    [state] = [each for each in GOLDEN[kind]["states"] if each["version"] == version]
    made = make(kind)
    made.load_state_dict(read(state))
    if kind == "manager":
        with made.start_test() as batches:
            rest = [batch.tolist() for batch in batches]
    else:
        rest = [batch.tolist() for batch in made]
    assert rest == GOLDEN[kind]["rest"]
