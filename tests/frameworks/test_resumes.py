"""Frameworks that keep cseq's state in their checkpoints: its epochs, and the rest after a stop."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from recipes import LENGTH, figures_of, on_two_ranks, recorded, stream


class Stop(NamedTuple):
    """Batches before an interruption, those in the checkpoint, and the options of both runs."""

    after: int
    taken: int
    options: dict[str, Any]
    resume: Any


# In mid-epoch, in the next one, and between them.
AT = (10, LENGTH + 5, LENGTH)
STOPS = {
    "accelerate": [
        Stop(taken + 2, taken, {}, f"checkpoints/{path}")
        for taken, path in zip(AT, ("0-10", "1-5", "0-end"), strict=True)
    ],
    "fastai": [Stop(taken + 2, taken, {}, "checkpoint.pt") for taken in AT],
    "ignite": [
        Stop(taken + 2, taken, {"every": taken}, f"checkpoints/checkpoint_{taken}.pt")
        for taken in (5, 20, LENGTH, 2 * LENGTH)
    ],
    "jax": [Stop(taken + 2, taken, {"every": taken}, taken) for taken in (5, 20, LENGTH)],
    "skorch": [Stop(taken + 2, taken, {}, True) for taken in AT],
}
LIBRARIES = {"jax": ("flax", "orbax")}


def recipe_of(name):
    """Import a framework's recipe; skip if the framework is missing."""
    for library in LIBRARIES.get(name, (name,)):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    return import_module(f"with_{name}")


@pytest.mark.parametrize("name", STOPS)
def test_its_epochs_are_ours(monkeypatch, name):
    """Three epochs train on cseq's epochs 0, 1 and 2."""
    assert recorded(monkeypatch, recipe_of(name)) == stream(0, 1, 2)


@pytest.mark.parametrize(("name", "stop"), [(name, stop) for name in STOPS for stop in STOPS[name]])
def test_a_resume_gives_the_rest(monkeypatch, name, stop):
    """It continues from a checkpoint in mid-epoch or at an epoch's end."""
    recipe, expected = recipe_of(name), stream(0, 1, 2)
    first = recorded(monkeypatch, recipe, stop_after=stop.after, **stop.options)
    assert first == expected[: stop.after]
    rest = recorded(monkeypatch, recipe, resume=stop.resume, **stop.options)
    assert rest == expected[stop.taken :]


@pytest.mark.parametrize(
    ("name", "resumes"),
    [
        ("accelerate", {7 + 5: "checkpoints/1-5", 14: "checkpoints/1-end"}),
        ("ddp", {7 + 3: "checkpoints/1-3.pt", 14: "checkpoints/1-7.pt"}),
    ],
)
def test_two_ranks(name, resumes, recipes, folder):
    """Each rank trains on its own shard, before and after a resume."""
    if name != "ddp":
        recipe_of(name)
    ranks = [stream(0, 1, 2, rank=rank, world_size=2) for rank in range(2)]
    assert on_two_ranks(f"with_{name}", {}, folder, recipes) == ranks
    for taken, path in resumes.items():
        rest = on_two_ranks(f"with_{name}", {"resume": path}, folder, recipes)
        assert rest == [rank[taken:] for rank in ranks]


def test_figures_are_among_ignites_metrics():
    """A logger that is attached later finds them."""
    assert len(figures_of(recipe_of("ignite").train().state.metrics)) == 17
