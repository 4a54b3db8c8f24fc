"""Frameworks that keep cseq's state in their checkpoints: its epochs, and the rest after a stop."""

from importlib import import_module
from importlib.util import find_spec

import pytest
from recipes import LENGTH, TORCHRUN, figures_of, on_two_ranks, recorded, stream

# In mid-epoch, in the next one, and between them.
AT = (10, LENGTH + 5, LENGTH)
QUIET = {"logger": False, "enable_progress_bar": False}
# The batches in a checkpoint, the options of both runs, and more options of the second one.
STOPS = {
    "accelerate": [
        (taken, {}, {"resume": f"checkpoints/{path}"})
        for taken, path in zip(AT, ("0-10", "1-5", "0-end"), strict=True)
    ],
    "fastai": [(taken, {}, {"resume": "checkpoint.pt"}) for taken in AT],
    "ignite": [
        (taken, {"every": taken}, {"resume": f"checkpoints/checkpoint_{taken}.pt"})
        for taken in (5, 20, LENGTH, 2 * LENGTH)
    ],
    "jax": [(taken, {"every": taken}, {"resume": taken}) for taken in (5, 20, LENGTH)],
    "lightning": [
        (taken, {**QUIET, "every": every}, {"ckpt_path": f"checkpoints/step={taken}.ckpt"})
        for taken, every in ((5, 5), (15, 5), (LENGTH, LENGTH), (2 * LENGTH, 2 * LENGTH))
    ],
    "skorch": [(taken, {}, {"resume": True}) for taken in AT],
    "transformers": [
        (taken, {**save, **options}, {"resume": f"checkpoints/checkpoint-{taken}"})
        for taken, save in (
            (5, {"save_steps": 5}),
            (20, {"save_steps": 20}),
            (LENGTH, {"save_strategy": "epoch"}),
        )
        for options in ({}, {"restore_callback_states_from_checkpoint": True})
    ],
}
# The options of two ranks, and how they continue after a number of batches.
RANKS = {
    "accelerate": ({}, {7 + 5: {"resume": "checkpoints/1-5"}, 14: {"resume": "checkpoints/1-end"}}),
    "ddp": ({}, {7 + 3: {"resume": "checkpoints/1-3.pt"}, 14: {"resume": "checkpoints/1-7.pt"}}),
    "lightning": (
        {"strategy": "ddp", "devices": 2, "every": 1, "logger": False},
        {taken: {"ckpt_path": f"checkpoints/step={taken}.ckpt"} for taken in (9, 14)},
    ),
    "transformers": (
        {"save_steps": 1},
        {taken: {"resume": f"checkpoints/checkpoint-{taken}"} for taken in (9, 14)},
    ),
}
LIBRARIES = {"ddp": ("torch",), "jax": ("flax", "orbax")}


def recipe_of(name):
    """Import a framework's recipe; skip if the framework is missing."""
    for library in LIBRARIES.get(name, (name,)):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    return import_module(f"with_{name}")


# The files of Lightning and of the Trainer have this test with evaluations.
@pytest.mark.parametrize("name", sorted(STOPS.keys() - {"lightning", "transformers"}))
def test_its_epochs_are_ours(monkeypatch, name):
    """Three epochs train on cseq's epochs 0, 1 and 2."""
    assert recorded(monkeypatch, recipe_of(name)) == stream(0, 1, 2)


@pytest.mark.parametrize(
    ("name", "taken", "options", "resume"), [(key, *stop) for key in STOPS for stop in STOPS[key]]
)
def test_a_resume_gives_the_rest(monkeypatch, name, taken, options, resume):
    """It continues from a checkpoint in mid-epoch or at an epoch's end."""
    recipe, expected = recipe_of(name), stream(0, 1, 2)
    first = recorded(monkeypatch, recipe, stop_after=taken + 2, **options)
    assert first == expected[: taken + 2]
    assert recorded(monkeypatch, recipe, **options, **resume) == expected[taken:]


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name):
    """Each rank trains on its own shard, before a resume and after it, in mid-epoch or not."""
    recipe_of(name)
    options, resumes = RANKS[name]
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    # Lightning starts the other rank.
    launcher = () if name == "lightning" else TORCHRUN
    for taken, resume in [(0, {}), *resumes.items()]:
        found = on_two_ranks(f"with_{name}", {**options, **resume}, launcher)
        assert found == [rank[taken:] for rank in ranks]


def test_figures_are_among_ignites_metrics():
    """A logger that is attached later finds them."""
    assert len(figures_of(recipe_of("ignite").train().state.metrics)) == 17
