"""Which rank this process is, and of how many.

``shard='auto'`` asks the functions of `PLACES` one after the other; the first answer that is not
None counts. It holds for a manager's life: a different answer later is an error, because some ranks
would silently go through the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from cseq.check import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.order.base import Order

__all__ = ["PLACES", "Shard", "agree", "given", "resolve"]

log = logging.getLogger("cseq")


class Shard(NamedTuple):
    """One rank of several.

    Attributes
    ----------
    rank, world_size : int
    source : str
        Where they come from; empty: nothing was found, and this process gets all samples.
    """

    rank: int
    world_size: int
    source: str

    def __str__(self) -> str:
        """Return it in words, for messages."""
        return f"rank {self.rank} of {self.world_size} ({self.source or 'nothing said otherwise'})"

    def check_drawn(self, order: Order) -> None:
        """Raise ValueError if an order depends on a seed that each rank has drawn for itself."""
        if self.world_size > 1 and order.is_seeded:
            raise ValueError(
                f"{self} needs a seed: ranks that draw their own would go through different "
                "orders; give all of them the same one"
            )


ALONE = Shard(0, 1, "")


def given(shard: object) -> Shard | None:
    """Check the argument `shard`; None if it is 'auto', which is for `resolve`.

    Raises
    ------
    TypeError, ValueError
        It is neither None, a pair nor 'auto', or the rank is not in [0, world_size).
    """
    if shard is None:
        return ALONE
    if isinstance(shard, str):
        if shard != "auto":
            raise ValueError(f"shard={shard!r} is unknown; give (rank, world_size), 'auto' or None")
        return None
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(f"shard={shard!r} is not a pair; give (rank, world_size), 'auto' or None")
    rank, ranks = count("shard[0]", shard[0], least=0), count("shard[1]", shard[1])
    if rank >= ranks:
        raise ValueError(
            f"shard={shard!r}: rank {rank} is not below {ranks}, the number of ranks; ranks count "
            f"from 0, so give a rank of at most {ranks - 1}"
        )
    return Shard(rank, ranks, "the argument shard")


def resolve() -> Shard:
    """Ask `PLACES`.

    Raises
    ------
    ValueError
        A launcher's variables are no rank and number of ranks.
    """
    for place in PLACES:
        found = place()
        if found is not None:
            return found
    return ALONE


def agree(known: Shard | None) -> Shard:
    """Ask `PLACES`, and compare with the earlier answer.

    Parameters
    ----------
    known : Shard or None
        What was resolved earlier.

    Raises
    ------
    ValueError
        The answer differs, or a launcher's variables are no rank and number of ranks.
    """
    now = resolve()
    if known is None:
        if not now.source:
            warn_alone()
        return now
    if now.source and now[:2] != known[:2]:
        raise ValueError(
            f"shard='auto' was resolved to {known}, and is now {now}: make the process group "
            "before the manager is started and before its len() is asked, or give "
            "shard=(rank, world_size)"
        )
    return known


@functools.cache
def warn_alone() -> None:
    """Log that there is only one rank, once in the life of this process."""
    log.warning(
        "shard='auto' finds neither a process group nor a launcher's variables: this process gets "
        "all samples"
    )


def _ray_train() -> Shard | None:
    """Ask Ray Train, in one of several workers of it; elsewhere it raises, or says 1."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    with contextlib.suppress(RuntimeError, DeprecationWarning):  # the latter in a trial of Tune
        context = train.get_context()
        rank, ranks = context.get_world_rank(), context.get_world_size()
        return Shard(rank, ranks, "Ray Train") if ranks is not None and ranks > 1 else None
    return None


def _torch_group() -> Shard | None:
    """Ask torch's default process group, if there is one."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Shard(distributed.get_rank(), distributed.get_world_size(), "torch's process group")


def _torchrun() -> Shard | None:
    """Read what torchrun, and most launchers after it, set."""
    return _variables("RANK", "WORLD_SIZE")


def _lightning() -> Shard | None:
    """Read what Lightning's own launcher sets: it gives no RANK."""
    if os.environ.get("NODE_RANK", "") != "0":
        return None  # the variables do not say how many ranks other nodes have
    return _variables("LOCAL_RANK", "WORLD_SIZE")


def _open_mpi() -> Shard | None:
    """Read what Open MPI's mpirun sets."""
    return _variables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def _pmi() -> Shard | None:
    """Read what MPICH's and Intel MPI's mpiexec set."""
    return _variables("PMI_RANK", "PMI_SIZE")


def _slurm() -> Shard | None:
    """Read what srun sets.

    Not SLURM_NTASKS: a batch script has it, too, and starts one process without srun, not several.
    """
    return _variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _half() -> Shard | None:
    """Refuse a WORLD_SIZE for which there is no rank."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ValueError(
            f"shard='auto' finds WORLD_SIZE={size!r} in the environment, but no rank; set RANK as "
            "torchrun does, make the process group first, or give shard=(rank, world_size)"
        )
    return None


def _variables(rank_name: str, size_name: str) -> Shard | None:
    """Read a rank and a number of ranks from the environment, if both are there."""
    rank, size = os.environ.get(rank_name), os.environ.get(size_name)
    if rank is None or size is None:
        return None
    try:
        ranks = count("world_size", int(size))
        return Shard(
            count("rank", int(rank), least=0, most=ranks - 1), ranks, f"{rank_name}, {size_name}"
        )
    except ValueError as error:
        raise ValueError(
            f"shard='auto' finds {rank_name}={rank!r} and {size_name}={size!r} in the environment; "
            "set them as torchrun does, or give shard=(rank, world_size)"
        ) from error


# Asked in this order. Launchers run inside one another: torchrun and mpirun inside of Slurm.
PLACES: list[Callable[[], Shard | None]] = [
    _ray_train,
    _torch_group,
    _torchrun,
    _lightning,
    _open_mpi,
    _pmi,
    _slurm,
    _half,
]
