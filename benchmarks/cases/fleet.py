"""Fleets: the cost of making batches on other machines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import loaders
from cases.large import BATCH_BYTES
from harness.case import Case, Contender, Goal, scaled
from work import Floats, Images, Rate, Work, microseconds

BATCHES = scaled(20_000, 40)
SMALL = Work(partial(Floats, BATCHES * 32), BATCHES, microseconds, buffer=64)
LARGE = Work(partial(Images, "uint8"), scaled(400, 12), Rate(BATCH_BYTES), buffer=64)

HOME, RAY = "cseq, 2 workers", "cseq, 2 agents of Ray"
DATA = "Ray Data, one node"
CALLS, OBJECTS = "Ray, a call for each batch", "ray.get of objects of 81 MB"


CASES = (
    Case(
        "fleet_small",
        "Small batches from a fleet",
        "µs/batch",
        (
            Contender(HOME, partial(loaders.cseq_processes, SMALL), ours=True),
            Contender(RAY, partial(loaders.cseq_ray, SMALL), needs=("ray",), ours=True),
            Contender(CALLS, partial(loaders.ray_calls, SMALL.part(50)), needs=("ray",)),
            Contender(DATA, partial(loaders.ray_data, SMALL.part(10)), needs=("ray.data",)),
        ),
        goals=(
            Goal("times as quick as a call each", lambda f: f[CALLS] / f[RAY], at_least=3),
            Goal("times as quick as Ray Data", lambda f: f[DATA] / f[RAY], at_least=1),
        ),
        # An idle cluster uses a tenth of a core.
        alone=True,
    ),
    Case(
        "fleet_large",
        "4.8 MB batches from a fleet",
        "GB/s",
        (
            Contender(HOME, partial(loaders.cseq_processes, LARGE), ours=True),
            Contender(RAY, partial(loaders.cseq_ray, LARGE), needs=("ray",), ours=True),
            Contender(
                OBJECTS,
                partial(loaders.ray_objects, replace(LARGE, batches=4), 81_000_000),
                needs=("ray",),
            ),
        ),
        goals=(Goal("Ray: share of ray.get", lambda f: f[RAY] / f[OBJECTS], at_least=1.0),),
        more_is_better=True,
        alone=True,
    ),
)
