"""A trace of every batch: its events, their order, and a file that is always whole."""

import contextlib
import gzip
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pytest
from adverse import Fatal, kill_myself
from counting import Numbers
from forking import in_child
from kinds import FEW, FIRST_PROCESS, INLINE, THREAD, by_name

import cseq
from cseq.stream import Streams

SAMPLES = 24
# In seconds; steps take at least this long.
STEP = 0.001


class Slow:
    def __getitem__(self, indices):
        return np.repeat(indices, 20_000)


@pytest.fixture
def path(tmp_path):
    """Return a trace's path."""
    return tmp_path / "run.json"


def read(path):
    """Read a trace, and check its schema, and the nesting of each lane's slices."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    assert trace["baseTimeNanoseconds"] % (7_889_238 * 10**9) == 0
    needed = {"X": {"dur"}, "i": {"s"}, "M": {"args"}}
    by_lane = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} | needed[event["ph"]] <= event.keys()
        if event["ph"] == "X":
            begin = round(1000 * event["ts"])
            end = begin + round(1000 * event["dur"])
            by_lane[event["pid"], event["tid"]].append((begin, -end, event["name"]))
    for slices in by_lane.values():
        ends = []
        for begin, end, name in sorted(slices):
            while ends and ends[-1] <= begin + 1000:
                # A float stores this year's time to about 500 ns.
                ends.pop()
            assert not ends or -end <= ends[-1] + 1000, name
            ends.append(-end)
    return trace


def named(trace, word, phase="X"):
    """Return the events whose names begin with a word, in order of time."""
    found = [e for e in trace["traceEvents"] if e["ph"] == phase and e["name"].split()[0] == word]
    return sorted(found, key=lambda e: e["ts"])


def lanes(trace):
    """Return the names of the lanes."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named(trace, "thread_name", "M")}


def go_through(batches):
    """Iterate in steps that are not short."""
    count = 0
    for _ in batches:
        count += 1
        time.sleep(STEP)
    return count


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_every_batch(kind, path):
    """The trace tells who made each batch and when, and when the loop had it."""
    with cseq.trace(path), kind.start(Slow, SAMPLES, batch_size=2) as batches:
        assert go_through(batches) == 12
    trace = read(path)
    assert trace["otherData"] == {"cseq": cseq.__version__, "tickets": 12}
    made = named(trace, "index")
    assert {e["name"] for e in made} == {f"index 0/{k}" for k in range(12)}
    assert [e["name"] for e in named(trace, "train")] == [f"train 0/{k}" for k in range(11)]
    names = lanes(trace)
    assert {e["pid"] for e in made} == {os.getpid()}
    makers = {"worker 0", "worker 1", "indexer (test mode)"}
    assert {names[e["pid"], e["tid"]] for e in made} <= makers
    assert {names[e["pid"], e["tid"]] for e in named(trace, "train")} == {"loop"}


def test_streams(path):
    """Items replace batches; each worker has its lane."""
    # The streams started before the trace.
    with Streams(Numbers, 2) as streams, cseq.trace(path):
        streams.begin([6, 6])
        assert go_through(streams) == 12
    trace = read(path)
    count = Counter(e["name"] for e in named(trace, "index"))
    assert count == {f"index 0/{k}": 2 for k in range(6)}
    assert len({e["tid"] for e in named(trace, "index")}) == 2


def test_a_worker_dies(path, tmp_path):
    """Its end, its replacement's start, and the lost batch appear."""
    manager = FIRST_PROCESS.make(
        partial(Fatal, tmp_path, kill_myself, [6]), SAMPLES, 1, batch_size=2, shuffle=False
    )
    with cseq.trace(path), manager.start() as batches:
        assert go_through(batches) == 12
    trace = read(path)
    [death] = named(trace, "death", "i")
    [lost] = [e for e in named(trace, "index") if e["name"] == "index 0/3 (lost)"]
    assert {e["tid"] for e in named(trace, "index")} == {lost["tid"]}
    assert len([e for e in named(trace, "index") if e["name"] == "index 0/3"]) == 1
    begun = death["name"].replace("death", "start")
    pids = [e["args"]["pid"] for e in named(trace, "start", "i") if e["name"] == begun]
    assert len(set(pids)) == len(pids) == 2


def test_the_newest_are_kept(tmp_path, caplog):
    """The file, which is packed here, and the log report what was dropped."""
    caplog.set_level(logging.WARNING, "cseq")
    path = tmp_path / "of %p, %r.json.gz"
    with cseq.trace(path, tickets=5), THREAD.start(Slow, SAMPLES, batch_size=2) as batches:
        go_through(batches)
    trace = read(tmp_path / f"of {os.getpid()}, 0.json.gz")
    assert [e["name"] for e in named(trace, "train")] == [f"train 0/{k}" for k in range(7, 11)]
    assert trace["otherData"]["tickets"] == 5
    assert trace["otherData"]["dropped"] == "the first 7 tickets"
    assert "it lacks the first 7 tickets" in caplog.text


def test_two_managers(path):
    """Each has its workers' lanes, in the order of the starts; there is one loop."""
    options = {"dset_size": SAMPLES, "batch_size": 2}
    # Two start before the trace, which has no events of the second.
    with FIRST_PROCESS.start(Slow, **options) as ones, THREAD.start(Slow, **options) as unused:
        list(unused)
        first = iter(ones)
        next(first)
        with cseq.trace(path), THREAD.start(Slow, **options) as others:
            for _ in zip(first, others, strict=False):
                time.sleep(STEP)
    trace = read(path)
    names = Counter(
        lanes(trace)[e["pid"], e["tid"]].partition(" of ")[2] for e in named(trace, "index")
    )
    assert names.keys() == {"manager 1", "manager 3"}
    assert len(named(trace, "train")) == 21


