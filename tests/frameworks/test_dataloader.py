"""The frameworks train on `cseq.DataLoader`'s batches as on torch's own loader's.

Each recipe of how-to/dataloader-frameworks.md runs with both, and the network's input is compared
bit for bit, including augmentation. Each run is a process, since both kinds of loaders fork.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from recipes import CSEQ_RUN, EPOCHS, LENGTH, SAMPLES, TORCHRUN, loader_runs
from recipes import run as run_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Runs: TypeAlias = Callable[..., list[list[dict[str, Any]]]]


# Settings of each framework and number of ranks.
LEGS = 5


def needs(*modules):
    """Skip a test if one of these modules is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def runs(recipes, folder):
    """Return `loader_runs`, in this test's folder."""

    def call(module, runs, **options):
        return loader_runs(module, runs, folder, recipes, **options)

    return call


def with_both(options, **run):
    """Return a run with torch's loader, and the same run with cseq's."""
    return [
        {**run, "options": options, "loader": loader, "where": loader}
        for loader in ("torch", "cseq")
    ]


def check_served(run, *, ahead=0):
    """Check that all batches came from cseq's workers, and without faults.

    `ahead` allows batches that the framework took without giving them to the network.
    """
    assert run["by_torch"] == 0
    assert run["by_cseq"] == len(run["training"]) + len(run["held_out"]) + ahead
    assert run["log"] == []
    assert run["left"] == []


def check_same(theirs, ours, **options):
    """Check that a run had the batches of another run with torch's loader."""
    assert theirs["by_torch"] > 0
    assert theirs["by_cseq"] == 0
    check_served(ours, **options)
    assert len(ours["training"]) > 0
    assert ours["training"] == theirs["training"]
    assert ours["held_out"] == theirs["held_out"]


def numbers(run):
    """Return the samples of each training batch."""
    return [[int(row[0]) for row in x] for x, _ in run["training"]]


