"""The rules of the advice: one cause for every window, and no contradictory numbers."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cseq.measure.advice import RULES, Window, advise, duration

# 1000 batches in 10 seconds: 4 workers on 9 cores, 40 ms a batch, steps of 5 ms.
PLAIN = Window(
    batches=1000, elapsed=10.0, waited=5.0, step=0.005, step_p99=0.006,
    index=0.04, index_p99=0.05, workers=4, busy=1.0, cpu=0.95, cores=9, buffer=10,
)  # fmt: skip

CASES = {
    "unknown": [{"batches": 7}, {"elapsed": 0.0}, {"batches": 0, "elapsed": 0.0, "workers": 0}],
    "inline": [{"workers": 0}, {"workers": 0, "batches": 1, "elapsed": 0.0}],
    "gil": [
        {"threads": True, "gil_long": 0.6, "computed": 1.0},
        # The wait for the GIL hides in the step.
        {"threads": True, "gil_long": 0.6, "computed": 1.0, "waited": 0.1},
        {"threads": True, "gil_long": 0.6, "computed": 1.0, "busy": 0.5, "behind": 1.0},
        # Other programs use the cores.
        {"threads": True, "gil_long": 0.6, "computed": 0.2, "cpu": 0.05, "queued": 0.2},
    ],
    "loop": [
        {"waited": 0.4},
        {"waited": 0.4, "busy": 0.1},
        {"waited": 0.4, "workers": 0},
        # The loop waits for the GIL.
        {"waited": 0.0, "threads": True, "gil_long": 0.6, "computed": 1.0, "cpu": 0.01},
        # The GIL is free.
        {"waited": 0.0, "threads": True, "gil_long": 0.6, "computed": 0.3, "busy": 0.08},
        {"dry": 0.02},
        {"dry": 0.02, "busy": 0.3},
        {"dry": 0.02, "batches": 10**6, "busy": 0.3},
    ],
    "handover": [{"batches": 10**6, "busy": 0.3}, {"batches": 10**6, "index": 2e-6}],
    "converters": [{"converters": 2, "converting": 0.95, "busy": 0.3}],
    "memory": [{"copies": 200}],
    "epochs": [{"busy": 0.6, "early": 0.8}, {"busy": 0.6, "early": 0.8, "behind": 0.8}],
    "stragglers": [{"busy": 0.4, "behind": 0.9, "index_p99": 0.4}],
    "cores": [
        {"cores": 4},
        {"cores": 2, "cpu": 0.25},
        {"cpu": 0.3, "queued": 0.6},
        {"cpu": 0.1, "queued": 0.3, "threads": True, "computed": 0.4, "gil_long": 0.2},
    ],
    "workers": [
        {},
        {"cpu": None},
        {"waited": 0.6},
        {"dry": 0.5},
        {"threads": True, "computed": 4.0, "gil_long": 0.6},
        {"cpu": 0.02},
        {"cpu": 0.02, "queued": 0.1},
        {"cpu": 0.02, "threads": True, "computed": 0.1},
        # The loop holds the GIL.
        {"cpu": 0.02, "threads": True, "computed": 0.9, "gil_long": 0.6},
        # The GIL is free at times.
        {"cpu": 0.15, "threads": True, "computed": 0.6, "gil_long": 0.4},
    ],
    "buffer": [
        {"busy": 0.4, "buffer": 2},
        {"busy": 0.4, "buffer": 5, "behind": 0.9},
        {"busy": 0.6, "step_p99": 0.6},
        {"busy": 0.6, "buffer": 100},
    ],
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause(cause):
    """Measurements tell causes apart; a DataLoader gets no advice on what it lacks."""
    for changed in CASES[cause]:
        assert advise(replace(PLAIN, **changed)).cause == cause, changed
        action = advise(replace(PLAIN, **changed | {"buffer": 0})).action
        assert not re.search(r"\bordered=|memory_limit|manager|buffer=", action)


def test_every_cause_has_a_case():
    """Each rule can be reached; docs/how-to/slow.md has the rules in their order."""
    assert [rule.cause for rule in RULES] == list(CASES)
    docs = Path(__file__).parents[2] / "docs" / "how-to" / "slow.md"
    if not docs.exists():
        pytest.skip("the package is installed without its docs")
    found = re.findall(r"^\| `'(\w+)'` ", docs.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == list(CASES)


PARTS = st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.79, 0.8, 1.0])
SECONDS = st.sampled_from([0.0, 1e-6, 1e-4, 0.003, 0.1, 5.0])
COUNTS = st.sampled_from([0, 1, 2, 8, 1000])
KINDS = {"int": COUNTS, "float": SECONDS, "float | None": st.one_of(st.none(), PARTS)}
IN_PARTS = {"busy", "behind", "early", "converting", "queued", "loop_queued", "gil_long"}
windows = st.builds(
    Window,
    **{
        field.name: PARTS
        if field.name in IN_PARTS
        else {"bool": st.booleans(), "str": st.just("")}.get(
            str(field.type), KINDS.get(str(field.type))
        )
        for field in fields(Window)
    }
    | {"cores": st.sampled_from([1, 2, 64])},
)


@given(windows)
def test_any_window(window):
    """There is always one cause, a number in the text, at most one action, and a gain in bounds."""
    advice = advise(window)
    assert advice.cause in CASES
    assert re.search(r"\d", advice.sentence)
    # Both also shorten the loop's own time.
    limits = {"gil": 64.0, "handover": 64.0}
    assert 1 <= advice.gain <= limits.get(advice.cause, max(window.most, 1)) + 1e-9
    assert set(advice.change) <= {"num_workers", "buffer", "num_converters"}
    assert len(advice.change) <= 1
    assert all(isinstance(value, int) and value >= 1 for value in advice.change.values())
    for name, value in advice.change.items():
        assert f"{name}={value}" in advice.action
    assert str(advice).startswith(f"{advice.cause}: {advice.sentence}")
    assert advice == replace(advise(replace(window, start=0.0)), start=advice.start)


def test_how_many_workers():
    """As many as the loop needs plus a tenth: more than now, and within the number of cores."""
    # 8 workers of 40 ms take 5 ms, like the step; there are 9 cores.
    assert advise(PLAIN).change == {"num_workers": 8}
    assert advise(replace(PLAIN, cores=64)).change == {"num_workers": math.ceil(1.1 * 40 / 5)}
    assert advise(replace(PLAIN, cores=6)).change == {"num_workers": 5}
    assert advise(replace(PLAIN, cpu=0.02, cores=2)).change == {"num_workers": 8}
    assert advise(replace(PLAIN, cpu=0.02, cores=2, step=0.02)).change == {"num_workers": 5}
    fewer = advise(replace(PLAIN, waited=0.1, busy=0.2, workers=16))
    assert "4 workers would be enough instead of 16" in fewer.sentence
    assert (fewer.change, fewer.action, fewer.gain) == ({}, "", 1.0)


def test_cores_that_are_used_up():
    """No number is named, as what the workers would compute with a core each is unknown."""
    few = advise(replace(PLAIN, workers=6, cores=2, cpu=0.3))
    assert (few.cause, few.change) == ("cores", {})
    assert few.action.startswith("try fewer workers, and find what uses the CPU")
    assert few.action.endswith("keep them with cseq.cached")
    assert "fewer" not in advise(replace(PLAIN, cores=4)).action
    loop_sleeps = replace(PLAIN, workers=2, cores=2, cpu=0.4, loop_cpu=0.1)
    assert advise(loop_sleeps).cause == "workers"


def test_a_buffer_lasts_as_long_as_a_pause():
    """It lasts for twice a pause's batches; if it already does, the slowest batches are named."""
    pauses = replace(PLAIN, busy=0.6, step_p99=0.5)
    assert advise(pauses).change == {"buffer": 2 * (50 + 4)}
    assert "and the buffer holds" in advise(pauses).sentence
    starved = advise(replace(pauses, waited=0.9 * PLAIN.elapsed))
    # All workers are then busy.
    assert (starved.cause, starved.gain) == ("buffer", pytest.approx(1 / 0.6))
    ready = advise(replace(pauses, buffer=200))
    assert ready.change == {}
    assert "stats().slowest" in ready.action


