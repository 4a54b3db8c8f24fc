"""``num_workers='auto'`` of a loader: each `iter` asks the epoch before it.

Not in the middle of an epoch: torch's workers have a ring each, a share of the keys, and a number
of workers that `get_worker_info` shows. Between two epochs other workers begin in any case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cseq.adapters.torch import names
from cseq.adapters.torch.batches import POSITIONS
from cseq.adapters.torch.options import defaults
from cseq.adapters.torch.stateful import is_stateful
from cseq.arguments import Size, is_auto, workers_of_auto
from cseq.tuning import Tuner, log_change

if TYPE_CHECKING:
    from cseq.stats import Stats

__all__ = ["check", "choose", "take"]

AT = POSITIONS.index("num_workers")


def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Tuner | None]:
    """Return a DataLoader's arguments with a number in place of 'auto', and what changes that."""
    given = args[AT] if len(args) > AT else kwargs.get("num_workers", 0)
    if not is_auto("num_workers", given):
        return args, kwargs, None
    first = workers_of_auto()[0]
    if len(args) > AT:
        args = (*args[:AT], first, *args[AT + 1 :])
    else:
        kwargs = kwargs | {"num_workers": first}
    return args, kwargs, Tuner((True, False))


def check(loader: Any, rng: str | None) -> None:
    """Refuse 'auto' where the number of workers can be seen in the batches, or cannot change."""
    said, dataset = "num_workers='auto'", loader.dataset
    if loader._dataset_kind == names.ITERABLE:
        raise ValueError(
            f"{said} beside the IterableDataset dataset={dataset!r}, which shares itself out among "
            "its workers: other workers, other batches; give a number"
        )
    if (rng or defaults.rng) != "batch":
        raise ValueError(
            f"{said} with rng={rng or defaults.rng!r}: what the workers draw depends on how many "
            "there are; give rng='batch', or a number"
        )
    if is_stateful(dataset) and loader.snapshot_every_n_steps:
        raise ValueError(
            f"{said} beside dataset={dataset!r}, which has state_dict(): each worker has a state "
            "of its own; give a number, or snapshot_every_n_steps=0"
        )
    if loader.persistent_workers:
        raise ValueError(
            f"{said} with persistent_workers=True: workers are chosen when they are started, for "
            "each iter; leave it out, or give a number"
        )


def choose(tuner: Tuner, stats: Stats, now: int) -> int:
    """Return how many workers the next epoch is to have, after one with these figures."""
    window = replace(stats.window(), start=0.0)  # more workers would not be there sooner
    if not tuner.is_enough(window, seconds=0.0):  # short epochs, too, say something
        return now
    size, most = Size(now, 0), Size(workers_of_auto()[1], 0)
    decision = tuner.look(window, size, most)
    if decision is None:
        return now
    log_change(size, decision.size, decision.why)
    return decision.size.num_workers
