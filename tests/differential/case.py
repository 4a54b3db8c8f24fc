"""A case: options of a loader and a trainer's steps with it, as a dict of plain values.

A missing option has its default, so a case is smaller if it still shows a difference after an
option was removed.
"""

import multiprocessing

import parts
import torch
from torch.utils import data

DEFAULTS = {
    "seed": 0, "dataset": "map", "length": 6, "item": "tuple", "draws": [],
    # Sources of a collate function's draws, where samples draw nothing.
    "kinds": ["torch", "numpy", "random"],
    "info": False, "sampler": None, "key": "int", "group": "list", "batch_size": 2,
    "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "drop_last": False,
    "in_order": True, "generator": False, "collate": None, "layout": None, "kept": False,
    "init": None, "method": None, "method_object": False, "timeout": 0, "pin_memory": False,
    "shuffle": None, "error": None, "stop": False, "stateful": False, "context": False,
    "steps": ["epoch"],
}  # fmt: skip

STREAMS = {
    "stream": parts.Stream,
    "counted": parts.Counted,
    "iterator": parts.Steps,
    "state": parts.Stateful,
    "pipe": parts.pipe,
}
OWN_STREAMS = [name for name in STREAMS if name != "pipe"]
DATASETS = ["bulk", "tensor", "stack", "subset", "concat", *OWN_STREAMS]
OWN_SAMPLERS = ["own", "eager", "own batches", "eager batches"]
SAMPLERS = ["random", "random generator", "replacement", "subset", "weighted"]
ITEMS = [
    "tuple", "tensor", "double", "bool", "array", "numpy scalar", "int", "float", "str", "bytes",
    "dict", "named", "nested", "ragged", "none", "empty", "half", "mixed",
]  # fmt: skip
LAYOUTS = ["channels last", "transposed", "large"]
# Options that are arguments of the loader under the same name.
GIVEN = [
    "num_workers", "drop_last", "batch_size", "timeout", "pin_memory", "persistent_workers",
    "prefetch_factor", "in_order", "shuffle",
]  # fmt: skip
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

    @property
    def has_own_sampler(self):
        return self.sampler in OWN_SAMPLERS

    def fails(self, where):
        """Return the error if it is raised there, or None."""
        return self.error if self.error and self.error["where"] == where else None

    def drop(self, *names):
        for name in names:
            self.pop(name, None)


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

    maybe(0.6, "dataset", *DATASETS)
    maybe(0.03, "dataset", "pipe")
    maybe(0.55, "draws", ["torch"], ["numpy"], ["random"], ["torch", "numpy", "random"])
    maybe(0.3, "info", True)
    maybe(0.3, "generator", True)
    maybe(0.25, "collate", "same", "count", "set", "draw")
    maybe(0.25, "drop_last", True)
    if case.get("dataset") not in STREAMS:
        if maybe(0.55, "sampler", *OWN_SAMPLERS, *OWN_SAMPLERS, *SAMPLERS):
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
        where = ["sample"] * 3 + ["collate"] * 2 + ["init"] * bool(case["num_workers"])
        where += ["sampler", "iter"]
        at = rng.randrange(6)
        case["error"] = {"where": rng.choice(where), "at": at, "type": rng.choice([*parts.ERRORS])}
        maybe(0.4, "stop", True)
    steps = ["epoch"] * 6 + [f"break {rng.randrange(4)}"] * 3
    steps += ["len", "draw", "pickle", f"two {rng.randrange(4)}"]
    steps += [f"num_workers {rng.randrange(1, 4)}", "collate count", "generator", "forever 3"]
    case["steps"] = [rng.choice(steps) for _ in range(rng.randrange(1, 4))] + ["epoch"]
    if rng.random() < 0.25:
        case["steps"] = [f"resume {rng.randrange(5)}"]
    if case.get("method") in FRESH:
        case |= {"num_workers": min(case["num_workers"], 2), "steps": case["steps"][-2:]}
    # Often, the constructor or `iter` refuses these.
    if rng.random() < 0.04:
        odd = {
            "batch_size": None, "drop_last": True, "timeout": 1, "prefetch_factor": 0,
            "shuffle": True, "persistent_workers": True, "sampler": "own", "in_order": False,
            "num_workers": -1, "method": "thread", "init": "draw",
        }  # fmt: skip
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
        case.drop("draws", "info", "error", "init", "in_order")
        if case.collate in ("count", "draw"):
            case.drop("collate")
        case["steps"] = resume[:1]
    if case.context:
        case.drop("method", "method_object", *([] if case.num_workers > 0 else ["context"]))
    if case.dataset in ("tensor", "stack"):
        case.drop("item", "draws", "info")
    if case.fails("iter") and (case.dataset not in OWN_STREAMS or case.persistent_workers):
        # This kills a persistent worker of torch's.
        case.drop("error")
    if case.fails("sampler") and not case.has_own_sampler:
        case.drop("error")
    if case.fails("collate") and case.collate is None:
        case["collate"] = "draw"
    if case.layout and case.collate != "same":
        case["collate"] = "same" if resume else "draw"
    if case.fails("init") or case.fails("iter"):
        # torch's worker answers its first task with this error, and later ones with its own.
        case["stop"] = True
        case.drop("persistent_workers")
    if case.fails("sampler") and case.num_workers > 0:
        # A batch is lost: see `observe.alike`.
        case.drop("draws", "stop")
    if case.init == "dataset" and case.dataset not in ("map", "bulk", *OWN_STREAMS):
        case.drop("init")
    if case.is_unordered:
        # Which worker makes a batch, and which one comes first, depends on time.
        case.drop("draws", "info", "error", "collate", "layout", "init")
        steps = [step for step in case.steps if step in ("epoch", "len", "draw", "generator")]
        case["steps"] = steps or ["epoch"]
    left = case.stop or any(step.startswith(("break", "two")) for step in case.steps)
    if left and case.streams and case.persistent_workers and case.num_workers > 1:
        # When torch hears that a worker has ended, it asks the others for one more, if in time.
        case.drop("draws", "info", "collate", "layout", "init")
        case["steps"] = [step for step in case.steps if not step.startswith("collate")]
    if case.num_workers < 2:
        allowed = case.num_workers == 1
        case["steps"] = [step for step in case.steps if allowed or "num_workers" not in step]
    if not case.error:
        case.drop("stop", "error")
    if not case.has_own_sampler:
        case.drop("key", "stateful")
    if case.sampler not in OWN_SAMPLERS[2:]:
        case.drop("group")
    return Case({name: value for name, value in case.items() if value != DEFAULTS[name]})


