"""A process's rank: given, from torch, from launchers; and contradictions."""

import sys
import types

import numpy as np
import pytest
from indexers import Indices1

import cseq
from cseq.order import shard

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip


def shard_of(value):
    """Resolve the argument."""
    return (shard.check_shard(value) or shard.resolve())[:2]


def environment(monkeypatch, **values):
    """Set only these of all launchers' variables, without torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for key in VARIABLES:
        monkeypatch.delenv(key, raising=False)
    for key, value in values.items():
        monkeypatch.setenv(key, value)


def process_group(monkeypatch, *, initialised):
    """Install a torch that is, or is not, rank 2 of 3."""
    distributed = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: initialised,
        get_rank=lambda: 2, get_world_size=lambda: 3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed))


class Group:
    """Has the methods of torch's process group, and a description of its purpose."""

    def __init__(self, rank, size, text="undefined"):
        self.rank, self.size, self.group_desc = (lambda: rank), (lambda: size), text


class Mesh:
    """Has the methods of torch's DeviceMesh."""

    def __init__(self, shape, place, *names):
        self.mesh, self.ndim, self.mesh_dim_names = np.empty(shape), len(shape), names or None
        self.get_coordinate, self.size = (lambda: place), (lambda: self.mesh.size)


def test_shard_given():
    """None is everything; a pair is unchanged; a group or a mesh of one dimension has the rank."""
    assert shard_of(None) == (0, 1)
    assert shard_of((1, 3)) == (1, 3)
    assert shard_of([np.int64(0), np.uint8(1)]) == (0, 1)
    assert shard_of(Group(2, 3)) == (2, 3)
    assert shard_of(Mesh([4], [1])) == (1, 4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((2, 2), r"shard=\(2, 2\) has rank 2, but the 2 ranks .* from 0; .* most 1"),
        (Group(-1, 3), "is a group or mesh that does not include this process"),
        (Mesh([4], None), "is a group or mesh that does not include this process"),
        (Mesh([2, 2], None), r'2 dimensions; .*, shard=mesh\["dp"\], with "dp" in mesh_dim_names'),
        (Mesh([2, 2], [0, 1], "batch", "tp"), r'the batches, shard=mesh\["batch"\]$'),
        (Mesh([2, 2, 1], [0, 1, 0], "dp", "fsdp", "tp"),
         r'the batches, shard=mesh\["dp", "fsdp"\]\._flatten\(\)$'),
        (Mesh([2, 1, 1, 2], [0, 1, 0, 0], "dp", "dp_shard", "cp", "dp_shard_cp"),
         r'the batches, shard=mesh\["dp"\]$'),
        (Mesh([2, 2, 1], [0, 1, 0], "dp_replicate", "dp_shard", "cp"),
         r'the batches, shard=mesh\["dp_replicate", "dp_shard"\]\._flatten\(\)$'),
    ],
)  # fmt: skip
def test_shard_of_no_rank(value, text):
    """A rank outside of the group, and a mesh of several dimensions, are errors."""
    with pytest.raises(ValueError, match=text):
        shard_of(value)


def ray_train(monkeypatch, ranks):
    """Install a ray.train that is rank 1 of some, or that says it is not in a worker."""

    def get_context():
        if ranks is None:
            raise RuntimeError("this is no worker")
        return types.SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: ranks)

    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=get_context))


def test_shard_auto_from_ray_train(monkeypatch):
    """'auto' asks Ray Train first; outside of its workers, it goes on to others."""
    environment(monkeypatch, RANK="3", WORLD_SIZE="4")
    process_group(monkeypatch, initialised=True)
    ray_train(monkeypatch, 5)
    assert shard_of("auto") == (1, 5)
    ray_train(monkeypatch, None)
    assert shard_of("auto") == (2, 3)
    ray_train(monkeypatch, 1)
    assert shard_of("auto") == (2, 3)


def groups(monkeypatch, *groups, meshes=()):
    """Install a torch that is rank 2 of 3 with these groups; or with these meshes, before 2.6."""
    process_group(monkeypatch, initialised=True)
    world = types.SimpleNamespace(pg_map=dict.fromkeys([Group(2, 3, "default_pg"), *groups]))
    listed = types.SimpleNamespace(child_to_root_mapping=dict(enumerate(meshes)))
    for name, members in {
        "distributed_c10d": {"_world": world}, "device_mesh": {"_mesh_resources": listed}
    }.items():  # fmt: skip
        module = types.SimpleNamespace(**members)
        monkeypatch.setitem(sys.modules, f"torch.distributed.{name}", module)


def test_shard_auto_where_ranks_share_a_model(monkeypatch):
    """It is an error if torch, or Megatron, has a dimension that does not divide data."""
    environment(monkeypatch)
    fine = Group(0, 1, "mesh_tp"), Group(0, 3, "mesh_default"), Group(0, 2, "a checkpoint's")
    groups(monkeypatch, *fine, Group(0, 1, "CONTEXT_PARALLEL_GROUP"))
    assert shard_of("auto") == (2, 3)
    for shared, text in {
        Group(1, 3, "mesh_tp"): "with tp=3, but",
        Group(1, 3, "TENSOR_MODEL_PARALLEL_GROUP"): "with tp=1, tensor=3, but",
        Group(0, 1, "mesh_batch"): "with tp=1, batch=1, but",
    }.items():
        groups(monkeypatch, *fine, shared)
        with pytest.raises(ValueError, match=text):
            shard_of("auto")
    groups(monkeypatch, *fine, meshes=(Mesh([1, 3], [0, 2], "replicate", "shard"),))
    assert shard_of("auto") == (2, 3)
    groups(monkeypatch, *fine, meshes=(Mesh([1, 3], [0, 2], "dp", "tp"),))
    with pytest.raises(ValueError, match=r'with tp=3, dp=1, but .*shard=mesh\["dp"\]'):
        shard_of("auto")


