"""Random settings of accelerate: a resumed run, compared with the uninterrupted one.

``accelerate_legs.py rest FIRST COUNT`` compares the batches of both, including draws.
``accelerate_legs.py save|load FOLDER FIRST COUNT`` saves a state in each of some epochs, and
continues from it on the current number of ranks.
"""

import json
import pickle
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchdata.stateful_dataloader

import cseq
from cseq.adapters.torch import defaults

torchdata.stateful_dataloader.StatefulDataLoader = cseq.StatefulDataLoader
defaults.rng = "batch"

from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402

EPOCHS = 4


class Augmented(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


def prepared(length, config, **options):
    """Make a loader, prepared by accelerate."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, **config)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    is_order, data = options.pop("order", False), Augmented(length)
    torch.manual_seed(1234 + (accelerator.process_index if is_order else 0))
    seeded, loader = options.pop("seeded"), torch.utils.data.DataLoader
    if is_order:
        options["sampler"] = cseq.Shuffled() if options.pop("shuffle") else cseq.Sequential()
        loader = cseq.DataLoader
    elif seeded:
        options["generator"] = torch.Generator().manual_seed(5)
    return accelerator.prepare(loader(data, **options))


def gathered(value):
    """Return the items of all ranks."""
    found = [value]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def rest(seed):
    """Return the faults in the rest of a run.

    Two faults are accelerate's own, and are avoided: a dispatcher pads with its first batch, and
    with `split_batches` it makes one batch again.
    """
    chosen = random.Random(seed)
    dispatch = chosen.random() < 0.3
    config = {
        "use_seedable_sampler": chosen.random() < 0.5,
        "split_batches": not dispatch and chosen.random() < 0.3,
        "even_batches": chosen.random() < 0.7,
        "dispatch_batches": dispatch or None,
    }
    workers = chosen.choice([0, 0, 2])
    options = {
        "batch_size": chosen.choice([2, 4]),
        "shuffle": chosen.random() < 0.8,
        "num_workers": workers,
        "persistent_workers": workers > 0 and chosen.random() < 0.3,
        "seeded": chosen.random() < 0.5,
        "drop_last": dispatch or chosen.random() < 0.3,
    }
    length, tells = chosen.randint(9, 70), chosen.random() < 0.5
    stop = chosen.randint(0, 2), chosen.randint(0, 12)
    options["order"] = chosen.random() < 0.3
    loader = prepared(length, config, **options)
    expected = []
    state = None
    for epoch in range(EPOCHS):
        if tells:
            loader.set_epoch(epoch)
        for step, batch in enumerate(loader):
            expected.append(batch.tolist())
            if (epoch, step) == stop:
                states = loader.state_dict(), torch.get_rng_state()
                state, generator = pickle.loads(pickle.dumps(states))
                expected.clear()
    states = gathered(state)
    if None in states:
        return None
    loader = prepared(length, config, **options)
    # Ranks that seed themselves have their own draws.
    loader.load_state_dict(state if options["order"] and not dispatch else states[0])
    torch.set_rng_state(generator)
    found = []
    for epoch in range(loader.base_dataloader.epoch, EPOCHS):
        if tells:
            loader.set_epoch(epoch)
        found += [batch.tolist() for batch in loader]
    return None if found == expected else f"{seed}: {length}, {config}, {options}, {tells}, {stop}"


def worlds(mode, folder, seed):
    """Save a state and the batches before it, or continue from it on another number of ranks."""
    chosen = random.Random(seed)
    length, taken, size = chosen.randint(30, 200), chosen.randint(1, 2), 12
    config = {
        "split_batches": chosen.random() < 0.4,
        "use_seedable_sampler": chosen.random() < 0.5,
        "even_batches": chosen.random() < 0.5,
    }
    loader = prepared(length, config, batch_size=size, shuffle=True, seeded=True)
    file = Path(folder, f"{seed}.pickle")
    mine = []
    if mode == "save":
        for number, batch in enumerate(loader, 1):
            mine += batch[:, 0].tolist()
            if number == taken:
                break
        every = gathered(mine)
        if not dist.is_initialized() or dist.get_rank() == 0:
            file.write_bytes(pickle.dumps((loader.state_dict(), every)))
        return None
    state, before = pickle.loads(file.read_bytes())
    loader.load_state_dict(state)
    for batch in loader:
        mine += batch[:, 0].tolist()
    every = gathered(mine)
    seen = [sample for part in (*before, *every) for sample in part]
    is_whole = set(seen) == set(range(length)) and len(seen) < length + size * len(every)
    return None if is_whole else f"{seed}: {sorted(seen)}"


def main(mode, *arguments):
    """Print the faults as JSON, on rank 0."""
    *folder, first, count = arguments
    seeds = range(int(first), int(first) + int(count))
    if mode == "rest":
        wrong = [text for seed in seeds for text in gathered(rest(seed)) if text]
    else:
        wrong = [text for seed in seeds if (text := worlds(mode, *folder, seed))]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(wrong))
    if dist.is_initialized():
        # Otherwise gloo's threads may abort the process at its end.
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