def settle_for_threads(options):
    """Return a case without the options that threads lack.

    - How processes are started (`method`, `context`).
    - What a call leaves in the data set or a collate function (`calls`, `init` of "dataset"): they
      are not copied, so it is there for all workers, and for the trainer.
    - A data set's own tensors that the trainer writes to: samples may be these, no copies.
    - The global generators, which are the trainer's, and `get_worker_info`, which is None.
    - An IterableDataset in several workers.
    """
    case = settle(options)
    case.drop("method", "method_object", "context", "draws", "info", "init")
    case["kinds"] = []
    # It fails at a given number of calls.
    if case.fails("collate"):
        case.drop("error")
    if case.collate == "count":
        case.drop("collate")
    if case.streams and case.num_workers > 1:
        case["num_workers"] = 1
    other = ("collate count", *(("num_workers",) if case.streams else ()))
    case["steps"] = [step for step in case.steps if not step.startswith(other)]
    if case.dataset in ("tensor", "stack"):
        case["kept"] = True
    return settle(case)


def smaller(case):
    """Yield cases with an option or a step less, or with smaller numbers."""
    for name in sorted(case):
        yield settle({each: value for each, value in case.items() if each != name})
    for place in range(len(case.steps) if len(case.steps) > 1 else 0):
        yield settle({**case, "steps": case.steps[:place] + case.steps[place + 1 :]})
    for place, step in enumerate(case.steps):
        if step != "epoch":
            steps = [*case.steps[:place], "epoch", *case.steps[place + 1 :]]
            yield settle({**case, "steps": steps})
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
    items = parts.Items(case.item, case.draws, case.info, case.error)
    length, keyed = case.length, case.has_own_sampler
    if case.streams:
        return STREAMS[case.dataset](length, items)
    if case.dataset == "tensor":
        pairs, thirds = torch.arange(length * 2).reshape(length, 2), torch.arange(length) / 3
        return data.TensorDataset(pairs, thirds)
    if case.dataset == "stack":
        images = data.TensorDataset(torch.arange(length))
        return data.StackDataset(image=images, label=list(range(length)))
    if case.dataset == "bulk":
        return parts.Bulk(length, items, keyed)
    whole = parts.Map(length, items, keyed)
    if case.dataset == "subset":
        return data.Subset(whole, [length - 1 - number for number in range(length)])
    if case.dataset == "concat":
        return data.ConcatDataset([parts.Map(2, items, keyed), parts.Bulk(length, items, keyed)])
    return whole


def sampler(case, length):
    if case.has_own_sampler:
        group = case.group if "batches" in case.sampler else ""
        kind = parts.StatefulSampler if case.stateful else parts.Sampler
        return kind(length, case.key, "eager" in case.sampler, case.fails("sampler"), group)
    every, seeded = range(length), torch.Generator().manual_seed(5)
    return {
        "random": lambda: data.RandomSampler(every),
        "random generator": lambda: data.RandomSampler(every, generator=seeded),
        "replacement": lambda: data.RandomSampler(every, replacement=True, num_samples=length + 2),
        "subset": lambda: data.SubsetRandomSampler(range(0, length, 2)),
        "weighted": lambda: data.WeightedRandomSampler([0.1 + k for k in every], length + 1),
    }[case.sampler]()


def loader(case, cls):
    samples = dataset(case)
    options = {name: getattr(case, name) for name in GIVEN}
    if case.sampler is not None:
        made = sampler(case, 6 if case.streams else len(samples))
        if "batches" in case.sampler:
            options["batch_sampler"] = made
            for name in ("batch_size", "drop_last", "shuffle"):
                del options[name]
        else:
            options["sampler"] = made
    if case.generator:
        options["generator"] = torch.Generator().manual_seed(7)
    if case.collate:
        draws, error = case.draws or case.kinds, case.fails("collate")
        options["collate_fn"] = parts.Collate(case.collate, draws, error, case.layout)
    if case.init or case.fails("init"):
        options["worker_init_fn"] = parts.Init(case.init, case.fails("init"))
    if case.method is not None:
        options["multiprocessing_context"] = case.method
        if case.method_object and case.method in multiprocessing.get_all_start_methods():
            options["multiprocessing_context"] = multiprocessing.get_context(case.method)
    if case.context:
        options["multiprocessing_context"] = parts.Context()
    return cls(samples, **options)
