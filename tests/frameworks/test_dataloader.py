"""The frameworks train on `cseq.DataLoader`'s batches as on torch's own loader's.

Each recipe of how-to/dataloader-frameworks.md runs with both, and the network's input is compared
bit for bit, including augmentation. Each run is a process, since both kinds of loaders fork.
"""

from importlib.util import find_spec

import pytest
from recipes import CSEQ_RUN, EPOCHS, HERE, LENGTH, SAMPLES, TORCHRUN
from recipes import loader_runs as runs
from recipes import run as run_script

# Settings of each framework and number of ranks.
LEGS = 5


def needs(*modules):
    """Skip a test if one of these modules is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


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


def check_killed(module, stops, ranks=1, **run):
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


def check_legs(name, *arguments, launcher=()):
    """Check that random settings are exact: the script ends with a list of faults."""
    assert run_script([*launcher, HERE / name, *arguments]).splitlines()[-1] in ("[]", "{}")


@pytest.mark.parametrize(
    ("module", "ranks", "resume", "taken"),
    [
        pytest.param("loader_accelerate", 1, "1-5", LENGTH + 5, marks=needs("accelerate")),
        pytest.param("loader_accelerate", 2, "1-5", 7 + 5, marks=needs("accelerate")),
        pytest.param(
            "loader_transformers", 2, "checkpoints/checkpoint-10", 10, marks=needs("transformers")
        ),
    ],
)
def test_cseq_run(module, ranks, resume, taken):
    """`cseq run` runs the unchanged script, also for torchrun; a resume is the same as torch's."""
    launcher = TORCHRUN if ranks > 1 else ()
    trainings = [{}, {"options": {"resume": resume}}]
    theirs = runs(module, trainings, launcher=launcher, ranks=ranks)
    ours = runs(module, trainings, launcher=(*launcher, *CSEQ_RUN), ranks=ranks)
    check_whole(*(whole for whole, _ in ours))
    for others, (whole, rest) in zip(theirs, ours, strict=True):
        check_same(others[0], whole)
        check_same(others[1], rest)
        assert numbers(rest) == numbers(whole)[taken:]


@needs("accelerate")
def test_accelerate_dispatches():
    """Each rank has the same as with torch's loader if rank 0 gets the batches of all."""
    options = {"dispatch_batches": True}
    trainings = [{"options": options}, {"options": {**options, "resume": "1-5"}}]
    theirs = runs("loader_accelerate", trainings, launcher=TORCHRUN, ranks=2)
    ours = runs("loader_accelerate", trainings, launcher=(*TORCHRUN, *CSEQ_RUN), ranks=2)
    for rank in range(2):
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            assert mine["training"] == other["training"]
            assert mine["by_torch"] == 0
            assert mine["log"] == mine["left"] == []
    assert [run["by_cseq"] for run in ours[0]] == [3 * LENGTH, 2 * LENGTH - 5]


@needs("accelerate", "torchdata")
def test_accelerates_settings():
    """In each of 60 settings, a resumed run has the uninterrupted one's batches and draws."""
    check_legs("accelerate_legs.py", "rest", 0, 60, launcher=TORCHRUN)


@needs("accelerate", "torchdata")
def test_accelerate_on_other_ranks():
    """Three ranks continue from the state of two, and no sample is lost."""
    for mode, ranks in (("save", 2), ("load", 3)):
        launcher = [*TORCHRUN[:-1], str(ranks)]
        check_legs("accelerate_legs.py", mode, ".", 0, 40, launcher=launcher)