def test_one_at_a_time(path, tmp_path):
    """A trace inside a trace is an error, and leaves the outer one unchanged."""
    manager = THREAD.make(Slow, SAMPLES, batch_size=2)
    with cseq.trace(path):
        with pytest.raises(RuntimeError, match=r"already recording a trace to .*run\.json"):
            cseq.trace(tmp_path / "other.json").__enter__()
        with pytest.raises(RuntimeError, match="already"):
            manager.start(trace=tmp_path / "third.json")
        with manager.start() as batches:
            go_through(batches)
    assert len(named(read(path), "index")) == 12
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "path=3 is not a str"),
        (b"run.json", TypeError, r"path=b'run.json' is not a str"),
        ("run.txt", ValueError, "does not end in .json or .json.gz"),
        ("no/such/run.json", FileNotFoundError, r"no\W+such"),
    ],
)
def test_wrong_paths(given, error, message, tmp_path):
    """They are found before anything is recorded."""
    if isinstance(given, str):
        given = str(tmp_path / given)
    with pytest.raises(error, match=message), cseq.trace(given):
        pytest.fail("it began")
    with pytest.raises(ValueError, match="tickets=0"):
        cseq.trace("run.json", tickets=0)


@pytest.mark.parametrize("how", ["trace", "start"])
def test_a_trace_that_cannot_be_written(how, path, caplog):
    """An OSError names it; a training exception comes out instead, with the OSError in the log."""

    def train(error):
        manager = THREAD.make(Slow, SAMPLES, batch_size=2)
        tracing = cseq.trace(path) if how == "trace" else contextlib.nullcontext()
        with tracing, manager.start(trace=None if how == "trace" else path) as batches:
            next(iter(batches))
            # The folder blocks the file.
            path.mkdir(exist_ok=True)
            if error is not None:
                raise error

    with pytest.raises(OSError, match=r"run\.json") as caught:
        train(None)
    assert caught.value.filename == str(path)
    path.rmdir()
    with pytest.raises(ZeroDivisionError, match="of the training"):
        train(ZeroDivisionError("of the training"))
    assert f"the trace {path} was not written: " in caplog.text
    assert os.listdir(path.parent) == ["run.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_a_link_in_its_place_is_not_followed(tmp_path):
    """Others may write to the folder; the target of their link must not be overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in "run.json", "run.json.gz":
        (tmp_path / f"{name}.{os.getpid()}.part").symlink_to(victim)
        with cseq.trace(tmp_path / name):
            pass
        read(tmp_path / name)
    assert victim.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 3


SCRIPT = """
import os, signal, sys, time
import numpy as np, cseq
def go():
    manager = cseq.MPSequence(np.arange(1000), batch_size=2, num_workers=1, out_type="null")
    with manager.start() as batches:
        for k, _ in enumerate(batches):
            time.sleep(0.001)
            if k == 20:
                signal.raise_signal(signal.SIGINT)
if __name__ == "__main__":
    if sys.argv[1:]:
        with cseq.trace(sys.argv[1]):
            go()
    go()
"""


@pytest.mark.parametrize("how", ["with", "CSEQ_TRACE"])
def test_ctrl_c(how, run_script, path):
    """It leaves a whole file, with all events up to it."""
    told = {"CSEQ_TRACE": str(path)} if how == "CSEQ_TRACE" else {}
    done = run_script(SCRIPT, *([] if told else [str(path)]), **told)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    trace = read(path)
    assert trace["otherData"]["tickets"] == 21
    assert not list(path.parent.glob("*.part"))


@pytest.mark.needs("fork")
def test_a_forked_child_records_nothing(path):
    """The trace belongs to the process that began it."""
    manager = INLINE.make(Slow, SAMPLES, batch_size=2)
    with cseq.trace(path):
        assert in_child(lambda: go_through(manager.start_test()) == 12)
        with manager.start_test() as batches:
            next(iter(batches))
    assert [e["name"] for e in named(read(path), "index")] == ["index 0/0"]


def has_own_number(path):
    """Return whether a trace in test mode shows the number of this thread."""
    with cseq.trace(path), INLINE.start(Slow, SAMPLES, batch_size=2) as batches:
        next(iter(batches))
    (row,) = named(read(path), "index")
    return row["tid"] == threading.get_native_id()


@pytest.mark.needs("fork")
def test_a_forked_child_records_its_own_thread(tmp_path):
    """The number that the thread had in its parent is forgotten."""
    assert has_own_number(tmp_path / "parent.json")
    assert in_child(lambda: has_own_number(tmp_path / "child.json"))


# torch 2.12 warns of this.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_beside_torchs_profiler(tmp_path):
    """Both files have one base and one clock, so the merged file is in the right order."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        cseq.trace(ours),
        INLINE.start(Slow, SAMPLES, batch_size=2) as batches,
    ):
        for k, _ in enumerate(batches):
            with record_function(f"b {k}"):
                torch.ones(3).sum()
                time.sleep(STEP)
    profiler.export_chrome_trace(str(theirs))
    one, other = read(ours), read(theirs)
    assert one["baseTimeNanoseconds"] == other["baseTimeNanoseconds"]
    events = [
        *(e for e in one["traceEvents"] if e["name"].startswith("index ")),
        *(e for e in other["traceEvents"] if e["name"][:2] == "b " and e["ph"] == "X"),
    ]
    order = [e["name"] for e in sorted(events, key=lambda e: e["ts"]) if e["ph"] == "X"]
    assert order == [name for k in range(12) for name in (f"index 0/{k}", f"b {k}")]
