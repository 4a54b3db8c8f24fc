"""The rules of the advice: one cause for every window, no numbers that contradict each other."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cseq.measure.advice import RULES, Window, advise, duration

# 1000 batches in 10 seconds: 4 of 9 cores' workers, 40 ms a batch, steps of 5 ms.
PLAIN = Window(
    batches=1000, elapsed=10.0, waited=5.0, step=0.005, step_p99=0.006,
    index=0.04, index_p99=0.05, workers=4, busy=1.0, cpu=0.95, cores=9, buffer=10,
)  # fmt: skip

CASES = {
    "unknown": [{"batches": 7}, {"elapsed": 0.0}, {"batches": 0, "elapsed": 0.0, "workers": 0}],
    "inline": [{"workers": 0}, {"workers": 0, "batches": 1, "elapsed": 0.0}],
    "gil": [
        {"threads": True, "gil": 0.004, "computed": 1.0},
        {"threads": True, "gil": 0.004, "computed": 1.0, "waited": 0.1},  # it hides in the step
        {"threads": True, "gil": 0.004, "computed": 1.0, "busy": 0.5, "behind": 1.0},
        {"threads": True, "gil": 0.004, "computed": 0.2, "cpu": 0.05},  # others compute here
    ],
    "loop": [
        {"waited": 0.4},
        {"waited": 0.4, "busy": 0.1},
        {"waited": 0.4, "workers": 0},
        {"waited": 0.0, "threads": True, "gil": 0.005, "computed": 1.0, "cpu": 0.01},  # its GIL
        {"waited": 0.0, "threads": True, "gil": 0.005, "computed": 0.3, "busy": 0.08},  # it is free
        {"dry": 0.02},
        {"dry": 0.02, "busy": 0.3},
        {"batches": 10**6},
    ],
    "converters": [{"converters": 2, "converting": 0.95, "busy": 0.3}],
    "memory": [{"copies": 200}],
    "epochs": [{"busy": 0.6, "early": 0.8}, {"busy": 0.6, "early": 0.8, "behind": 0.8}],
    "stragglers": [{"busy": 0.4, "behind": 0.9, "index_p99": 0.4}],
    "cores": [{"cores": 4}, {"cores": 2, "cpu": 0.25}],
    "workers": [
        {},
        {"cpu": None},
        {"waited": 0.6},
        {"dry": 0.5},
        {"threads": True, "computed": 4.0, "gil": 2e-3},
        {"cpu": 0.02},
        {"cpu": 0.02, "threads": True, "computed": 0.1, "gil": 1e-5},
        {"cpu": 0.02, "threads": True, "computed": 0.8, "gil": 0.004},  # the loop's
    ],
    "buffer": [
        {"busy": 0.4, "buffer": 2},
        {"busy": 0.4, "buffer": 5, "behind": 0.9},
        {"busy": 0.6, "step_p99": 0.6},
        {"busy": 0.6, "buffer": 100},
    ],
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause(cause: str) -> None:
    """What is measured tells the causes apart, whatever else was measured."""
    for changed in CASES[cause]:
        assert advise(replace(PLAIN, **changed)).cause == cause, changed


def test_every_cause_has_a_case() -> None:
    """And each rule can be reached."""
    assert [rule.cause for rule in RULES] == list(CASES)


PARTS = st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.79, 0.8, 1.0])
SECONDS = st.sampled_from([0.0, 1e-6, 1e-4, 0.003, 0.1, 5.0])
COUNTS = st.sampled_from([0, 1, 2, 8, 1000])
KINDS = {"int": COUNTS, "float": SECONDS, "float | None": st.one_of(st.none(), PARTS)}
IN_PARTS = {"busy", "behind", "early", "converting"}
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
def test_any_window(window: Window) -> None:
    """Always one cause, always a number in the text, at most one action, and a gain in bounds."""
    advice = advise(window)
    assert advice.cause in CASES
    assert re.search(r"\d", advice.sentence)
    assert 1 <= advice.gain <= max(window.most, 1) + 1e-9 or advice.cause == "gil"
    assert set(advice.change) <= {"num_workers", "buffer", "num_converters"}
    assert len(advice.change) <= 1
    assert all(isinstance(value, int) and value >= 1 for value in advice.change.values())
    for name, value in advice.change.items():
        assert f"{name}={value}" in advice.action
    assert str(advice).startswith(f"{advice.cause}: {advice.sentence}")
    assert advice == replace(advise(replace(window, start=0.0)), start=advice.start)


def test_how_many_workers() -> None:
    """As many as the loop needs, and a tenth; more than there are; within the cores' number."""
    assert advise(PLAIN).change == {"num_workers": 8}  # 40 ms in 8 workers: 5 ms, the step; 9 cores
    assert advise(replace(PLAIN, cores=64)).change == {"num_workers": math.ceil(1.1 * 40 / 5)}
    assert advise(replace(PLAIN, cores=6)).change == {"num_workers": 5}
    assert advise(replace(PLAIN, cpu=0.02, cores=2)).change == {"num_workers": 8}
    assert advise(replace(PLAIN, cpu=0.02, cores=2, step=0.02)).change == {"num_workers": 5}
    fewer = advise(replace(PLAIN, waited=0.1, busy=0.2, workers=16))
    assert "4 workers would be enough, not 16" in fewer.sentence
    assert (fewer.change, fewer.action, fewer.gain) == ({}, "", 1.0)


