"""Ranks of torch: which part each of them reads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import import_path

import cseq

pytest.importorskip("torch")

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.needs("fork")

HELPERS = Path(__file__).parents[2] / "helpers"
HEAD = """
import json, sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_ranks import on_ranks
import cseq
from cseq.adapters.torch import BatchSampler, DataLoader

def said(function, *args):
    try:
        return function(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
"""


@pytest.fixture
def run_ranks(run_prepared: RunScript) -> Any:
    """Return a function that runs a script of ranks, and returns the JSON that it prints."""
    path = os.pathsep.join([import_path(), str(HELPERS)])

    def run(source: str, *args: str) -> Any:
        done = run_prepared(HEAD + source, *args, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


MESHES = """
def auto():
    return len(cseq.MTSequence(np.arange(24), batch_size=2, seed=1, shard="auto"))

def look(rank):
    answers = []
    for shape, names in json.loads(sys.argv[1]):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        answers.append(said(auto))
        for group in set(mesh.get_all_groups()) - {dist.group.WORLD}:
            dist.destroy_process_group(group)
        assert auto() == 3
    return answers

print(json.dumps(on_ranks(4, look)))
"""
OF_DATA = [
    [(4,), None],
    [(4,), ["dp"]],
    [(2, 2), ["dp_replicate", "dp_shard"]],
    [(1, 4), ["replicate", "shard"]],
    [(1, 4, 1), ["pp", "fsdp", "tp"]],
]
OTHERS = {
    'with dp=2, tp=2: .* give what divides them, shard=mesh["dp"], or': [(2, 2), ["dp", "tp"]],
    "with pp=1, dp=2, cp=1, tp=2: ": [(1, 2, 1, 2), ["pp", "dp", "cp", "tp"]],
    "with dim_0=2, dim_1=2: .*, where mesh_dim_names= names": [(2, 2), None],
    "with dp=1": [(1, 4), ["dp", "tp"]],
    'shard=mesh["fsdp"], or shard=torch.distributed.group.WORLD': [(2, 2), ["fsdp", "ep"]],
    'shard=mesh["replicate", "shard"]._flatten(), or': [(2, 1, 2), ["replicate", "shard", "cp"]],
}


def test_auto_divides_by_all_ranks_of_a_mesh_of_data(run_ranks: Any) -> None:
    """All its dimensions but those of size 1 have names of data: each rank has its own part."""
    assert run_ranks(MESHES, json.dumps(OF_DATA)) == [[3] * len(OF_DATA)] * 4


def test_auto_refuses_a_mesh_with_other_dimensions(run_ranks: Any) -> None:
    """While such a mesh has its groups, it is an error that says what to give."""
    for answers in run_ranks(MESHES, json.dumps([*OTHERS.values()])):
        for pattern, answer in zip(OTHERS, answers, strict=True):
            assert re.search(re.escape(pattern).replace(r"\.\*", ".*"), answer), answer


GIVEN = """
def first(shard):
    manager = cseq.MTSequence(np.arange(16), batch_size=2, seed=1, out_type="null", shard=shard)
    with manager.start_test() as batches:
        mine = [batch.tolist() for batch in batches]
    order = cseq.Shuffled(16, algorithm="fisher-yates-v1")
    assert [*BatchSampler(order, 2, seed=1, shard=shard)] == mine
    return mine

def look(rank):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "fsdp", "tp"))
    pair, odd = dist.new_group([0, 1]), dist.new_group([1, 3])
    flat = mesh["dp", "fsdp"]._flatten()
    return [said(first, shard) for shard in (
        mesh["fsdp"], mesh.get_group("fsdp"), flat, dist.group.WORLD, mesh["tp"], None,
        mesh, pair, odd, DeviceMesh("cpu", [0, 2]),
    )]

print(json.dumps(on_ranks(4, look)))
"""


def test_a_group_or_a_mesh_as_shard(run_ranks: Any) -> None:
    """It is this process's place in it; a rank outside, and several dimensions, are errors."""
    every = cseq.Shuffled(16, algorithm="fisher-yates-v1").batches(2, seed=1)
    got = run_ranks(GIVEN)
    for rank, (half, group, flat, world, alone, none, mesh, pair, odd, even) in enumerate(got):
        assert half == group == every[rank % 2 :: 2]
        assert flat == world == every[rank::4]
        assert alone == none == every
        assert "has 3 dimensions; give what divides the batches, as one: shard=mesh[" in mesh
        for value, ranks in ((pair, [0, 1]), (odd, [1, 3]), (even, [0, 2])):
            if rank in ranks:
                assert value == every[ranks.index(rank) :: 2]
            else:
                assert "is a group or mesh that this process is not in" in value
