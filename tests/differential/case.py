"""A case: options of a loader and a trainer's steps with it, as a dict of plain values.

A missing option has its default, so a case is smaller if it still shows a difference after an
option was removed.
"""

import multiprocessing

import parts
import torch
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

DEFAULTS = {
    "seed": 0,
    "dataset": "map",
    "length": 6,
    "item": "tuple",
    "draws": [],
    # Sources of a collate function's draws, where samples draw nothing.
    "kinds": ["torch", "numpy", "random"],
    "info": False,
    "sampler": None,
    "key": "int",
    "group": "list",
    "batch_size": 2,
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "drop_last": False,
    "in_order": True,
    "generator": False,
    "collate": None,
    "layout": None,
    "kept": False,
    "init": None,
    "method": None,
    "method_object": False,
    "timeout": 0,
    "pin_memory": False,
    "shuffle": None,
    "error": None,
    "stop": False,
    "stateful": False,
    "context": False,
    "steps": ["epoch"],
}

STREAMS = {
    "stream": parts.Stream,
    "counted": parts.Counted,
    "iterator": parts.Steps,
    "state": parts.Stateful,
    "pipe": parts.pipe,
}
ITEMS = [
    *[
        "tuple",
        "tensor",
        "double",
        "bool",
        "array",
        "numpy scalar",
        "int",
        "float",
        "str",
        "bytes",
        "dict",
    ],
    *["named", "nested", "ragged", "none", "empty", "half", "mixed"],
]
LAYOUTS = ["channels last", "transposed", "large"]
# Workers that begin as new interpreters, which takes seconds each.
FRESH = ("spawn", "forkserver")


class Case(dict):
    """The options that differ from `DEFAULTS`."""

    def __getattr__(self, name):
        return self.get(name, DEFAULTS[name])

    @property
    def is_unordered(self):
        """Return whether the order of batches depends on time, at the latest after some step."""
        numbers = [int(step.split()[1]) for step in self.steps if step.startswith("num_workers")]
        return not self.in_order and max(self.num_workers, *numbers, 0) > 1

    @property
    def streams(self):
        return self.dataset in STREAMS

    @property
    def falls_back(self):
        """Return whether only torch's own iterator can serve it."""
        return self.dataset == "pipe" or self.context

    def fails(self, where):
        return bool(self.error) and self.error["where"] == where


# -- making a case


def generate(rng, methods=True):
    """Return a random case; `methods` allows spawn and forkserver, which take seconds."""
    case = {
        "seed": rng.randrange(1000),
        "length": rng.choice([0, 1, 2, 3, 5, 7, 8, 11, 12, 16]),
        "batch_size": rng.choice([1, 2, 2, 3, 3, 4, 5, None]),
        "num_workers": rng.choice([0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5]),
        "item": rng.choice(ITEMS[:2] * 6 + ITEMS),
    }

    def maybe(chance, name, *values):
        if rng.random() < chance:
            case[name] = rng.choice(values)
            return True
        return False

    maybe(
        0.6,
        "dataset",
        "bulk",
        "tensor",
        "stack",
        "subset",
        "concat",
        "stream",
        "counted",
        "iterator",
        "state",
    )
    maybe(0.03, "dataset", "pipe")
    maybe(0.55, "draws", ["torch"], ["numpy"], ["random"], ["torch", "numpy", "random"])
    maybe(0.3, "info", True)
    maybe(0.3, "generator", True)
    maybe(0.25, "collate", "same", "count", "set", "draw")
    maybe(0.25, "drop_last", True)
    if case.get("dataset") not in STREAMS:
        own = ["own", "eager", "own batches", "eager batches"]
        torchs = ["random", "random generator", "replacement", "subset", "weighted"]
        if maybe(0.55, "sampler", *own, *own, *torchs):
            maybe(0.5, "key", "str", "tuple", "numpy", "tensor", "bool")
            maybe(0.5, "group", "tuple", "dict", "array", "tensor", "generator")
            maybe(0.4, "stateful", True)
        else:
            maybe(0.6, "shuffle", True, False)
    if case["num_workers"]:
        maybe(0.4, "persistent_workers", True)
        maybe(0.4, "prefetch_factor", 1, 3, 4)
        maybe(0.1, "in_order", False)
        maybe(0.3, "init", "draw", "seed", "dataset")
        maybe(0.1, "method", "fork")
        maybe(0.02 if methods else 0, "method", "spawn", "forkserver")
        maybe(0.1, "method_object", True)
        maybe(0.1, "timeout", 50)
        maybe(0.04, "context", True)
    maybe(0.05, "pin_memory", True)
    if rng.random() < 0.3:
        where = (
            ["sample"] * 3
            + ["collate"] * 2
            + ["init"] * bool(case["num_workers"])
            + ["sampler", "iter"]
        )
        at = rng.randrange(6)
        case["error"] = {"where": rng.choice(where), "at": at, "type": rng.choice([*parts.ERRORS])}
        maybe(0.4, "stop", True)
    steps = (
        ["epoch"] * 6
        + [f"break {rng.randrange(4)}"] * 3
        + ["len", "draw", "pickle", f"two {rng.randrange(4)}"]
    )
    steps += [f"num_workers {rng.randrange(1, 4)}", "collate count", "generator", "forever 3"]
    case["steps"] = [rng.choice(steps) for _ in range(rng.randrange(1, 4))] + ["epoch"]
    if rng.random() < 0.25:
        case["steps"] = [f"resume {rng.randrange(5)}"]
    if case.get("method") in FRESH:
        case |= {"num_workers": min(case["num_workers"], 2), "steps": case["steps"][-2:]}
    # Often, the constructor or `iter` refuses these.
    if rng.random() < 0.04:
        odd = {
            "batch_size": None,
            "drop_last": True,
            "timeout": 1,
            "prefetch_factor": 0,
            "shuffle": True,
        }
        odd |= {"persistent_workers": True, "sampler": "own", "in_order": False, "num_workers": -1}
        odd |= {"method": "thread", "init": "draw"}
        name = rng.choice(sorted(odd))
        case[name] = odd[name]
    maybe(0.2, "layout", *LAYOUTS)
    maybe(0.2, "kept", True)
    return settle(case)


