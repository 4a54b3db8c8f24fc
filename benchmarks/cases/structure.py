"""Batches of several parts: a large array and 112 small ones (detection models), or small ones."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from functools import partial

import loaders
from cases.tensors import CALL, from_numpy
from harness.case import Case, Contender, Goal, scaled
from work import Features, Parts, Structured, Work, microseconds, milliseconds

OURS, LIMIT, TORCH = "cseq, 2 workers", "bare loop", "torch DataLoader"


def case(name: str, title: str, work: Work) -> Case:
    """Declare the case."""
    return Case(
        name,
        title,
        "µs/batch",
        (
            Contender(OURS, partial(loaders.cseq_processes, work), ours=True),
            Contender(
                "SPDL subprocess, segment pool",
                partial(loaders.spdl_process, work.part(4), segment_bytes=Structured.NBYTES),
                needs=("spdl-core",),
            ),
            Contender(
                "Grain mp_prefetch",
                partial(loaders.grain_processes, work.part(10)),
                needs=("grain",),
            ),
            Contender(TORCH, partial(loaders.torch_dataloader, work.part(20)), needs=("torch",)),
            Contender(LIMIT, partial(loaders.bare, work)),
        ),
        limit=LIMIT,
        goals=(Goal("times as fast as the DataLoader", lambda f: f[TORCH] / f[OURS], None, 20),),
    )


PARTS = {"one array": 1, "a pair": 2, "a dict of 20": 20, "a dict of 113": 113}
BATCHES = scaled(20_000, 40)


# The time that torch takes to make and drop tensors is a lower bound: 20 tensors may take longer
# than three batches of one array (docs/explanation/performance.md).
OF_TENSORS = Goal(
    "a dict of 20: times 20 calls of from_numpy", lambda f: f["a dict of 20"] / (20 * f[CALL]), 1.5
)


def parts(out_type: str, num_workers: int) -> Case:
    """Declare a case of small arrays that are ready in the workers."""
    options = {"out_type": out_type, "num_workers": num_workers}
    tensors = out_type == "cpu"
    return Case(
        f"parts_{out_type}_{num_workers}",
        f"Small arrays, {num_workers} worker{'s' * (num_workers > 1)}, out_type='{out_type}'",
        "µs/batch",
        tuple(
            Contender(
                name,
                partial(
                    loaders.cseq_processes,
                    Work(partial(Parts, count), BATCHES, microseconds),
                    **options,
                ),
                needs=("torch",) if tensors else (),
                ours=True,
            )
            for name, count in PARTS.items()
        )
        + (Contender(CALL, from_numpy, needs=("torch",)),) * tensors,
        goals=(
            Goal("a pair: times one array", lambda f: f["a pair"] / f["one array"], 1.5),
            Goal("a dict of 20: times one array", lambda f: f["a dict of 20"] / f["one array"], 3),
        )
        + (OF_TENSORS,) * tensors,
    )


DICT, TORCH_DICT = "cseq, a dict", "torch DataLoader, a dict"
OBJECT, TORCH_OBJECT = "cseq, a UserDict", "torch DataLoader, a UserDict"


def objects() -> Case:
    """Declare the case of batches that are class instances with large tensors."""
    works = [
        Work(partial(Features, container), scaled(100, 6), milliseconds)
        for container in (dict, UserDict)
    ]
    ours = zip((DICT, OBJECT), works, strict=True)
    theirs = zip((TORCH_DICT, TORCH_OBJECT), works, strict=True)
    return Case(
        "objects",
        "19 MB of tensors in a dict, and in an object of a class",
        "ms/batch",
        (
            *(
                Contender(
                    name,
                    partial(loaders.cseq_processes, work, out_type="null"),
                    needs=("torch",),
                    ours=True,
                )
                for name, work in ours
            ),
            *(
                Contender(name, partial(loaders.torch_dataloader, work), needs=("torch",))
                for name, work in theirs
            ),
        ),
        goals=(
            Goal(
                "a UserDict: part of the DataLoader's time",
                lambda f: f[OBJECT] / f[TORCH_OBJECT],
                1,
            ),
        ),
    )


WORK = Work(Structured, scaled(1000, 12), microseconds)

CASES = (
    case("dict_113", "A dict of a 4.8 MB array and 112 small ones", WORK),
    case(
        "dict_113_touched",
        "A dict of a 4.8 MB array and 112 small ones, touched",
        replace(WORK, touch=True),
    ),
    objects(),
    *(parts(out_type, num_workers) for out_type in ("null", "cpu") for num_workers in (1, 2)),
)
