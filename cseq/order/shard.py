"""Detects this process's rank and the number of ranks.

``shard='auto'`` queries Ray Train, torch, JAX and the launcher's environment variables, in that
order. A manager keeps the first result and raises an error if a later one differs, because ranks
might otherwise process the same samples. 'auto' also rejects ranks that share a model, because
those ranks need identical batches.
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
    from collections.abc import Iterable, Sequence
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

log = logging.getLogger("cseq")

FORMS = "(rank, world_size), a process group, a one-dimensional DeviceMesh, 'auto' or None"
# Words in the names of mesh dimensions that divide the batches.
DATA = {"dp", "ddp", "fsdp", "hsdp", "efsdp", "data", "batch", "replicate", "replica", "shard"}
# Words for mesh dimensions that divide the batches only as a pair.
HALVES = {"replicate", "replica", "shard"}
# Megatron uses process groups instead of a mesh.
MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
}
# Set by torchrun and others, by Lightning (which does not set RANK), by Open MPI, by MPICH and
# Intel MPI, and by srun. Slurm comes last, because torchrun and mpirun may run inside a Slurm job.
# SLURM_NTASKS is not used, because it is also set in batch scripts.
VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class Shard(NamedTuple):
    """A rank and the number of ranks.

    Attributes
    ----------
    rank, world_size : int
    source : str
        Where the values come from. If empty, this process gets all samples.
    """

    rank: int
    world_size: int
    source: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} ({self.source or 'the default'})"

    def check_drawn(self, order: Order) -> None:
        """Raise ValueError if ranks that draw their own seeds would use different orders."""
        if self.world_size > 1 and order.is_seeded:
            raise ValueError(
                f"{self} needs a seed, because ranks that draw their own seeds would use different "
                "orders; pass the same seed on all ranks"
            )


ALONE = Shard(0, 1, "")


def check_shard(shard: object) -> Shard | None:
    """Validate the `shard` argument. Return None for 'auto'."""
    if shard is None:
        return ALONE
    if isinstance(shard, str):
        if shard != "auto":
            raise ValueError(f"shard={shard!r} is unknown; pass {FORMS}")
        return None
    group: Any = shard
    rank: int
    if callable(getattr(shard, "get_coordinate", None)):
        if group.ndim != 1:
            raise ValueError(
                f"shard={shard!r} has {group.ndim} dimensions; pass the dimension that divides the "
                f"batches, {_remedy(group.mesh_dim_names or ())}"
            )
        rank, ranks = (group.get_coordinate() or [-1])[0], int(group.size())
    elif callable(getattr(shard, "rank", None)) and callable(getattr(shard, "size", None)):
        rank, ranks = group.rank(), int(group.size())
    elif shard is getattr(getattr(_torch(), "GroupMember", None), "NON_GROUP_MEMBER", ALONE):
        rank, ranks = -1, 0
    elif not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(f"shard={shard!r} is not a pair; pass {FORMS}")
    else:
        rank, ranks = integer("shard[0]", shard[0], least=0), integer("shard[1]", shard[1])
        if rank >= ranks:
            raise ValueError(
                f"shard={shard!r} has rank {rank}, but the {ranks} ranks are numbered from 0; pass "
                f"a rank of at most {ranks - 1}"
            )
    if rank < 0:
        raise ValueError(
            f"shard={shard!r} is a group or mesh that does not include this process; create the "
            "loader only on ranks in the group, or pass a group that includes this process"
        )
    return Shard(rank, ranks, "the argument shard")


def _remedy(names: Iterable[str]) -> str:
    """Suggest a `shard` argument for the given mesh dimensions."""
    data = [name for name in names if _words(name) <= DATA | {"parallel"}]
    # Dimensions that start with "dp_" are parts of "dp".
    if "dp" in data and all(name.startswith("dp") for name in data):
        data = ["dp"]
    if not data:
        return 'shard=mesh["dp"], with "dp" in mesh_dim_names'
    listed = ", ".join(f'"{name}"' for name in data)
    return f"shard=mesh[{listed}]" + ("._flatten()" if len(data) > 1 else "")


def resolve() -> Shard:
    """Find the shard for 'auto'. Raise ValueError if ranks share a model."""
    if shared := model_parallel():
        listed = ", ".join(f"{name}={size}" for name, size in shared)
        raise ValueError(
            f"shard='auto' found a device mesh with {listed}, but ranks that share a model need "
            "the same batches; pass the dimension that divides the batches, "
            f"{_remedy(name for name, _ in shared)}, or pass "
            "shard=torch.distributed.group.WORLD if each rank needs its own batches"
        )
    return find_shard()


def find_shard() -> Shard:
    """Find the shard, even if ranks share a model."""
    return _ray_train() or _torch_group() or _jax() or _launched() or ALONE


def model_parallel() -> list[tuple[str, int]]:
    """Return the mesh dimensions and sizes if ranks seem to share a model.

    This is assumed if a dimension larger than 1 has no word from `DATA` in its name, or if the only
    data dimension does not include all ranks.

    torch has no list of meshes. Since torch 2.6, the process groups of meshes have descriptions.
    Earlier versions keep track of sliced meshes. A one-dimensional mesh of all ranks is not
    detected, because it uses the default group.
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
    return {*name.lower().split("_")}


