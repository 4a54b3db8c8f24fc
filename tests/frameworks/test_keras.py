"""Keras trains on cseq's batches with the backends of torch and JAX: its epochs, its resumes."""

from importlib.util import find_spec

import pytest
from recipes import LENGTH, run, stream, trained

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
# Each backend has a process, since Keras chooses it at its import.
DRIVER = """
import contextlib, json, sys
import keras
import with_keras
from recipes import Interrupted, Record

class Recording(keras.Sequential):
    def train_step(self, *args):
        record.add(args[-1][0])  # torch's backend has the data alone, JAX's a state before it
        return super().train_step(*args)

for options in json.loads(sys.argv[1]):
    net = Recording([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])
    net.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True, jit_compile=False)
    record = Record(options.pop("stop_after", None))
    with contextlib.suppress(Interrupted):
        with_keras.train(net, verbose=0, **options)
    print("trained:", list(record))
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_its_epochs_and_its_resumes(backend, monkeypatch):
    """Three epochs are cseq's; interrupted in mid-epoch and after one, training resumes exactly."""
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    expected = stream(0, 1, 2)
    runs, batches = [{}], [expected]
    for every, stop_after, taken in [(5, 17, 10), (5, 20, LENGTH + 5), (LENGTH, 17, LENGTH)]:
        options = {"folder": f"{every}-{stop_after}", "every": every}
        runs += [{**options, "stop_after": stop_after}, options]
        batches += [expected[:stop_after], expected[taken:]]
    assert trained(DRIVER, runs) == batches


HEAD = """
import keras
import with_keras
from cseq.adapters.keras import Batches, SaveState
from data import batches
from recipes import LENGTH, figures_of
"""
FIGURES = """
logged, shown = [], []

class Logger(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        assert "loss" in logs
        if found := figures_of(logs):
            assert len(found) == 17
            logged.append(self.step)

class Bar(keras.callbacks.ProgbarLogger):
    def on_train_batch_end(self, batch, logs=None):
        shown.append(figures_of(logs))

net = with_keras.network()
with batches(out_type="null").start() as manager:
    callbacks = [Bar(), with_keras.Figures(manager, 5), Logger()]
    net.fit(Batches(manager), epochs=3, callbacks=callbacks, verbose=0)
assert logged == list(range(5, 3 * LENGTH + 1, 5)), logged
assert shown == [{}] * (3 * LENGTH)
"""

STEPS = """
class Steps(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.done = 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1

    def on_epoch_end(self, epoch, logs=None):
        taken.append(self.done)

taken = []
for steps in (5, 30):
    with batches(out_type="null", repeat=True).start() as manager:
        options = {"epochs": 3, "steps_per_epoch": steps, "verbose": 0, "callbacks": [Steps()]}
        with_keras.network().fit(Batches(manager), **options)
assert taken == [5, 5, 5, 30, 30, 30], taken
"""

FAILED = """
import contextlib, json
from pathlib import Path

class Manager:
    def state_dict(self):
        return {}

def full(path):
    with open(path, "w") as file:
        file.write("half")
    raise OSError(28, "No space left on device")

saver, net = SaveState(Manager(), "saved", 1), with_keras.network()
net.build((None, 2))
saver.set_model(net)
for _ in range(2):
    saver.save()
    named = json.loads(Path("saved/batches.json").read_text())["weights"]
    whole = Path(f"saved/{named}").read_bytes()
    whole_save, net.save_weights = net.save_weights, full
    for _ in range(3):
        with contextlib.suppress(OSError):
            saver.save()
    net.save_weights = whole_save
    assert json.loads(Path("saved/batches.json").read_text())["weights"] == named
    assert Path(f"saved/{named}").read_bytes() == whole
"""


@pytest.mark.parametrize("script", [FIGURES, STEPS, FAILED], ids=["figures", "steps", "failures"])
def test_what_goes_on(script, monkeypatch):
    """Logs have figures; with `repeat`, epochs have their steps; a failed save changes nothing."""
    pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    script = f"{HEAD}{script}print('all is well')"
    assert run(["-c", script]).endswith("all is well\n")
