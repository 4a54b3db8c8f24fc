"""scikit-learn and JAX, without torch."""

import sys

import jax
from sklearn.linear_model import SGDClassifier

import cseq


class Rows:
    def __getitem__(self, indices):
        labels = indices % 2
        noise = cseq.rng().normal(size=(len(indices), 4))
        return (noise + 3 * labels[:, None]).astype("float32"), labels


model = SGDClassifier(random_state=0)
with cseq.MTSequence(
    Rows, 2000, batch_size=100, out_type="null", seed=1
).start() as batches:
    for rows, labels in batches:
        model.partial_fit(rows, labels, classes=[0, 1])
print(model.score(rows, labels) > 0.9)

gradient = jax.grad(lambda w, x, y: ((x @ w - y) ** 2).mean())
step = jax.jit(lambda w, x, y: w - 0.05 * gradient(w, x, y))
weights = jax.numpy.zeros(4)
with cseq.MTSequence(Rows, 2000, out_type=jax.device_put, seed=1).start() as batches:
    for rows, labels in batches:
        weights = step(weights, rows, labels)
finite = bool(jax.numpy.isfinite(weights).all())
print(isinstance(rows, jax.Array), finite, "torch" in sys.modules)
