"""The part that each of torch's ranks reads."""

import json
import os
import re
from itertools import chain
from pathlib import Path

import pytest
from checkout import import_path

import cseq

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.needs("fork")

HELPERS = Path(__file__).parents[2] / "helpers"
HEAD = """
import json, logging, sys, types
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_ranks import on_ranks
import cseq
from cseq.adapters.torch import BatchSampler, DataLoader

class Part:  # as accelerate divides batches
    def __init__(self, batches, rank):
        self.batch_sampler, self.process_index, self.num_processes = batches, rank, 2
    def __iter__(self):
        return (each for k, each in enumerate(self.batch_sampler) if k % 2 == self.process_index)
    def __len__(self):
        return len(self.batch_sampler) // 2

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("cseq").addHandler(Lines())

def said(function, **options):
    try:
        return function(**options)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
"""


@pytest.fixture
def run_ranks(run_prepared):
    """Return a function that runs a script's `look` on each rank, and returns the answers."""
    path = os.pathsep.join([import_path(), str(HELPERS)])

    def run(source, *args, ranks=2, patience=60.0):
        last = f"print(json.dumps(on_ranks({ranks}, look, {patience})))"
        done = run_prepared(HEAD + source + last, *args, PYTHONPATH=path)
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
"""
OF_DATA = [
    [(4,), None],
    [(4,), ["dp"]],
    [(2, 2), ["dp_replicate", "dp_shard"]],
    [(1, 4), ["replicate", "shard"]],
    [(1, 4, 1), ["pp", "fsdp", "tp"]],
]
OTHERS = {
    'with dp=2, tp=2, but .* divides the batches, shard=mesh["dp"], or': [(2, 2), ["dp", "tp"]],
    "with pp=1, dp=2, cp=1, tp=2, but": [(1, 2, 1, 2), ["pp", "dp", "cp", "tp"]],
    'with dim_0=2, dim_1=2, but .*, with "dp" in mesh_dim_names, or': [(2, 2), None],
    "with dp=1": [(1, 4), ["dp", "tp"]],
    'shard=mesh["fsdp"], or pass shard=torch.distributed.group.WORLD': [(2, 2), ["fsdp", "ep"]],
    'shard=mesh["replicate", "shard"]._flatten(), or': [(2, 1, 2), ["replicate", "shard", "cp"]],
}


def test_auto_divides_by_all_ranks_of_a_mesh_of_data(run_ranks):
    """All dimensions with a size above 1 have names of data, so each rank has its own part."""
    assert run_ranks(MESHES, json.dumps(OF_DATA), ranks=4) == [[3] * len(OF_DATA)] * 4


@pytest.mark.skipif(torch.__version__ < "2.6", reason="it describes no groups of meshes")
def test_auto_refuses_a_mesh_with_other_dimensions(run_ranks):
    """While such a mesh has its groups, 'auto' raises an error that says what to pass."""
    for answers in run_ranks(MESHES, json.dumps([*OTHERS.values()]), ranks=4):
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
    return [said(first, shard=shard) for shard in (
        mesh["fsdp"], mesh.get_group("fsdp"), flat, dist.group.WORLD, mesh["tp"], None,
        mesh, pair, odd, DeviceMesh("cpu", [0, 2]),
    )]
"""


def test_a_group_or_a_mesh_as_shard(run_ranks):
    """The place of this process counts; a rank outside, or several dimensions, is an error."""
    every = cseq.Shuffled(16, algorithm="fisher-yates-v1").batches(2, seed=1)
    got = run_ranks(GIVEN, ranks=4)
    for rank, (half, group, flat, world, alone, none, mesh, pair, odd, even) in enumerate(got):
        assert half == group == every[rank % 2 :: 2]
        assert flat == world == every[rank::4]
        assert alone == none == every
        assert "has 3 dimensions; pass the dimension that divides the batches, shard=mesh[" in mesh
        for value, ranks in ((pair, [0, 1]), (odd, [1, 3]), (even, [0, 2])):
            if rank in ranks:
                assert value == every[ranks.index(rank) :: 2]
            else:
                assert "is a group or mesh that does not include this process" in value


SEEDS = """
data = list(range(48))

def divided(rank, **options):
    whole = DataLoader(data, **options)
    return DataLoader(data, batch_sampler=Part(whole.batch_sampler, rank))

def look(rank):
    torch.manual_seed(5 + rank)
    answers = []
    for options in (
        {"sampler": cseq.Shuffled(), "batch_size": 4},
        {"sampler": cseq.Weighted(np.ones(48)), "batch_size": 4, "num_workers": 1},
        {"batch_sampler": cseq.Buckets(np.arange(48) % 9 + 1, 20)},
        {"sampler": cseq.Sequential(), "batch_size": 4},
    ):
        loader = divided(rank, **options)
        answers.append([[batch.tolist() for batch in loader] for _ in range(2)])
    one = DataLoader(data, 4, sampler=cseq.Shuffled())
    first = next(iter(one)).tolist()
    torch.manual_seed(70 + rank)
    other = DataLoader(data, 4, sampler=cseq.Shuffled())
    other.load_state_dict(one.state_dict())
    return answers, [first] + [batch.tolist() for batch in other], lines
"""


