"""JAX, Flax and Orbax with `cseq.MPSequence`."""

import os

import optax
import orbax.checkpoint as ocp
from flax import nnx

from data import batches


@nnx.jit
def update(net, optimizer, x, y):
    def loss(net):
        return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

    optimizer.update(net, nnx.grad(loss)(net))


def train(resume=None, every=5):
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(1e-4), wrt=nnx.Param)
    with (
        # This returns NumPy arrays; jax.device_put would work, too.
        batches(out_type="null").start() as manager,
        ocp.CheckpointManager(os.path.abspath("checkpoints")) as checkpoints,
    ):
        step = resume or 0
        if resume:
            saved = checkpoints.restore(
                resume,
                args=ocp.args.Composite(
                    net=ocp.args.StandardRestore(nnx.state(net)),
                    batches=ocp.args.JsonRestore(),
                ),
            )
            nnx.update(net, saved.net)
            manager.load_state_dict(saved.batches)
        for _ in range(manager.epoch, 3):
            for x, y in manager:
                update(net, optimizer, x, y)
                step += 1
                if step % every == 0:
                    checkpoints.save(
                        step,
                        args=ocp.args.Composite(
                            net=ocp.args.StandardSave(nnx.state(net)),
                            batches=ocp.args.JsonSave(manager.state_dict()),
                        ),
                    )


if __name__ == "__main__":
    train()
    # Continue in the middle of the epoch.
    train(20)