def check_whole(*ranks):
    """Check that each epoch of a training had all samples, and no equal draws.

    Ranks get a few samples twice, so that all have equally many batches.
    """
    length = -(-LENGTH // len(ranks))
    for run in ranks:
        assert len(run["training"]) == EPOCHS * length
        draws = [tuple(row[1:]) for x, _ in run["training"] for row in x]
        assert len(set(draws)) == len(draws)
    for epoch in range(EPOCHS):
        epochs = [numbers(run)[epoch * length : (epoch + 1) * length] for run in ranks]
        found = [number for batches in epochs for batch in batches for number in batch]
        assert set(found) == set(range(SAMPLES))
        assert len(found) < SAMPLES + 8 * len(ranks)


def check_killed(runs, module, stops, ranks=1, **run):
    """Check that a killed run continues like the uninterrupted one, to the last bit.

    `stops` has numbers of training batches and their checkpoints. `run` has `launcher`, the
    recipe's options, and the name of its argument for a checkpoint.
    """
    launcher, options, resume = run.pop("launcher", ()), run.pop("options", {}), run.pop("resume")
    whole = {**run, "options": options, "where": "whole"}
    killed = {**run, "options": options, "killed": max(stops) + 2}
    rests = [{**run, "options": {**options, resume: path}} for path in stops.values()]
    assert runs(module, [killed], launcher=launcher, ranks=ranks) == []
    found = runs(module, [whole, *rests], launcher=launcher, ranks=ranks)
    for first, *others in found:
        # Lightning has started another rank, which stays.
        check_served({**first, "left": []})
        for taken, rest in zip(stops, others, strict=True):
            check_served(rest)
            assert rest["training"] == first["training"][taken:]
            held_out, losses = len(rest["held_out"]), len(rest["losses"])
            assert rest["held_out"] == first["held_out"][len(first["held_out"]) - held_out :]
            assert rest["losses"] == first["losses"][-losses:]
            assert losses == len(rest["training"]) + held_out
    check_whole(*(first for first, *_ in found))
    draws = [{tuple(row[1:]) for x, _ in first["training"] for row in x} for first, *_ in found]
    assert len(set().union(*draws)) == sum(map(len, draws))


def check_legs(name, folder, recipes, ranks, *, first):
    """Check that random settings are exact: a run that is killed, and resumes."""
    script = str(recipes.parents[1] / "tests" / "frameworks" / name)
    output = run_script([script, *map(str, (ranks, first, LEGS))], folder, recipes)
    assert json.loads(output.splitlines()[-1]) == {}


# ── accelerate ─────────────────────────────────────────────────────────────────────────────


@needs("accelerate")
def test_accelerate(runs):
    """`cseq run` runs the unchanged script; a resume is the same as torch's."""
    trainings = [{}, {"options": {"resume": "1-5"}}]
    [theirs] = runs("loader_accelerate", trainings)
    [ours] = runs("loader_accelerate", trainings, launcher=CSEQ_RUN)
    for mine, other in zip(ours, theirs, strict=True):
        check_same(other, mine)
    check_whole(ours[0])
    assert numbers(ours[1]) == numbers(ours[0])[LENGTH + 5 :]


@needs("accelerate")
def test_accelerate_on_two_ranks(runs):
    """Each rank has the same as with torch's loader, even if rank 0 gets the batches of all."""
    trainings = [
        {},
        {"options": {"resume": "1-5"}},
        {"options": {"dispatch_batches": True}},
        {"options": {"dispatch_batches": True, "resume": "1-5"}},
    ]
    theirs = runs("loader_accelerate", trainings, launcher=TORCHRUN, ranks=2)
    ours = runs("loader_accelerate", trainings, launcher=(*TORCHRUN, *CSEQ_RUN), ranks=2)
    check_whole(ours[0][0], ours[1][0])
    for rank in range(2):
        for mine, other in zip(ours[rank][:2], theirs[rank][:2], strict=True):
            check_same(other, mine)
        assert numbers(ours[rank][1]) == numbers(ours[rank][0])[7 + 5 :]
        for mine, other in zip(ours[rank][2:], theirs[rank][2:], strict=True):
            assert mine["training"] == other["training"]
            assert mine["by_torch"] == 0
            assert mine["log"] == mine["left"] == []
    assert [run["by_cseq"] for run in ours[0][2:]] == [3 * LENGTH, 2 * LENGTH - 5]


@needs("accelerate", "torchdata")
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerates_own_states(runs, ranks):
    """With `use_stateful_dataloader`, and cseq's class for torchdata's, a resume is exact."""
    trainings = [{}, {"options": {"resume": "1-5"}}]
    launcher = TORCHRUN if ranks > 1 else ()
    found = runs("loader_accelerate_state", trainings, launcher=launcher, ranks=ranks)
    check_whole(*(whole for whole, _ in found))
    for whole, rest in found:
        check_served(whole)
        check_served(rest)
        assert rest["training"] == whole["training"][-(-LENGTH // ranks) + 5 :]


@needs("accelerate", "torchdata")
def test_accelerates_settings(folder, recipes):
    """In each of 60 settings, a resumed run has the uninterrupted one's batches and draws."""
    script = str(recipes.parents[1] / "tests" / "frameworks" / "accelerate_legs.py")
    assert json.loads(run_script([*TORCHRUN, script, "rest", "0", "60"], folder, recipes)) == []


@needs("accelerate", "torchdata")
def test_accelerate_on_other_ranks(folder, recipes):
    """Three ranks continue from the state of two, and no sample is lost."""
    script = str(recipes.parents[1] / "tests" / "frameworks" / "accelerate_legs.py")
    arguments = [str(folder), "0", "40"]
    run_script([*TORCHRUN, script, "save", *arguments], folder, recipes)
    on_three = [*TORCHRUN[:-1], "3", script, "load", *arguments]
    assert json.loads(run_script(on_three, folder, recipes)) == []


@needs("accelerate", "torchdata")
@pytest.mark.parametrize(
    ("module", "ranks"),
    [("loader_accelerate", 1), ("loader_accelerate", 2), ("loader_accelerate_state", 1)],
)
def test_accelerate_killed(runs, module, ranks):
    """With `rng="batch"`, `skip_first_batches` is as exact as a state, and repeats no batch."""
    run = {"launcher": TORCHRUN if ranks > 1 else (), "resume": "resume", "rng": "batch"}
    taken = -(-LENGTH // ranks) + 5
    check_killed(runs, module, {taken: "1-5"}, ranks, installed=True, **run)


# ── the Trainer ────────────────────────────────────────────────────────────────────────────


@needs("transformers")
def test_the_trainer(runs):
    """There are training, evaluation, resumes with and without skips, and persistent workers."""
    trainings = [
        {"eval_strategy": "epoch"},
        {"resume": "checkpoints/checkpoint-20"},
        {"resume": "checkpoints/checkpoint-20", "ignore_data_skip": True},
        {"dataloader_persistent_workers": True, "gradient_accumulation_steps": 2},
    ]
    [found] = runs(
        "loader_transformers",
        [
            {"options": options, "installed": installed, "where": str(installed)}
            for options in trainings
            for installed in (False, True)
        ],
    )
    theirs, ours = found[::2], found[1::2]
    for other, mine, options in zip(theirs, ours, trainings, strict=True):
        # The run stops in mid-epoch.
        check_same(other, mine, ahead="ignore_data_skip" in options)
    check_whole(ours[0])
    assert len(ours[0]["held_out"]) == EPOCHS * LENGTH
    assert numbers(ours[1]) == numbers(ours[0])[20:]


@needs("transformers")
def test_the_trainer_on_two_ranks(runs):
    """`torchrun` starts an unchanged script through `cseq run`."""
    trainings = [{}, {"options": {"resume": "checkpoints/checkpoint-10"}}]
    theirs = runs("loader_transformers", trainings, launcher=TORCHRUN, ranks=2)
    ours = runs("loader_transformers", trainings, launcher=(*TORCHRUN, *CSEQ_RUN), ranks=2)
    check_whole(ours[0][0], ours[1][0])
    for rank in range(2):
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            check_same(other, mine)
        assert numbers(ours[rank][1]) == numbers(ours[rank][0])[10:]


@needs("transformers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_killed(runs, ranks):
    """With `rng="batch"`, a resume is exact in mid-epoch and between epochs, with evaluations."""
    length = -(-LENGTH // ranks)
    stops = {taken: f"checkpoints/checkpoint-{taken}" for taken in (length, length + 3)}
    check_killed(
        runs,
        "loader_transformers",
        stops,
        ranks,
        launcher=TORCHRUN if ranks > 1 else (),
        options={"every": 1, "eval_strategy": "steps", "eval_steps": 4},
        resume="resume",
        installed=True,
        rng="batch",
    )


@needs("transformers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainers_settings(folder, recipes, ranks):
    """With `SeedEpochs`, a resume is exact with dropout, random masks and any sampler."""
    check_legs("trainer_legs.py", folder, recipes, ranks, first=125)


# ── Lightning ──────────────────────────────────────────────────────────────────────────────

# Lightning's own options, without a progress bar and its thread.
QUIET = {"logger": False, "enable_progress_bar": False}
DDP = {**QUIET, "strategy": "ddp", "devices": 2}


@needs("lightning")
@pytest.mark.parametrize("persistent", [False, True])
def test_lightning(runs, persistent):
    """Training has a loader, and validation has one that Lightning requests in a hook."""
    arguments = {"rng": "worker", "persistent_workers": persistent}
    both = with_both(QUIET, arguments=arguments, plain=True)
    [[theirs, ours]] = runs("loader_lightning", both)
    check_same(theirs, ours)
    check_whole(ours)
    assert ours["ended"] == (2 if persistent else 0)
    # A check of two batches comes first.
    assert len(ours["held_out"]) == 2 + EPOCHS * LENGTH


@needs("lightning")
@pytest.mark.parametrize("persistent", [False, True])
def test_lightning_resumed(runs, persistent):
    """Its checkpoints have cseq's state: a resume is exact, even in the following epochs."""
    resumed = {**QUIET, "ckpt_path": "checkpoints/step=20.ckpt"}
    run = {"arguments": {"persistent_workers": persistent}}
    [[whole, rest]] = runs(
        "loader_lightning", [{**run, "options": QUIET}, {**run, "options": resumed}]
    )
    check_served(whole)
    check_served(rest)
    check_whole(whole)
    assert rest["training"] == whole["training"][20:]


@needs("lightning")
def test_lightning_resumed_with_torchs_seeds(runs):
    """The rest has the same samples; draws start again, as the page says."""
    run = {"arguments": {"rng": "worker"}}
    resumed = {**QUIET, "ckpt_path": "checkpoints/step=20.ckpt"}
    [[whole, rest]] = runs(
        "loader_lightning", [{**run, "options": QUIET}, {**run, "options": resumed}]
    )
    check_served(rest)
    assert numbers(rest) == numbers(whole)[20:]
    assert rest["training"][:6] != whole["training"][20:26]
    assert rest["training"][6:] == whole["training"][26:]


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_killed(runs, ranks):
    """`SaveState` makes validation exact, as well as a checkpoint at an epoch's last batch."""
    length = -(-LENGTH // ranks)
    stops = {taken: f"checkpoints/step={taken}.ckpt" for taken in (length, length + 3)}
    check_killed(
        runs,
        "loader_lightning",
        stops,
        ranks,
        options={**(DDP if ranks > 1 else QUIET), "every": 1, "val_check_interval": 4},
        resume="ckpt_path",
    )


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightnings_settings(folder, recipes, ranks):
    """A resume is exact from each kind of checkpoint, with limits and two validation loaders."""
    check_legs("lightning_legs.py", folder, recipes, ranks, first=0)


@needs("lightning")
def test_lightning_on_two_ranks(runs):
    """Lightning remakes the loader with a DistributedSampler; resumes are exact there, too."""
    resumed = {"options": {**DDP, "ckpt_path": "checkpoints/step=10.ckpt"}}
    both = with_both(DDP, arguments={"rng": "worker"}, plain=True)
    trainings = [*both, {"options": DDP}, resumed]
    found = runs("loader_lightning", trainings, ranks=2)
    for theirs, ours, whole, rest in found:
        check_same(theirs, ours)
        check_served(whole)
        check_served(rest)
        assert rest["training"] == whole["training"][10:]
    check_whole(*(rank[2] for rank in found))


# ── Fabric ─────────────────────────────────────────────────────────────────────────────────


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_fabric(runs, ranks):
    """`setup_dataloaders` takes the loader, and a checkpoint with it makes resumes exact."""
    options = {"strategy": "ddp", "devices": 2} if ranks > 1 else {}
    step = 20 if ranks == 1 else 10
    resumed = {"options": {**options, "resume": f"checkpoints/{step}.ckpt"}}
    trainings = [*with_both(options, arguments={"rng": "worker"}), {"options": options}, resumed]
    found = runs("loader_fabric", trainings, ranks=ranks)
    check_whole(*(rank[2] for rank in found))
    for theirs, ours, whole, rest in found:
        check_same(theirs, ours)
        check_served(whole)
        check_served(rest)
        assert rest["training"] == whole["training"][step:]


# ── Composer ───────────────────────────────────────────────────────────────────────────────


@needs("composer")
@pytest.mark.parametrize("persistent", [False, True])
def test_composer(runs, persistent):
    """It takes a fresh loader and ends persistent workers; a resume is the same as torch's.

    It makes the batches of a resumed epoch again, and one of each earlier epoch, so workers that
    are not persistent have the same seeds.
    """
    arguments = {"persistent_workers": persistent}
    resumed = {"load_path": "checkpoints/20.pt"}
    trainings = with_both({}, arguments=arguments) + with_both(resumed, arguments=arguments)
    [[theirs, ours, theirs_resumed, ours_resumed]] = runs("loader_composer", trainings)
    check_same(theirs, ours)
    check_same(theirs_resumed, ours_resumed, ahead=1 + 7)
    check_whole(ours)
    assert ours["ended"] == persistent
    assert numbers(ours_resumed) == numbers(ours)[20:]
    assert (ours_resumed["training"] == ours["training"][20:]) is not persistent
