"""Composer trains on cseq's batches, and its checkpoints hold cseq's state.

It runs in its own process, as Composer imports torchvision, which `vision` replaces there.
"""

from importlib.util import find_spec

import pytest
from recipes import LENGTH, run, stream, trained

if find_spec("composer") is None:
    pytest.skip("composer is not installed", allow_module_level=True)

DRIVER = """
import json, sys
import pytest
import vision
import with_composer
from recipes import recorded

for options in json.loads(sys.argv[1]):
    with pytest.MonkeyPatch.context() as patch:
        print("trained:", recorded(patch, with_composer, **options))
"""


def test_its_epochs_and_its_resumes():
    """Three epochs are cseq's; interrupted in mid-epoch and after one, training resumes exactly."""
    expected = stream(0, 1, 2)
    runs, batches = [{}], [expected]
    for taken, interval in [(5, "5ba"), (20, "20ba"), (LENGTH, f"{LENGTH}ba"), (LENGTH, "1ep")]:
        options = {"interval": interval}
        runs += [{**options, "stop_after": taken + 2}]
        runs += [{**options, "load_path": f"checkpoints/{taken}.pt"}]
        batches += [expected[: taken + 2], expected[taken:]]
    assert trained(DRIVER, runs) == batches


MONITORED = """
from functools import partial
from itertools import pairwise

import vision
import with_composer
from composer.loggers import InMemoryLogger
from recipes import LENGTH, figures_of

logger, readings = InMemoryLogger(), []
make = with_composer.batches

def batches(**options):
    manager = make(**options)
    read = manager.stats
    manager.stats = lambda: readings.append(read()) or readings[-1]
    return manager

with_composer.batches = batches
with_composer.Figures = partial(with_composer.Figures, 5)
with_composer.Trainer = partial(with_composer.Trainer, loggers=[logger])
with_composer.train()
logged = figures_of(logger.data)
steps = list(range(5, 3 * LENGTH + 1, 5))
expected = [now.since(before).as_dict() for before, now in pairwise(readings)]
assert len(logged) == 17
for name, values in logged.items():
    assert [int(timestamp.batch) for timestamp, _ in values] == steps
    assert [value for _, value in values] == [figures[name] for figures in expected]
print("all is well")
"""


def test_its_loggers_have_figures():
    """Every fifth batch has the figures of stats() since the last, with that batch's timestamp."""
    assert run(["-c", MONITORED]).endswith("all is well\n")
