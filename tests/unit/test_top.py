"""`cseq top` reads other processes' runs, and survives whatever it finds there."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resizing import resize
from waiting import until

import cseq
from cseq._memory import Descriptor
from cseq.engine.crews.base import RUN
from cseq.measure.meters import METER, Meters
from cseq.measure.stats import Stats
from cseq.observe import attached
from cseq.observe.attached import AttachedRun, Watcher
from cseq.observe.lines import head, overview, ranks, workers
from cseq.observe.top import top

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="it needs Linux's /proc"
)

TRAIN = """
import sys
import numpy as np
import cseq
if __name__ == "__main__":
    kind, rank = getattr(cseq, sys.argv[1]), int(sys.argv[2])
    options = {"num_workers": 2, "batch_size": 4, "out_type": "null", "seed": 7}
    manager = kind(np.arange(4000), shard=(rank, 2), **options)
    with manager.start() as started:
        iterator = iter(started)
        for _ in range(20):
            next(iterator)
        print("taken", flush=True)
        sys.stdin.readline()
        manager.skipped
    print("finished", flush=True)
    sys.stdin.readline()
"""
LOADER = """
import sys
import time
from cseq import DataLoader
class Numbers:
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        if i >= 4 * 31:
            time.sleep(1000)
        return i
if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
    iterator = iter(loader)
    for _ in range(30):
        next(iterator)
    print("taken", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def trainer(folder, source, *arguments):
    """Run a script that has taken some batches, and waits for a line."""
    script = folder / "train.py"
    script.write_text(source)
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "taken\n"
        watcher = Watcher(process.pid)
        watcher.update()
        yield process, watcher
    finally:
        process.kill()
        process.communicate()


def written(watcher):
    """Write all that was read in several widths; return the widest."""
    for width in (60, 80, 140):
        lines = overview(watcher, width)
        assert max(map(len, lines)) <= width
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["MPSequence", "MTSequence"])
def test_what_is_read(tmp_path, kind):
    """It has facts, counts, the loop's place, and the ends of the run and of the process."""
    with trainer(tmp_path, TRAIN, kind, 1) as (process, watcher):
        (run,) = watcher.runs
        facts = run.facts
        assert (facts["dset_size"], facts["batch_size"], facts["seed"]) == (4000, 4, 7)
        assert (facts["rank"], facts["world_size"], facts["length"]) == (1, 2, 500)
        assert (run.stats.batches, run.stats.samples, run.stats.num_workers) == (20, 80, 2)
        assert run.next_batch == (0, 20)
        assert "p99" in workers(run, 53)[0] < workers(run, 140)[0]
        assert len(head(run, 60)) > len(head(run, 140))
        said = written(watcher)
        of = {"MPSequence": "processes", "MTSequence": "threads"}[kind]
        assert f"train.py  pid {process.pid}  rank 1 of 2  2 {of}  4,000 samples" in said
        assert "batch 20 of 500" in said
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "finished\n"
        until(lambda: [watcher.update(), run.ended][1])
        assert run.ended == "finished"
        assert run.stats.batches == 20
        process.kill()
        process.wait()
        watcher.update()
        assert "finished" in written(watcher)


@pytest.mark.parametrize("look", [0.0, 1e9])
def test_the_trainer_is_killed(tmp_path, monkeypatch, look):
    """What was read stays, and the end is reported, with or without a search for new runs."""
    monkeypatch.setattr(attached, "LOOK", look)
    with trainer(tmp_path, TRAIN, "MPSequence", 0) as (process, watcher):
        (run,) = watcher.runs
        process.kill()
        process.wait()
        watcher.update()
        assert run.ended == "ended"
        assert run.stats.batches == 20
        watcher.update()
        assert "20 batches so far" in written(watcher)
        until(lambda: " MB" not in "".join(workers(run, 140)))
        assert run.since(1.0) is run.stats
        assert written(watcher).count("ended") == 1


