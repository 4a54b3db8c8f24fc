"""Ray Train and Ray Tune: ranks and trials with their driver's fleet."""

from pathlib import Path

import pytest

train = pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)

# A separate cluster, as Ray keeps actors of Train and Tune for later runs.
COMMON = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[1:3]
import ray
import cloudpickle, cseq, drawing
from drawing import Draws, SAMPLES, sequence
from local_cluster import local_cluster
from ray import train

ray.cloudpickle.register_pickle_by_value(drawing)
cloudpickle.register_pickle_by_value(drawing)

# A Ray Train without elastic ranks puts its trainer and the first rank on one node, of one CPU.
is_older = not hasattr(train.ScalingConfig, "elastic_resize_monitor_interval_s")
ROOM = {"trainer_resources": {"CPU": 0.5}} if is_older else {}

@ray.remote(num_cpus=0)
class Seen:
    def __init__(self):
        self.reports = []

    def add(self, *report):
        self.reports.append(report)

    def all(self):
        return self.reports

def indices_of(fleet, **options):
    with sequence(fleet, **options).start() as batches:
        return [index for batch in batches for index in batch[0].tolist()]
"""

ELASTIC = (
    COMMON
    + """
import json, os, tempfile, time
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
from ray.train.torch import TorchTrainer

def train_a_rank(config):
    context = train.get_context()
    manager = sequence(config["fleet"], shard="auto")
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(folder + "/state.json") as file:
            manager.load_state_dict(json.load(file))
    with manager.start() as batches:
        for k, batch in enumerate(batches):
            ray.get(config["seen"].add.remote(checkpoint is not None, batch[0].tolist()))
            if checkpoint is None and k == 19:
                with tempfile.TemporaryDirectory() as folder:
                    with open(folder + "/state.json", "w") as file:
                        json.dump(manager.state_dict(), file)
                    train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
                if context.get_world_rank() == 1:
                    time.sleep(4)  # Ray notes the checkpoint; if it does not, all begins anew
                    os._exit(1)
                time.sleep(60)  # Ray ends this rank, too

with local_cluster(2) as cluster:
    seen = Seen.remote()
    with cseq.RayFleet(Draws, 2, 1, num_cpus=0) as fleet:
        TorchTrainer(
            train_a_rank,
            train_loop_config={"fleet": fleet, "seen": seen},
            scaling_config=train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 0.5}, **ROOM
            ),
            run_config=train.RunConfig(
                storage_path=sys.argv[3], failure_config=train.FailureConfig(max_failures=9)
            ),
        ).fit()
    reports = ray.get(seen.all.remote())
    before = {index for again, batch in reports if not again for index in batch}
    after = [index for again, batch in reports if again for index in batch]
    assert before and after
    assert sorted([*before, *after]) == list(range(SAMPLES))
    print("done")
"""
)

TUNE = (
    COMMON
    + """
from ray import tune

def try_once(config, fleet, seen):
    indices = indices_of(fleet, seed=config["seed"], shard="auto")
    ray.get(seen.add.remote(config["seed"], indices))

with local_cluster(2) as cluster:
    seen = Seen.remote()
    with cseq.RayFleet(Draws, 2, 1, num_cpus=0) as fleet:
        trial = tune.with_parameters(try_once, fleet=fleet, seen=seen)
        tune.Tuner(
            tune.with_resources(trial, {"cpu": 0.5}),
            param_space={"seed": tune.grid_search([3, 4])},
            run_config=tune.RunConfig(storage_path=sys.argv[3]),
        ).fit()
    reports = sorted(ray.get(seen.all.remote()))
    assert [seed for seed, _ in reports] == [3, 4]
    for seed, indices in reports:
        with sequence(Draws, seed=seed).start_test() as batches:
            assert indices == [index for batch in batches for index in batch[0].tolist()]
    print("done")
"""
)


def run(run_anew, script, tmp_path):
    """Run a script with the path of the helpers; it reports its success."""
    here = Path(__file__).parent
    done = run_anew(script, str(here), str(here.parent / "helpers"), str(tmp_path / "runs"))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr


def test_ranks_that_ray_train_starts_again_go_on(run_anew, tmp_path):
    """After a rank's death, they resume from a checkpoint: together, each sample comes once."""
    pytest.importorskip("torch")
    run(run_anew, ELASTIC, tmp_path)


def test_trials_of_ray_tune_share_a_fleet(run_anew, tmp_path):
    """Each has its own seed, and all samples."""
    run(run_anew, TUNE, tmp_path)