def test_what_no_worker_can_help():
    """The loop is the cause if its GPU is busy, or if it needs a core that others use."""
    fed = advise(replace(PLAIN, dry=0.02))
    assert "the GPU has enough work" in str(fed)
    assert (fed.action, fed.gain) == ("", 1.0)
    assert "waits for a core" not in str(fed)
    said = str(advise(held := replace(PLAIN, waited=0.0, loop_cpu=0.1, loop_queued=0.6, busy=0.2)))
    assert "waits for a core 60% of the time: other programs are using the cores" in said
    assert "other programs" not in str(advise(replace(held, loop_cpu=0.9, cores=2)))


def test_larger_batches():
    """The advice names a number and its maximum gain, which is small if samples take the time."""
    tiny = replace(
        PLAIN, batches=10**6, size=1.0, elapsed=4.0, waited=3.0, step=1e-6, index=2e-6, busy=0.25
    )
    said = advise(tiny)
    assert said.action == "larger batches, such as batch_size=32"
    assert (said.cause, said.change) == ("handover", {})
    # A larger batch takes longer to hand over.
    assert said.gain == pytest.approx(32 / 1.5)
    assert advise(replace(tiny, size=4.0)).action.endswith("=128")
    assert advise(replace(tiny, size=0.0)).action == "larger batches"
    worked = replace(tiny, elapsed=12.0, waited=11.0, index=15e-6, workers=2, busy=0.6)
    # 12 µs pass; 2 workers take 10 µs for the samples.
    assert advise(worked).gain == pytest.approx(2.4)
    assert advise(replace(worked, busy=0.9)).cause == "workers"