@needs("accelerate", "torchdata")
@pytest.mark.parametrize(
    ("module", "ranks", "installed"),
    [
        ("loader_accelerate", 1, True),
        ("loader_accelerate", 2, True),
        ("loader_accelerate_state", 1, True),
        ("loader_accelerate_state", 1, False),
        ("loader_accelerate_state", 2, False),
    ],
)
def test_accelerate_killed(module, ranks, installed):
    """With `rng="batch"`, `skip_first_batches` is as exact as a state, and repeats no batch.

    A state is accelerate's own: `use_stateful_dataloader` makes it, with cseq's class.
    """
    run = {"launcher": TORCHRUN if ranks > 1 else (), "resume": "resume", "rng": "batch"}
    taken = -(-LENGTH // ranks) + 5
    check_killed(module, {taken: "1-5"}, ranks, installed=installed, **run)


@needs("transformers")
def test_the_trainer():
    """There are training, evaluation, resumes with and without skips, and persistent workers."""
    trainings = [
        {"eval_strategy": "epoch"},
        {"resume": "checkpoints/checkpoint-20"},
        {"resume": "checkpoints/checkpoint-20", "ignore_data_skip": True},
        {"dataloader_persistent_workers": True, "gradient_accumulation_steps": 2},
    ]
    both = [
        {"options": options, "installed": installed, "where": str(installed)}
        for options in trainings
        for installed in (False, True)
    ]
    [found] = runs("loader_transformers", both)
    theirs, ours = found[::2], found[1::2]
    for other, mine, options in zip(theirs, ours, trainings, strict=True):
        # The run stops in mid-epoch.
        check_same(other, mine, ahead="ignore_data_skip" in options)
    check_whole(ours[0])
    assert len(ours[0]["held_out"]) == EPOCHS * LENGTH
    assert numbers(ours[1]) == numbers(ours[0])[20:]


@needs("transformers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_killed(ranks):
    """With `rng="batch"`, a resume is exact in mid-epoch and between epochs, with evaluations."""
    length = -(-LENGTH // ranks)
    stops = {taken: f"checkpoints/checkpoint-{taken}" for taken in (length, length + 3)}
    run = {"launcher": TORCHRUN if ranks > 1 else (), "resume": "resume", "rng": "batch"}
    options = {"every": 1, "eval_strategy": "steps", "eval_steps": 4}
    check_killed("loader_transformers", stops, ranks, installed=True, options=options, **run)


@needs("transformers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainers_settings(ranks):
    """With `SeedEpochs`, a resume is exact with dropout, random masks and any sampler."""
    check_legs("trainer_legs.py", ranks, 125, LEGS)


# Lightning's own options, without a progress bar and its thread.
QUIET = {"logger": False, "enable_progress_bar": False}
DDP = {**QUIET, "strategy": "ddp", "devices": 2}


@needs("lightning")
@pytest.mark.parametrize(("ranks", "persistent"), [(1, False), (1, True), (2, False)])
def test_lightning(ranks, persistent):
    """Validation has a loader that a hook returns; for ranks, Lightning remakes the loaders."""
    arguments = {"rng": "worker", "persistent_workers": persistent}
    both = with_both(DDP if ranks > 1 else QUIET, arguments=arguments, plain=True)
    found = runs("loader_lightning", both, ranks=ranks)
    check_whole(*(ours for _, ours in found))
    for theirs, ours in found:
        check_same(theirs, ours)
        assert ours["ended"] == (2 if persistent else 0)
        # A check of two batches comes first.
        assert ranks > 1 or len(ours["held_out"]) == 2 + EPOCHS * LENGTH


@needs("lightning")
@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}, {"rng": "worker"}])
def test_lightning_resumed(arguments):
    """Checkpoints have cseq's state: a resume is exact, even in the following epochs.

    With torch's seeds, the rest has the same samples, but draws start again, as the page says.
    """
    resumed = {**QUIET, "ckpt_path": "checkpoints/step=20.ckpt"}
    trainings = [{"arguments": arguments, "options": options} for options in (QUIET, resumed)]
    [[whole, rest]] = runs("loader_lightning", trainings)
    check_served(whole)
    check_served(rest)
    check_whole(whole)
    assert numbers(rest) == numbers(whole)[20:]
    # The draws that differ are those in the rest of the epoch.
    again = 6 if "rng" in arguments else 0
    assert rest["training"][again:] == whole["training"][20 + again :]
    assert not again or rest["training"][:again] != whole["training"][20 : 20 + again]


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_killed(ranks):
    """`SaveState` makes validation exact, as well as a checkpoint at an epoch's last batch."""
    length = -(-LENGTH // ranks)
    stops = {taken: f"checkpoints/step={taken}.ckpt" for taken in (length, length + 3)}
    options = {**(DDP if ranks > 1 else QUIET), "every": 1, "val_check_interval": 4}
    check_killed("loader_lightning", stops, ranks, options=options, resume="ckpt_path")


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightnings_settings(ranks):
    """A resume is exact from each kind of checkpoint, with limits and two validation loaders."""
    check_legs("lightning_legs.py", ranks, 0, LEGS)


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_fabric(ranks):
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


@needs("composer")
@pytest.mark.parametrize("persistent", [False, True])
def test_composer(persistent):
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