def test_cores_that_are_used_up() -> None:
    """No number is named: what the workers would compute with a core each is not known."""
    few = advise(replace(PLAIN, workers=6, cores=2, cpu=0.3))
    assert (few.cause, few.change) == ("cores", {})
    assert few.action.startswith("try fewer workers, and find what uses the CPU")
    assert "fewer" not in advise(replace(PLAIN, cores=4)).action
    loop_sleeps = replace(PLAIN, workers=2, cores=2, cpu=0.4, loop_cpu=0.1)
    assert advise(loop_sleeps).cause == "workers"


def test_a_buffer_lasts_as_long_as_a_pause() -> None:
    """Twice what is made in the meantime; where it does already, the slowest batches are named."""
    pauses = replace(PLAIN, busy=0.6, step_p99=0.5)
    assert advise(pauses).change == {"buffer": 2 * (50 + 4)}
    assert "batches are ahead" in advise(pauses).sentence
    starved = advise(replace(pauses, waited=0.9 * PLAIN.elapsed))
    assert (starved.cause, starved.gain) == ("buffer", pytest.approx(1 / 0.6))  # all busy, then
    ready = advise(replace(pauses, buffer=200))
    assert ready.change == {}
    assert "stats().slowest" in ready.action


def test_what_no_worker_can_help() -> None:
    """The loop is the cause where its GPU is fed, or a batch is handed over in no time."""
    assert "the GPU has enough work" in str(advise(replace(PLAIN, dry=0.02)))
    assert "handing over a batch" in str(advise(replace(PLAIN, batches=10**6)))
    for advice in advise(replace(PLAIN, dry=0.02)), advise(replace(PLAIN, batches=10**6)):
        assert (advice.action, advice.gain) == ("", 1.0)


@pytest.mark.parametrize("cause", CASES)
def test_what_a_stream_has_not_is_not_named(cause: str) -> None:
    """A DataLoader has no such arguments."""
    for changed in CASES[cause]:
        action = advise(replace(PLAIN, **changed | {"buffer": 0})).action
        assert not re.search(r"preload|\bordered=|memory_limit|manager|buffer=", action)


def test_the_start_is_a_line_of_its_own() -> None:
    """The rest is of the time after the first batch, whatever came before that took."""
    slow = advise(replace(PLAIN, start=30.0))
    told, start = str(slow).splitlines()
    assert told == str(advise(PLAIN))
    assert start.startswith("start: the first batch came after 30 s → name the modules")
    for short in {"start": 1.9}, {"start": 30.0, "elapsed": 1000.0}, {"start": 2.5, "index": 0.2}:
        assert not advise(replace(PLAIN, **short)).start
    assert "preload" not in advise(replace(PLAIN, start=30.0, buffer=0)).start


def test_a_loop_that_makes_its_batches_itself() -> None:
    """As many workers as would keep up, where there are times; else two."""
    assert advise(Window(batches=1)).change == {"num_workers": 2}
    # it makes a batch in 10 ms, and takes 2 ms for it: 6 would keep up
    reads = Window(batches=200, elapsed=2.4, waited=2.0, step=0.002, index=0.01, cores=4, cpu=0.0)
    assert advise(reads).change == {"num_workers": 6}
    assert math.isclose(advise(reads).gain, 6.0)
    burns = advise(replace(reads, cpu=0.9))  # 3 have a core each
    assert burns.change == {"num_workers": 3}
    assert math.isclose(burns.gain, 3.6)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0"),
        (3e-9, "3 ns"),
        (38e-6, "38 µs"),
        (0.0012, "1.2 ms"),
        (0.9996, "1 s"),
        (90, "90 s"),
        (300, "5 min"),
        (9000, "2.5 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    """Two digits, or three, and the unit."""
    assert duration(seconds) == words


def test_the_rate_of_more_workers() -> None:
    """It grows with them, up to the cores that the loop leaves."""
    window = replace(PLAIN, index=0.2, cpu=0.5, cores=16)
    assert window.room == 30
    assert window.rate(2) == pytest.approx(10)
    assert window.rate(50) == window.rate(30) == pytest.approx(150)


def test_the_table_of_the_documentation() -> None:
    """docs/how-to/slow.md has the rules in their order."""
    docs = Path(__file__).parents[2] / "docs" / "how-to" / "slow.md"
    if not docs.exists():
        pytest.skip("the package is installed without its docs")
    found = re.findall(r"^\| `'(\w+)'` ", docs.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [rule.cause for rule in RULES]