def test_a_loader_of_torch(tmp_path):
    """`cseq.DataLoader` has the same meters, with a ring for each worker."""
    pytest.importorskip("torch")
    with trainer(tmp_path, LOADER) as (_, watcher):
        (run,) = watcher.runs
        assert (run.stats.batches, run.stats.buffer, run.stats.num_workers) == (30, 0, 2)
        assert "2 processes" in written(watcher)
        assert ranks(watcher, 140)[1].split()[6:8] == ["0", "30"]

        def at_work():
            watcher.update()
            return {k: (epoch, batch) for k, (epoch, batch, _) in run.tasks.items()}

        until(lambda: at_work() == {0: (0, 32), 1: (0, 31)})
        assert re.search(r"^ +1 +index +\d+% +0/31 ", written(watcher), re.MULTILINE)


def have_begun(watcher):
    """Return whether the pids of all workers are shown."""
    watcher.update()
    names, *rows = workers(watcher.shown, 140)
    at = names.index("pid") + len("pid")
    return all(row[at - 7 : at].strip() for row in rows)


def test_another_number_of_workers():
    """The current workers are shown, with the buffer in use."""
    manager = cseq.MTSequence(np.arange(640), batch_size=4, num_workers=3, out_type="null", seed=1)
    watcher = Watcher(os.getpid())
    with manager.start() as started:
        next(iter(started))
        for count in (3, 1, 2):
            resize(manager, num_workers=count)
            watcher.update()
            (run,) = watcher.runs
            assert run.stats.num_workers == count
            assert len(workers(run, 80)) == 1 + count


def test_the_command(run_command, tmp_path):
    """It prints once; two ranks have a line each."""
    with trainer(tmp_path, TRAIN, "MPSequence", 1) as (_, watcher):
        until(lambda: have_begun(watcher))
        with trainer(tmp_path, TRAIN, "MTSequence", 0):
            done = run_command(tmp_path, "top", str(os.getpid()), "--once")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["rank", "waits", "cause"]
    assert {line[1:].split()[0] for line in lines[1:3]} == {"0", "1"}
    assert sorted(line[0] for line in lines[1:3]) == [" ", ">"]
    for pid, said in ((os.getpid(), "no run of cseq was found"), (10**9, "no process 1000000000")):
        done = run_command(tmp_path, "top", str(pid), "--once")
        assert done.returncode == 1
        assert said in done.stdout + done.stderr