def settle(options):
    """Remove options that are at their default, have no meaning here, or depend on the clock."""
    case = Case(options)
    resume = [step for step in case.steps if step.startswith("resume")]
    if resume:
        # Draws and counts before the resume are repeated, so only the samples continue.
        for name in ("draws", "info", "error", "init", "in_order"):
            case.pop(name, None)
        if case.collate in ("count", "draw"):
            case.pop("collate")
        case["steps"] = resume[:1]
    if case.context:
        for name in ("method", "method_object"):
            case.pop(name, None)
        if not case.num_workers > 0:
            case.pop("context")
    if case.fails("iter") and case.dataset == "pipe":
        case.pop("error")
    if case.dataset in ("tensor", "stack"):
        for name in ("item", "draws", "info"):
            case.pop(name, None)
    if case.fails("iter") and (not case.streams or case.persistent_workers):
        # This kills a persistent worker of torch's.
        case.pop("error")
    if case.fails("sampler") and case.sampler not in (
        "own",
        "eager",
        "own batches",
        "eager batches",
    ):
        case.pop("error")
    if case.fails("collate") and case.collate is None:
        case["collate"] = "draw"
    if case.layout and case.collate != "same":
        case["collate"] = "same" if resume else "draw"
    if case.fails("init") or case.fails("iter"):
        # torch's worker answers its first task with this error, and later ones with its own.
        case["stop"] = True
        case.pop("persistent_workers", None)
    if case.fails("sampler") and case.num_workers > 0:
        # A batch is lost: see `observe.alike`.
        case.pop("draws", None)
        case.pop("stop", None)
    plain = ("map", "bulk", *(name for name in STREAMS if name != "pipe"))
    if case.init == "dataset" and case.dataset not in plain:
        case.pop("init")
    if case.is_unordered:
        # Which worker makes a batch, and which one comes first, depends on time.
        for name in ("draws", "info", "error", "collate", "layout", "init"):
            case.pop(name, None)
        steps = [step for step in case.steps if step in ("epoch", "len", "draw", "generator")]
        case["steps"] = steps or ["epoch"]
    left = case.stop or any(step.startswith(("break", "two")) for step in case.steps)
    if left and case.streams and case.persistent_workers and case.num_workers > 1:
        # When torch hears that a worker has ended, it asks the others for one more, if in time.
        for name in ("draws", "info", "collate", "layout", "init"):
            case.pop(name, None)
        case["steps"] = [step for step in case.steps if not step.startswith("collate")]
    if case.num_workers < 2:
        case["steps"] = [
            step for step in case.steps if case.num_workers == 1 or "num_workers" not in step
        ]
    if not case.error:
        case.pop("stop", None)
        case.pop("error", None)
    if case.sampler not in ("own", "eager", "own batches", "eager batches"):
        case.pop("key", None)
        case.pop("stateful", None)
    if case.sampler not in ("own batches", "eager batches"):
        case.pop("group", None)
    return Case({name: value for name, value in case.items() if value != DEFAULTS[name]})