def test_cores_that_others_use():
    """The advice names no more workers, but the gain of free cores, for which none would queue."""
    crowded = replace(PLAIN, cpu=0.35, queued=0.6)
    said = advise(crowded)
    assert (said.cause, said.change) == ("cores", {})
    assert "computing 35% of that and waiting for a core 60%: other programs" in said.sentence
    # A loop that never waits has this gain, the maximum.
    assert said.gain == pytest.approx(2.0)
    assert advise(replace(crowded, waited=9.0)).gain == pytest.approx(2.5)
    assert crowded.room == crowded.workers
    own = advise(replace(crowded, workers=12, cpu=0.7, queued=0.3))
    assert "9 cores are used up" in own.sentence
    assert own.action.startswith("try fewer workers")


def test_the_rate_of_more_workers():
    """It grows up to the free cores; threads that hold the GIL share one."""
    window = replace(PLAIN, index=0.2, cpu=0.5, cores=16)
    assert window.room == 30
    assert window.rate(2) == pytest.approx(10)
    assert window.rate(50) == window.rate(30) == pytest.approx(150)
    threads = replace(PLAIN, threads=True, workers=2, cpu=0.25, computed=0.5)
    assert threads.room == 32
    assert replace(threads, gil_long=0.2).room == 4
    assert advise(replace(threads, gil_long=0.2, index=0.02)).gain == pytest.approx(4 / 2)


# A name describes a batch: in "py4, sleep1", a worker computes 4 ms in Python, and the step sleeps
# 1 ms.
MEASURED = json.loads((Path(__file__).parents[1] / "golden" / "advice.json").read_text("ascii"))


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: f"{r['loop']}, {r['kind']}, {r['others']}")
def test_what_was_measured(row):
    """The causes of loops on two cores beside other busy processes, and the gain of the advice.

    `got` is the speedup of a loop that followed the advice: it set `num_workers` or `batch_size`,
    or used processes instead of threads.
    """
    advice = advise(Window(**row["window"]))
    assert advice.cause == row["cause"]
    if row["got"] is not None:
        least, most = (0.5, 3.0) if advice.cause == "handover" else (0.6, 1.3)
        assert least < row["got"] / advice.gain < most


def test_the_start_is_a_line_of_its_own():
    """The rest covers the time after the first batch, no matter how long the start took."""
    slow = advise(replace(PLAIN, start=30.0))
    told, start = str(slow).splitlines()
    assert told == str(advise(PLAIN))
    assert start.startswith("start: the first batch came after 30 s → import what the workers need")
    for short in {"start": 1.9}, {"start": 30.0, "elapsed": 1000.0}, {"start": 2.5, "index": 0.2}:
        assert not advise(replace(PLAIN, **short)).start
    assert "constructor" not in advise(replace(PLAIN, start=30.0, buffer=0)).start
    # What all workers took to start is reported if it is a large part; no longer epoch is advised.
    late = advise(replace(PLAIN, waited=0.0, first=1.0))
    assert (late.cause, late.action) == ("loop", "")
    assert "before that, it waited 1 s until all workers had started" in late.sentence
    assert "before" not in advise(replace(PLAIN, waited=0.0, first=0.1)).sentence


def test_a_loop_that_makes_its_batches_itself():
    """With times, the advice is as many workers as would keep up; without, it is two."""
    assert advise(Window(batches=1)).change == {"num_workers": 2}
    # It makes a batch in 10 ms, and takes 2 ms for it: 6 workers would keep up.
    reads = Window(batches=200, elapsed=2.4, waited=2.0, step=0.002, index=0.01, cores=4, cpu=0.0)
    assert advise(reads).change == {"num_workers": 6}
    assert math.isclose(advise(reads).gain, 6.0)
    burns = advise(replace(reads, cpu=0.9))
    assert burns.change == {"num_workers": 3}
    assert math.isclose(burns.gain, 3.6)


def test_durations():
    """Two or three digits, and the unit."""
    seconds = (0, 3e-9, 38e-6, 0.0012, 0.9996, 90, 300, 9000)
    words = "0, 3 ns, 38 µs, 1.2 ms, 1 s, 90 s, 5 min, 2.5 h"
    assert ", ".join(map(duration, seconds)) == words
