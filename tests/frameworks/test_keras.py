"""Keras trains on cseq's batches, with torch's and JAX's backends: its epochs, its resumes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from recipes import LENGTH, run, stream

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
# A process for each run, since Keras chooses its backend when it is imported.
DRIVER = """
import json, sys
import keras
import with_keras
from recipes import Interrupted, Record

options = json.loads(sys.argv[1])
record = Record(options.pop("stop_after", None))


class Recording(keras.Sequential):
    def train_step(self, *args):
        data = args[-1]
        record.add(data[0])
        return super().train_step(*args)


net = Recording([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])
net.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True, jit_compile=False)
try:
    with_keras.train(net, verbose=0, **options)
except Interrupted:
    assert record.stop_after is not None
print(json.dumps(record))
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_its_epochs_and_its_resumes(
    backend: str, recipes: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs are ours; interrupted in mid-epoch and after one, training goes on exactly."""
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    expected = stream(0, 1, 2)

    def train(**options: object) -> list[list[int]]:
        output = run(["-c", DRIVER, json.dumps(options)], folder, recipes)
        return json.loads(output.splitlines()[-1])

    assert train() == expected
    for every, stop_after, taken in [(5, 17, 10), (5, 20, LENGTH + 5), (LENGTH, 17, LENGTH)]:
        options = {"folder": f"{every}-{stop_after}", "every": every}
        assert train(stop_after=stop_after, **options) == expected[:stop_after]
        assert train(**options) == expected[taken:]