def test_a_terminal(monkeypatch, capsys):
    """Lines are written each second until Ctrl-C, over the previous ones, but on Linux alone."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", nap)
    assert top(os.getpid(), once=False) == 0
    assert capsys.readouterr().out.count("\x1b[H\x1b[Jno run of cseq was found") == 2
    monkeypatch.setattr(sys, "platform", "win32")
    assert "needs Linux" in str(top(None, once=True))


def test_one_of_several_is_shown():
    """It stays until it ends."""
    make = partial(cseq.MTSequence, np.arange(64), batch_size=4, num_workers=1, out_type="null")
    managers = {seed: make(seed=seed) for seed in (1, 2)}
    watcher = Watcher(os.getpid())
    try:
        for manager in managers.values():
            manager.start()
            next(iter(manager))
        watcher.update()
        first = watcher.shown
        watcher.update()
        assert watcher.shown is first
        assert [line[0] for line in overview(watcher, 80)[1:3]].count(">") == 1
        assert all("64 / 4" in line for line in ranks(watcher, 140)[1:])
        managers[first.fact("seed")].finish()
        until(lambda: [watcher.update(), first.ended][1])
        assert first.ended == "finished"
        assert watcher.shown.fact("seed") != first.fact("seed")
    finally:
        for manager in managers.values():
            manager.finish()


def measured(now, **of_worker):
    """Return the meters of a loop and one worker, in ns."""
    records = np.zeros(2, METER)
    records[0]["first"] = 1
    records[0]["work"]["sum"] = now
    records[1]["work"]["sum"] = of_worker.pop("worked", 0)
    for name, value in of_worker.items():
        records[1][name] = value
    return Meters([records.tobytes()], now)


def test_workers_that_were_replaced():
    """The old worker's ticket in hand does not reduce the next one's work."""
    second = 10**9
    before = measured(6 * second, since=second, thread=5)
    for thread, busy in (5, 0.0), (6, 2.0):
        after = measured(16 * second, worked=2 * second, thread=thread, cpu=second)
        assert after.since(before).busy.tolist() == [busy]


def test_the_cores_of_an_idle_worker():
    """They cover all of its time, as waking up takes more than a tiny batch does."""
    second = 10**9
    meters = measured(10 * second, worked=1000, thread=5, cpu=second)
    run = AttachedRun(Descriptor(os.open, os.devnull, os.O_RDONLY), os.getpid(), {})
    run.stats = Stats(num_workers=1, elapsed=10.0, meters=meters)
    names, line = workers(run, 140)
    assert line[: names.index("cpu") + 3].split()[-1] == "0.10"


def test_the_name_of_a_script():
    """It has no characters that a terminal would obey."""
    process = subprocess.Popen(["a/tra\x1bin.py"], executable=sys.executable, stdin=subprocess.PIPE)
    try:
        # It is empty in the middle of an exec.
        until(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        run = AttachedRun(Descriptor(os.open, os.devnull, os.O_RDONLY), process.pid, {})
        assert run.title == ["tra?in.py", f"pid {process.pid}"]
    finally:
        process.communicate()


@contextmanager
def file_with(data, name):
    """Make a file with a name that is searched for."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@cache
def image():
    """Return the file of a run in this process, and its name."""
    manager = cseq.MTSequence(np.arange(64), batch_size=4, num_workers=2, out_type="null", seed=1)
    with manager.start() as started:
        iterator = iter(started)
        for _ in range(10):
            next(iterator)
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.exists(path) and RUN in (called := os.readlink(path)):
                with open(path, "rb") as file:
                    found = called.removeprefix("/memfd:").removesuffix(" (deleted)")
                    return file.read(), found
    raise AssertionError


def look_at(data, name):
    """Read a file, which does not change, and write all that was read."""
    watcher = Watcher(os.getpid())
    with file_with(data, name) as fd:
        for _ in range(3):
            watcher.update()
            assert written(watcher)
        assert os.pread(fd, len(data) + 1, 0) == data
    return watcher


@settings(deadline=None)
@given(data=st.data())
def test_an_overwritten_run(data):
    """Any word of a run's file may be anything: the file is read, or refused."""
    whole, name = image()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, 140) | st.integers(0, 20_000))
        changed[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    size = data.draw(st.just(len(changed)) | st.integers(0, len(changed)))
    look_at(bytes(changed[:size]), name)


def test_a_run_that_is_cut_off():
    """It is no longer read; what was read stays."""
    watcher = Watcher(os.getpid())
    with file_with(*image()) as fd:
        watcher.update()
        os.ftruncate(fd, 0)
        watcher.update()
    (run,) = watcher.runs
    assert run.ended.startswith("cannot be read: this memory does not contain a ring")
    assert "10 batches so far" in written(watcher)


def test_another_version():
    """A ring with another layout, or an impossible size, is refused by name."""
    data, name = image()
    assert [run.stats.batches for run in look_at(data, name).runs] == [10]
    # The words are the layout, the cells, and the indices in each cell.
    for at, word in (4, 1), (8, 2**32 - 1), (12, 2**32 - 1):
        changed = data[:at] + word.to_bytes(4, sys.byteorder) + data[at + 4 :]
        watcher = look_at(changed, name)
        assert not watcher.runs
        assert "does not contain a ring of this version of cseq" in " ".join(overview(watcher, 400))
