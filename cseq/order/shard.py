"""Which rank this process is, and of how many.

``shard='auto'`` asks the functions of `SOURCES` one after the other; the first answer that is not
None counts. It holds for a manager's life: a different answer later is an error, because some ranks
would silently go through the same samples. Where ranks share a model, some need equal batches: then
'auto' is an error, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq.check import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Literal, Protocol, TypeAlias

    from cseq.order.base import Order

    class Group(Protocol):
        """A torch.distributed.ProcessGroup."""

        def rank(self) -> int: ...
        def size(self) -> int: ...

    class Mesh(Protocol):
        """A torch.distributed.DeviceMesh."""

        def get_coordinate(self) -> Sequence[int] | None: ...
        def size(self) -> int: ...

    Given: TypeAlias = tuple[int, int] | Literal["auto"] | Group | Mesh | None

__all__ = ["SOURCES", "Shard", "agree", "check_shard", "find_shard", "model_parallel", "resolve"]

log = logging.getLogger("cseq")

FORMS = "(rank, world_size), a process group, a DeviceMesh of one dimension, 'auto' or None"
# A dimension of a mesh with one of these words in its name divides the batches.
DATA = {"dp", "ddp", "fsdp", "hsdp", "efsdp", "data", "batch", "replicate", "replica", "shard"}
HALVES = {"replicate", "replica", "shard"}  # of two such dimensions
MEGATRON = {  # which has groups, and no mesh
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
}


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


def check_shard(shard: object) -> Shard | None:
    """Check the argument `shard`; None if it is 'auto', which is for `resolve`.

    Raises
    ------
    TypeError, ValueError
        It is neither None, a pair, a group, a mesh nor 'auto'; this rank is not in [0, world_size),
        or not in the group; or the mesh has several dimensions.
    """
    if shard is None:
        return ALONE
    if isinstance(shard, str):
        if shard != "auto":
            raise ValueError(f"shard={shard!r} is unknown; give {FORMS}")
        return None
    if callable(getattr(shard, "get_coordinate", None)):
        return _of_mesh(shard)
    if callable(getattr(shard, "rank", None)) and callable(getattr(shard, "size", None)):
        group: Any = shard
        return _member(shard, group.rank(), group.size())
    if shard is getattr(getattr(_torch(), "GroupMember", None), "NON_GROUP_MEMBER", ALONE):
        return _member(shard, -1, 0)
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(f"shard={shard!r} is not a pair; give {FORMS}")
    rank, ranks = integer("shard[0]", shard[0], least=0), integer("shard[1]", shard[1])
    if rank >= ranks:
        raise ValueError(
            f"shard={shard!r}: rank {rank} is not below {ranks}, the number of ranks; ranks count "
            f"from 0, so give a rank of at most {ranks - 1}"
        )
    return Shard(rank, ranks, "the argument shard")


def _of_mesh(mesh: Any) -> Shard:
    """Return the place on a mesh of one dimension."""
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if mesh.ndim != 1:
        raise ValueError(
            f"shard={mesh!r} has {mesh.ndim} dimensions; give what divides the batches, as one: "
            f"{_remedy(names)}"
        )
    return _member(mesh, -1 if coordinate is None else coordinate[0], mesh.size())


def _member(group: object, rank: int, ranks: int) -> Shard:
    """Return the place in a group."""
    if rank < 0:
        raise ValueError(
            f"shard={group!r} is a group or mesh that this process is not in: it has no part of "
            "its batches; make the loader on the ranks of the group only, or give another one"
        )
    return Shard(rank, ranks, "the argument shard")


def _remedy(names: Iterable[str]) -> str:
    """Say which argument takes the dimensions of a mesh that divide the batches."""
    data = [name for name in names if _words(name) <= DATA | {"parallel"}]
    if "dp" in data and all(name.startswith("dp") for name in data):
        data = ["dp"]  # of which others are parts
    if not data:
        return 'shard=mesh["dp"], where mesh_dim_names= names a dimension "dp"'
    listed = ", ".join(f'"{name}"' for name in data)
    return f"shard=mesh[{listed}]" + ("._flatten()" if len(data) > 1 else "")


def resolve() -> Shard:
    """Ask `SOURCES`.

    Raises
    ------
    ValueError
        Ranks share a model, or a launcher's variables are no rank and number of ranks.
    """
    if shared := model_parallel():
        listed = ", ".join(f"{name}={size}" for name, size in shared)
        raise ValueError(
            f"shard='auto' finds a mesh of ranks with {listed}: ranks that share a model need the "
            f"same batches; give what divides them, {_remedy(name for name, _ in shared)}, or "
            "shard=torch.distributed.group.WORLD if each rank needs batches of its own"
        )
    return find_shard()


def find_shard() -> Shard:
    """Ask `SOURCES`, whatever the ranks share."""
    for ask in SOURCES:
        shard = ask()
        if shard is not None:
            return shard
    return ALONE


def model_parallel() -> list[tuple[str, int]]:
    """Return the dimensions of a mesh of ranks, and their sizes, if ranks seem to share a model.

    That is where a dimension has another name than those of data, or the only one of data leaves
    ranks out. torch lists no meshes: from 2.6 on, the process group of each dimension says what it
    is; before, there is a list of meshes that others were cut from. A dimension of all ranks has
    the default group, which says nothing: a mesh of that alone is not found.
    """
    torch = _torch()
    if torch is None:
        return []
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    sizes: dict[str, int] = {}
    for group in [*getattr(world, "pg_map", ())]:
        text = getattr(group, "group_desc", "")
        name = text[5:] if text.startswith("mesh_") else MEGATRON.get(text, "default")
        if name != "default":
            sizes[name] = max(sizes.get(name, 0), group.size())
    listed = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    for mesh in [*getattr(listed, "child_to_root_mapping", {}).values()]:
        sizes |= zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)
    data = [name for name in sizes if DATA & _words(name)]
    is_part = len(data) == 1 and not HALVES & _words(data[0])
    is_shared = any(size > 1 for name, size in sizes.items() if name not in data)
    if is_shared or (is_part and sizes[data[0]] < torch.get_world_size()):
        return [*sizes.items()]
    return []


def _words(name: str) -> set[str]:
    """Return the words in the name of a dimension of a mesh."""
    return {*name.lower().split("_")}


def agree(earlier: Shard | None) -> Shard:
    """Ask `SOURCES`, and compare with the earlier answer.

    Parameters
    ----------
    earlier : Shard or None
        What was resolved earlier.

    Raises
    ------
    ValueError
        The answer differs, or a launcher's variables are no rank and number of ranks.
    """
    now = resolve()
    if earlier is None:
        if not now.source:
            warn_alone()
        return now
    if now.source and now[:2] != earlier[:2]:
        raise ValueError(
            f"shard='auto' was resolved to {earlier}, and is now {now}: make the process group "
            "before the manager is started and before its len() is asked, or give "
            "shard=(rank, world_size)"
        )
    return earlier


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


def _torch() -> Any:
    """Return torch.distributed, if it is imported and has a process group."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _torch_group() -> Shard | None:
    """Ask torch's default process group, if there is one."""
    torch = _torch()
    if torch is None:
        return None
    return Shard(torch.get_rank(), torch.get_world_size(), "torch's process group")


def _jax() -> Shard | None:
    """Ask JAX, if its processes are connected or it has a backend: asking would make one."""
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is not None:
        return Shard(state.process_id, state.num_processes, "JAX's processes")
    bridge, jax = sys.modules.get("jax._src.xla_bridge"), sys.modules.get("jax")
    if jax is None or not getattr(bridge, "backends_are_initialized", lambda: False)():
        return None
    ranks = jax.process_count()
    return Shard(jax.process_index(), ranks, "JAX's processes") if ranks > 1 else None


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
        ranks = integer("world_size", int(size))
        return Shard(
            integer("rank", int(rank), least=0, most=ranks - 1), ranks, f"{rank_name}, {size_name}"
        )
    except ValueError as error:
        raise ValueError(
            f"shard='auto' finds {rank_name}={rank!r} and {size_name}={size!r} in the environment; "
            "set them as torchrun does, or give shard=(rank, world_size)"
        ) from error


# Asked in this order. Launchers run inside one another: torchrun and mpirun inside of Slurm.
SOURCES: list[Callable[[], Shard | None]] = [
    _ray_train,
    _torch_group,
    _jax,
    _torchrun,
    _lightning,
    _open_mpi,
    _pmi,
    _slurm,
    _half,
]
