"""Keras with `cseq.MPSequence`."""

import keras

import cseq
from cseq.adapters.keras import Batches, SaveState

from data import batches


class Figures(keras.callbacks.Callback):
    """Adds cseq's figures to the logs every few batches, for the callbacks after it."""

    def __init__(self, manager, n=50):
        super().__init__()
        self.manager, self.n = manager, n

    def on_train_begin(self, logs=None):
        self.step, self.every = 0, cseq.Stats.every(self.n, self.manager)

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        logs.update(self.every.at(self.step))


def network():
    net = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, activation="softmax")]
    )
    net.compile("sgd", "sparse_categorical_crossentropy")
    return net


def train(net, folder="checkpoints", every=5, **options):
    with batches(out_type="null").start() as manager:
        callbacks = [
            # The bar shows the logs before the figures are added.
            keras.callbacks.ProgbarLogger(),
            Figures(manager),
            SaveState(manager, folder, every),
        ]
        net.fit(Batches(manager), epochs=3, callbacks=callbacks, **options)


if __name__ == "__main__":
    train(network())
    # Continue at the last checkpoint.
    train(network())