def smaller(case):
    """Yield cases with an option or a step less, or with smaller numbers."""
    for name in sorted(case):
        yield settle({each: value for each, value in case.items() if each != name})
    for place in range(len(case.steps) if len(case.steps) > 1 else 0):
        yield settle({**case, "steps": case.steps[:place] + case.steps[place + 1 :]})
    for place, step in enumerate(case.steps):
        if step != "epoch":
            yield settle(
                {**case, "steps": [*case.steps[:place], "epoch", *case.steps[place + 1 :]]}
            )
    for name, least in (("num_workers", 1), ("length", 0), ("batch_size", 1)):
        value = getattr(case, name)
        if value is not None and value > least:
            yield settle({**case, name: value - 1})
    if len(case.draws) > 1:
        for draw in case.draws:
            yield settle({**case, "draws": [draw]})
    if case.error and case.error["at"] > 0:
        yield settle({**case, "error": {**case.error, "at": case.error["at"] - 1}})
    if case.collate not in (None, "same"):
        yield settle({**case, "collate": "same"})


# -- a case's loader


def dataset(case):
    """Return the case's data set."""
    items = parts.Items(case.item, case.draws, case.info, case.error)
    length = case.length
    if case.streams:
        return STREAMS[case.dataset](length, items)
    keyed = case.sampler in ("own", "eager", "own batches", "eager batches")
    if case.dataset == "tensor":
        return TensorDataset(torch.arange(length * 2).reshape(length, 2), torch.arange(length) / 3)
    if case.dataset == "stack":
        return StackDataset(image=TensorDataset(torch.arange(length)), label=list(range(length)))
    if case.dataset == "bulk":
        return parts.Bulk(length, items, keyed)
    whole = parts.Map(length, items, keyed)
    if case.dataset == "subset":
        return Subset(whole, [length - 1 - number for number in range(length)])
    if case.dataset == "concat":
        return ConcatDataset([parts.Map(2, items, keyed), parts.Bulk(length, items, keyed)])
    return whole


def sampler(case, length):
    """Return the case's sampler."""
    error = case.error if case.fails("sampler") else None
    if case.sampler in ("own", "eager", "own batches", "eager batches"):
        group = case.group if "batches" in case.sampler else ""
        kind = parts.StatefulSampler if case.stateful else parts.Sampler
        return kind(length, case.key, "eager" in case.sampler, error, group)
    return {
        "random": lambda: RandomSampler(range(length)),
        "random generator": lambda: RandomSampler(
            range(length), generator=torch.Generator().manual_seed(5)
        ),
        "replacement": lambda: RandomSampler(
            range(length), replacement=True, num_samples=length + 2
        ),
        "subset": lambda: SubsetRandomSampler(range(0, length, 2)),
        "weighted": lambda: WeightedRandomSampler(
            [0.1 + number for number in range(length)], length + 1
        ),
    }[case.sampler]()


def loader(case, cls):
    """Return a loader of the class."""
    data = dataset(case)
    options = {
        "num_workers": case.num_workers,
        "drop_last": case.drop_last,
        "batch_size": case.batch_size,
        "timeout": case.timeout,
        "pin_memory": case.pin_memory,
        "persistent_workers": case.persistent_workers,
        "prefetch_factor": case.prefetch_factor,
        "in_order": case.in_order,
        "shuffle": case.shuffle,
    }
    if case.sampler is not None:
        made = sampler(case, 6 if case.streams else len(data))
        if "batches" in case.sampler:
            options["batch_sampler"] = made
            for name in ("batch_size", "drop_last", "shuffle"):
                del options[name]
        else:
            options["sampler"] = made
    if case.generator:
        options["generator"] = torch.Generator().manual_seed(7)
    if case.collate:
        options["collate_fn"] = parts.Collate(
            case.collate,
            case.draws or case.kinds,
            case.error if case.fails("collate") else None,
            case.layout,
        )
    if case.init or case.fails("init"):
        options["worker_init_fn"] = parts.Init(
            case.init, case.error if case.fails("init") else None
        )
    if case.method is not None:
        known = case.method_object and case.method in multiprocessing.get_all_start_methods()
        options["multiprocessing_context"] = (
            multiprocessing.get_context(case.method) if known else case.method
        )
    if case.context:
        options["multiprocessing_context"] = parts.Context()
    return cls(data, **options)