def agree(earlier: Shard | None) -> Shard:
    """Resolve 'auto'. Raise ValueError if the result differs from an earlier one."""
    now = resolve()
    if earlier is None:
        if not now.source:
            warn_alone()
        return now
    if now.source and now[:2] != earlier[:2]:
        raise ValueError(
            f"shard='auto' was {earlier} earlier but is now {now}; create the process group before "
            "you start the manager or call len() on it, or pass shard=(rank, world_size)"
        )
    return earlier


@functools.cache
def warn_alone() -> None:
    """Log once per process that no other ranks were found."""
    log.warning(
        "shard='auto' found neither a process group nor a launcher's environment variables, so "
        "this process gets all samples"
    )


def _ray_train() -> Shard | None:
    """Query Ray Train. Return None unless it has several workers."""
    train = sys.modules.get("ray.train")
    # RuntimeError is raised outside of workers, and DeprecationWarning in Tune trials.
    with contextlib.suppress(RuntimeError, DeprecationWarning):
        context = train.get_context() if train is not None else None
        if context is not None and (context.get_world_size() or 1) > 1:
            return Shard(context.get_world_rank(), context.get_world_size(), "Ray Train")
    return None


def _torch() -> Any:
    """Return torch.distributed if torch is imported and a process group exists."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _torch_group() -> Shard | None:
    torch = _torch()
    if torch is None:
        return None
    return Shard(torch.get_rank(), torch.get_world_size(), "torch's process group")


def _jax() -> Shard | None:
    """Query JAX if its processes are connected or a backend exists.

    In any other state, the query would create a backend.
    """
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is not None:
        return Shard(state.process_id, state.num_processes, "JAX's processes")
    bridge, jax = sys.modules.get("jax._src.xla_bridge"), sys.modules.get("jax")
    if jax is None or not getattr(bridge, "backends_are_initialized", lambda: False)():
        return None
    ranks = jax.process_count()
    return Shard(jax.process_index(), ranks, "JAX's processes") if ranks > 1 else None


def _launched() -> Shard | None:
    """Read the first pair of `VARIABLES` that is set."""
    said = os.environ
    for names in VARIABLES:
        # LOCAL_RANK is the rank only on the first node.
        if names[0] == "LOCAL_RANK" and said.get("NODE_RANK") != "0":
            continue
        if not {*names} <= said.keys():
            continue
        rank, size = (said[name] for name in names)
        try:
            ranks = integer("world_size", int(size))
            return Shard(integer("rank", int(rank), 0, ranks - 1), ranks, ", ".join(names))
        except ValueError as error:
            raise ValueError(
                f"shard='auto' found {names[0]}={rank!r} and {names[1]}={size!r} in the "
                "environment, which are not a valid rank and number of ranks; set them as torchrun "
                "does, or pass shard=(rank, world_size)"
            ) from error
    if said.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"shard='auto' found WORLD_SIZE={said['WORLD_SIZE']!r} in the environment, but no "
            "rank; set RANK as torchrun does, create the process group first, or pass "
            "shard=(rank, world_size)"
        )
    return None