def jax(monkeypatch, *, connected, backend, ranks):
    """Install a jax that is the last of some processes; asking it makes a backend."""

    def asked():
        assert backend

    state = types.SimpleNamespace(
        client=object() if connected else None, process_id=ranks - 1, num_processes=ranks
    )
    modules = {
        "jax": {"process_index": lambda: asked() or ranks - 1,
                "process_count": lambda: asked() or ranks},
        "jax._src.distributed": {"global_state": state},
        "jax._src.xla_bridge": {"backends_are_initialized": lambda: backend},
    }  # fmt: skip
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))


def test_shard_auto_from_jax(monkeypatch):
    """'auto' asks JAX's processes once connected, or with a backend; it makes none."""
    environment(monkeypatch, RANK="0", WORLD_SIZE="5")
    jax(monkeypatch, connected=False, backend=False, ranks=4)
    assert shard_of("auto") == (0, 5)
    jax(monkeypatch, connected=False, backend=True, ranks=1)
    assert shard_of("auto") == (0, 5)
    for connected in (False, True):
        jax(monkeypatch, connected=connected, backend=not connected, ranks=4)
        assert shard_of("auto") == (3, 4)
    process_group(monkeypatch, initialised=True)
    assert shard_of("auto") == (2, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [*((rank, size, f"RANK='{rank}' and WORLD_SIZE='{size}'")
       for rank, size in [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0"), ("", "1")]),
     (None, "4", "WORLD_SIZE='4'.*no rank")],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"NODE_RANK": "1", "LOCAL_RANK": "0"}])
def test_shard_auto_with_a_bad_environment(monkeypatch, rank, world_size, more, text):
    """An invalid environment, or several ranks without a number, is an error that shows it."""
    environment(monkeypatch, WORLD_SIZE=world_size, **more)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(ValueError, match=text):
        shard_of("auto")


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"NODE_RANK": "0", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (1, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"}, (3, 5)),
        # This is a batch script without srun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "5"}, (0, 1)),
        ({"RANK": "6", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
         (6, 8)),
    ],
)  # fmt: skip
def test_launchers(monkeypatch, values, want):
    """Each launcher's variables are known, the innermost launcher's first, whatever torch is."""
    environment(monkeypatch, **values)
    assert shard_of("auto") == want
    process_group(monkeypatch, initialised=False)
    assert shard_of("auto") == want


def make(**options):
    """Make a manager of ten samples."""
    options = {"seed": 1, "batch_size": 1, "out_type": "null", "shard": "auto"} | options
    return cseq.MTSequence(Indices1, 10, 1, **options)


def test_nothing_is_asked_before_it_is_needed(monkeypatch):
    """Constructor and properties ask nothing; `len`, `sampler` and a start ask, and remember."""
    environment(monkeypatch)
    managers = [make() for _ in range(3)]
    for m in managers:
        assert (m.dset_size, m.batch_size, m.epoch, m.state_dict()["world_size"]) == (10, 1, 0, 1)
    environment(monkeypatch, RANK="1", WORLD_SIZE="5")
    assert [len(managers[0]), managers[1].length, len(managers[2].sampler)] == [2, 2, 2]
    assert managers[0].state_dict()["world_size"] == 5
    with managers[0].start_test() as m:
        order = cseq.permutation(10, 1, 0).tolist()
        assert [int(b[0]) for b in m] == [order[1], order[6]]
    # No answer is no contradiction.
    environment(monkeypatch)
    assert len(managers[0]) == 2
    with managers[0].start_test() as m:
        assert len(list(m)) == 2


@pytest.mark.parametrize("asked", ["len", "start", "iter"])
def test_a_group_that_comes_later(monkeypatch, asked):
    """Wherever it is noticed, an error has both, and the remedy."""
    environment(monkeypatch)
    m = make()
    if asked == "iter":
        iter(m.start_test())
    else:
        assert len(m) == 10
    process_group(monkeypatch, initialised=True)
    again = {"len": lambda: len(m), "start": m.start_test, "iter": lambda: next(iter(m))}[asked]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 0 of 1 .*rank 2 of 3 \(torch's process group"):
            again()
    m.finish()


def test_a_group_that_agrees(monkeypatch):
    """The group that torchrun's variables announced is no contradiction."""
    environment(monkeypatch, RANK="2", WORLD_SIZE="3")
    m = make(batch_size=2)
    assert len(m) == 2
    process_group(monkeypatch, initialised=True)
    with m.start_test():
        assert len(list(m)) == 2


def test_ranks_need_a_seed(monkeypatch):
    """The error comes once the ranks are known; a state's seed is shared by all ranks."""
    with pytest.raises(ValueError, match="seed"):
        make(seed=None, shard=(0, 2))
    state = make().state_dict()
    environment(monkeypatch, RANK="1", WORLD_SIZE="2")
    m = make(seed=None)
    for ask in (lambda: len(m), m.start, m.start_test):
        with pytest.raises(ValueError, match=r"rank 1 of 2 .*seed"):
            ask()
    m.load_state_dict(state)
    assert len(m) == 5
    assert len(make(seed=None, shuffle=False)) == 5


def test_alone_is_said_once(monkeypatch, caplog):
    """If shard='auto' found nothing, the log warns once per process."""
    environment(monkeypatch)
    shard.warn_alone.cache_clear()
    for _ in range(2):
        assert len(make()) == 10
    assert [r.levelname for r in caplog.records if "shard='auto'" in r.getMessage()] == ["WARNING"]
    caplog.clear()
    assert len(make(shard=None)) == 10
    assert not caplog.records