def samples_of(batches):
    return sorted(chain.from_iterable(batches))


def test_ranks_agree_on_the_seed_of_an_order(run_ranks):
    """Ranks with different seeds that divide an order's batches read each sample once.

    They use rank 0's seed, which a state keeps. If nothing divides the batches, the log says so.
    """
    (zero, resumed, silent), (one, again, lines) = run_ranks(SEEDS)
    for ours, theirs in zip(zero, one, strict=True):
        for epoch, other in zip(ours, theirs, strict=True):
            assert samples_of(epoch + other) == list(range(48))
    order = cseq.Shuffled(48)
    assert zero[0][0] == order.batches(4, seed=5)[::2]
    assert resumed == again == order.batches(4, seed=5)
    assert silent == []
    assert any("instead of this rank's torch.initial_seed()=6" in line for line in lines)


ALONE = """
def look(rank):
    def batches():
        return [batch.tolist() for batch in DataLoader(list(range(8)), 4, sampler=cseq.Shuffled())]
    if rank == int(sys.argv[1]):
        return said(batches)
"""


def test_a_rank_that_iterates_alone(run_ranks):
    """Rank 0 does not wait; another rank waits for its seed until the group's timeout."""
    assert samples_of(run_ranks(ALONE, "0", patience=0.2)[0]) == list(range(8))
    answer = run_ranks(ALONE, "1", patience=0.2)[1]
    assert re.match("rank 1 needs rank 0's seed for order=<Shuffled: 8 ", answer)
    assert re.search(r"and has waited \d+ s for rank 0", answer)
    assert "generator=torch.Generator().manual_seed(seed)" in answer


DIVIDED = """
def look(rank):
    def epochs(**options):
        part = Part(BatchSampler(cseq.Shuffled(16), 2, **options), rank)
        state = types.SimpleNamespace(active_dataloader=types.SimpleNamespace(batch_sampler=part))
        sys.modules["accelerate.state"] = types.SimpleNamespace(GradientState=lambda: state)
        return [[*part], [*part]]
    return [(said(epochs, **options), lines[:]) for options in (
        {"seed": 4}, {"seed": 4, "shard": "auto"}, {"seed": rank}
    )]
"""


def test_what_accelerate_divides(run_ranks):
    """Different seeds are an error, and the log says that the batches were already divided."""
    zero, one = run_ranks(DIVIDED)
    (ours, silent), (halves, lines), (given, _) = zero
    for epoch, other in zip(ours, one[0][0], strict=True):
        assert samples_of(epoch + other) == list(range(16))
    assert silent == []
    assert [len(epoch) for epoch in halves] == [2, 2]
    [line] = lines
    assert line.startswith("the batches are divided among ranks twice, by 2 and by 2, so an epoch")
    assert [len(epoch) for epoch in given] == [4, 4]
    assert re.match("order=<.*> has seed=1 on this rank but seed=0 on rank 0, .* pass", one[2][0])


DRAWS = """
rng = sys.argv[1]

class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.rand(()), np.random.rand(), cseq.rng().random() if rng == "batch" else 0.0

def make(**options):
    torch.manual_seed(0)
    return DataLoader(Draws(), rng=rng, **options)

def taken(batches):
    return [[part.tolist() for part in batch] for batch in batches]

def look(rank):
    def part():
        sampler = torch.utils.data.DistributedSampler(Draws(), shuffle=False)
        return make(batch_size=2, sampler=sampler, num_workers=1)
    one, other, states = part(), part(), [None, None]
    batches = iter(one)
    first = taken([next(batches)])
    dist.all_gather_object(states, one.state_dict())
    other.load_state_dict(states[0])
    same = BatchSampler(cseq.Sequential(16), 2, shard=(0, 1))
    return (
        first + taken(batches), taken(other),
        taken(make(batch_sampler=same)), taken(make(sampler=range(8))),
    )
"""


def test_ranks_draw_other_numbers_with_rng_batch(run_ranks):
    """After a resume from one rank's state, too; ranks that read the same part draw the same."""
    zero, one = run_ranks(DRAWS, "batch")
    for ours, theirs in zip(zero[:2] + zero[3:], one[:2] + one[3:], strict=True):
        assert not {*map(str, chain(*ours))} & {*map(str, chain(*theirs))}
    assert (zero[0][1:], one[0][1:]) == (zero[1], one[1])
    assert zero[2] == one[2]


def test_ranks_draw_as_torch_s_do_with_rng_worker(run_ranks):
    """Ranks with one seed draw the same numbers, except after a resume from one rank's state."""
    (whole, _, *rest), (again, _, *others) = run_ranks(DRAWS, "worker")
    assert [whole, *rest] == [again, *others]
