"""`cseq top` reads runs of other processes, and survives whatever it finds there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cseq
from cseq import testing
from cseq.memory import facts
from cseq.meters import METER, Meters
from cseq.observe import attached
from cseq.observe.attached import (
    Attached,
    UnreadableError,
    Watched,
    Watcher,
    attach,
    stacks,
)
from cseq.observe.lines import WORKERS, bar, head, overview, ranks, workers
from cseq.observe.top import top
from cseq.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="it needs Linux's /proc"
)

TRAIN = """
import sys
import numpy as np
import cseq

class Rows:
    def __getitem__(self, indices):
        return indices * 2

if __name__ == "__main__":
    kind, rank, batches = getattr(cseq, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = {"num_workers": 2, "batch_size": 4, "out_type": "null", "seed": 7}
    manager = kind(Rows, 4000, shard=(rank, 2), **options)
    with manager.start() as started:
        iterator = iter(started)
        for _ in range(batches):
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


LAUNCHER = """
import subprocess
import sys

subprocess.run([sys.executable, *sys.argv[1:]])
"""


@contextmanager
def trainer(folder: Path, source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script that has taken some batches, and waits for a line."""
    script = folder / "train.py"
    script.write_text(source)
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    """Wait for something that comes soon."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(watcher: Watcher) -> str:
    """Write all about what was read in several widths, and return the widest."""
    for width in (60, 80, 140):
        lines = overview(watcher, width)
        assert max(map(len, lines)) <= width
    return "\n".join(lines)


def parts(line: str) -> list[str]:
    """Take what a line says apart."""
    return re.split("  +", line.strip())


def proceed(process: subprocess.Popen[str]) -> None:
    """Have the script go on to its next line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "finished\n"


@pytest.mark.needs("worker processes")
@pytest.mark.parametrize("kind", ["MPSequence", "MTSequence"])
def test_what_is_read(tmp_path: Path, kind: str) -> None:
    """Facts, counts, the loop's place; the end of the run, and that of the process."""
    with trainer(tmp_path, TRAIN, kind, 1, 20) as process:
        watcher = Watcher(process.pid)
        watcher.update()
        (run,) = watcher.runs
        told = run.run.facts
        assert (told["dset_size"], told["batch_size"], told["seed"]) == ("4000", "4", "7")
        assert (told["rank"], told["world_size"], told["length"]) == ("1", "2", "500")
        assert told["script"].endswith("train.py")
        assert run.stats is not None
        assert (run.stats.batches, run.stats.samples, run.stats.num_workers) == (20, 80, 2)
        assert run.place == (0, 20)
        names = {name for column in WORKERS for name in [column.name] if name}
        assert {"busy", "p99"} <= set(workers(run, 60)[0].split()) < names
        assert names == set(workers(run, 140)[0].split())
        first, *_, last = head(run, 140)
        assert {*parts(first), *parts(last)} < {
            part for line in head(run, 60) for part in parts(line)
        }
        said = written(watcher)
        assert f"train.py  pid {process.pid}  rank 1 of 2  2 {KINDS[kind]}  4,000 samples" in said
        assert "batch 20 of 500" in said
        proceed(process)
        until(lambda: [watcher.update(), run.ended][1])
        assert run.ended == "finished"
        assert run.stats.batches == 20
        process.kill()
        process.wait()
        watcher.update()
        assert "finished" in written(watcher)


KINDS = {"MPSequence": "processes", "MTSequence": "threads"}


@pytest.mark.needs("worker processes")
@pytest.mark.parametrize("look", [0.0, 1e9])
def test_the_trainer_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: float
) -> None:
    """What was read stays, and the end is said, whether new runs are looked for then or not."""
    monkeypatch.setattr(attached, "LOOK", look)
    with trainer(tmp_path, TRAIN, "MPSequence", 0, 20) as process:
        watcher = Watcher(process.pid)
        watcher.update()
        (run,) = watcher.runs
        process.kill()
        process.wait()
        watcher.update()
        assert run.ended == "ended"
        assert run.stats is not None
        assert run.stats.batches == 20
        watcher.update()
        assert "20 batches so far" in written(watcher)
        until(lambda: " MB" not in "".join(workers(run, 140)))  # they end after their trainer
        assert run.recent()[0] == pytest.approx(20 / run.stats.elapsed)
        assert written(watcher).count("ended") == 1


@pytest.mark.needs("worker processes")
def test_a_launcher_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that it has started is still read."""
    monkeypatch.setattr(attached, "LOOK", 0.0)
    inner = tmp_path / "inner.py"
    inner.write_text(TRAIN)
    with trainer(tmp_path, LAUNCHER, inner, "MPSequence", 0, 20) as process:
        watcher = Watcher(process.pid)
        watcher.update()
        (run,) = watcher.runs
        try:
            process.kill()
            process.wait()
            watcher.update()
            assert run.ended == ""
        finally:
            os.kill(run.run.pid, signal.SIGKILL)
        until(lambda: [watcher.update(), run.ended][1])
        assert run.ended == "ended"


@pytest.mark.needs("worker processes")
def test_a_loader_of_torch(tmp_path: Path) -> None:
    """`cseq.DataLoader` has the same meters: a ring for each worker."""
    pytest.importorskip("torch")
    with trainer(tmp_path, LOADER) as process:
        watcher = Watcher(process.pid)
        watcher.update()
        (run,) = watcher.runs
        assert run.stats is not None
        assert (run.stats.batches, run.stats.streams, run.stats.num_workers) == (30, True, 2)
        assert "2 processes" in written(watcher)
        assert ranks(watcher, 140)[1].split()[6:8] == ["0", "30"]

        def at_work() -> dict[int, tuple[int, int]]:
            watcher.update()
            return {k: (task.epoch, task.batch) for k, task in run.tasks.items()}

        until(lambda: at_work() == {0: (0, 32), 1: (0, 31)})
        assert re.search(r"^ +1 +\d+ index +0/31 ", written(watcher), re.MULTILINE)


def have_begun(pid: int) -> bool:
    """Look at a process once, for the pids of all its workers."""
    watcher = Watcher(pid)
    watcher.update()
    assert watcher.shown is not None
    names, *rows = workers(watcher.shown, 140)
    at = names.index("pid") + len("pid")
    return all(row[:at].split()[1:] for row in rows)


def test_another_number_of_workers() -> None:
    """Those that there are now are shown, and the buffer that was in use."""
    manager = cseq.MTSequence(np.arange(640), batch_size=4, num_workers=3, out_type="null", seed=1)
    watcher = Watcher(os.getpid())
    with manager.start() as started:
        next(iter(started))
        for count in (3, 1, 2):
            testing.resize(manager, num_workers=count)
            watcher.update()
            (run,) = watcher.runs
            assert run.stats is not None
            assert (run.run.workers, run.stats.num_workers) == (count, count)
            assert len(workers(run, 80)) == 1 + count


@pytest.mark.needs("worker processes")
def test_the_command(tmp_path: Path) -> None:
    """Lines once; the stacks of the workers; two ranks, each with a line."""
    command = [sys.executable, "-m", "cseq", "top"]
    with trainer(tmp_path, TRAIN, "MPSequence", 1, 20) as process:
        until(lambda: have_begun(process.pid))
        done = subprocess.run(
            [*command, str(process.pid), "--dump"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        heads = re.findall(r"train.py  pid \d+  rank 1 of 2, worker (\d), pid \d+:\n", done.stdout)
        assert heads == ["0", "1"]
        assert done.stdout.count("most recent call first") >= 2
        with trainer(tmp_path, TRAIN, "MTSequence", 0, 20):
            done = subprocess.run(
                [*command, str(os.getpid()), "--once"], capture_output=True, text=True, check=False
            )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["rank", "pid", "script"]
    assert {line[1:].split()[0] for line in lines[1:3]} == {"0", "1"}
    assert sorted(line[0] for line in lines[1:3]) == [" ", ">"]
    for pid, said in (
        (os.getpid(), "no run of cseq's was found"),
        (999999999, "no process 999999999"),
    ):
        done = subprocess.run(
            [*command, str(pid), "--once"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert said in done.stdout + done.stderr


def test_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs is said."""
    monkeypatch.setattr(sys, "platform", "win32")
    assert "needs Linux" in str(top(None, once=True, dump=False))


def test_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are written each second until Ctrl-C, over those of before."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", nap)
    assert top(os.getpid(), once=False, dump=False) == 0
    assert capsys.readouterr().out.count("\x1b[H\x1b[Jno run of cseq's was found") == 2


def test_stacks_of_strangers() -> None:
    """A process that would die of the signal is not sent any, whatever files it has."""
    with file_with(b"", "cseq-stacks") as fd:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", "print(input())"]
        with subprocess.Popen(command, pass_fds=[fd], **options) as process:
            assert stacks([process.pid, 0]) == ["", ""]
            assert process.communicate("still here")[0] == "still here\n"
            assert process.returncode == 0


def test_one_of_several_is_shown() -> None:
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
        assert first is not None
        assert [line[0] for line in overview(watcher, 80)[1:3]].count(">") == 1
        assert sorted(map(watcher.label, watcher.runs)) == ["0.1", "0.2"]
        assert all("64 / 4" in line for line in ranks(watcher, 140)[1:])
        managers[first.run.fact("seed")].finish()
        until(lambda: [watcher.update(), first.ended][1])
        assert first.ended == "finished"
        assert watcher.shown is not None
        assert watcher.shown.run.fact("seed") != first.run.fact("seed")
    finally:
        for manager in managers.values():
            manager.finish()


def measured(now: int, **of_worker: int) -> Meters:
    """Return the meters of a loop and one worker, in ns."""
    records = np.zeros(2, METER)
    records[0]["first"] = 1
    records[0]["work"]["sum"] = now
    records[1]["work"]["sum"] = of_worker.pop("worked", 0)
    for name, value in of_worker.items():
        records[1][name] = value
    return Meters([records.tobytes()], now, bytes)


def test_workers_that_were_replaced() -> None:
    """The ticket that one had in hand does not make what the next one does seem less."""
    second = 10**9
    before = measured(6 * second, since=second, thread=5)
    for thread, busy in (5, 0.0), (6, 2.0):
        after = measured(16 * second, worked=2 * second, thread=thread, cpu=second)
        assert after.since(before).busy.tolist() == [busy]


def test_the_cores_of_an_idle_worker() -> None:
    """They are of all the time: waking up takes more than a tiny batch does."""
    second = 10**9
    meters = measured(10 * second, worked=1000, thread=5, cpu=second)
    run = SimpleNamespace(process=lambda _: 0)
    shown = Watched(run, stats=Stats(num_workers=1, elapsed=10.0, meters=meters))  # type: ignore[arg-type]
    shown.whole.append((0.0, shown.stats))  # type: ignore[arg-type]
    names, line = workers(shown, 140)
    assert line[: names.index("cpu") + 3].split()[-1] == "0.10"


# -- files that are no runs


@contextmanager
def file_with(data: bytes, name: str = facts.FILE) -> Iterator[int]:
    """Make a file of a name that is looked for."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


def image() -> bytes:
    """Return the file of a run in this process."""
    manager = cseq.MTSequence(np.arange(64), batch_size=4, num_workers=2, out_type="null", seed=1)
    with manager.start() as started:
        iterator = iter(started)
        for _ in range(10):
            next(iterator)
        runs, _ = attach(os.getpid())
        assert len(runs) == 1
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.exists(path) and facts.FILE in os.readlink(path):
                with open(path, "rb") as file:
                    return file.read()
    raise AssertionError


def look_at(data: bytes) -> Watcher:
    """Read a file, and write all about it."""
    watcher = Watcher(os.getpid())
    with file_with(data):
        for _ in range(3):
            watcher.update()
            assert written(watcher)
    return watcher


@given(data=st.binary(max_size=20_000), facts_first=st.booleans())
def test_random_bytes(data: bytes, facts_first: bool) -> None:
    """No crash, and no run."""
    text = b"cseq facts 1\n" if facts_first else b""
    for whole in (data + text + bytes(facts.ROOM - len(text)), text + data):
        assert not look_at(whole).runs


@settings(deadline=None)
@given(data=st.data())
def test_an_overwritten_run(data: st.DataObject) -> None:
    """Any words of a run's file may be anything: it is read, or refused."""
    changed = bytearray(IMAGE.setdefault("data", image()))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(
            st.integers(0, 140)
            | st.integers(0, 20_000)
            | st.integers(len(changed) - 4096, len(changed) - 9)
        )
        changed[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    size = data.draw(st.just(len(changed)) | st.integers(0, len(changed)))
    look_at(bytes(changed[:size]))


IMAGE: dict[str, bytes] = {}


@given(script=st.text(max_size=300))
def test_facts_of_any_name(script: str) -> None:
    """They are read as they were written, without what a terminal would obey."""
    with file_with(bytes(facts.ROOM)) as fd:
        facts.write(fd, {"script": script, "pid": 7})
        said = script[:200].replace("\n", " ")
        expected = "".join(each if each.isprintable() else "?" for each in said)
        assert facts.read(fd) == {"script": expected, "pid": "7"}


def test_a_run_that_is_cut_off() -> None:
    """It is no longer read; what was read stays."""
    watcher = Watcher(os.getpid())
    with file_with(image()) as fd:
        watcher.update()
        os.ftruncate(fd, 0)
        watcher.update()
    (run,) = watcher.runs
    assert run.ended == "cannot be read: the file ends after 0 bytes"
    assert "10 batches so far" in written(watcher)


def test_another_version() -> None:
    """A ring of another layout is named as such; the right one is read."""
    data = bytearray(image())
    (whole,) = look_at(bytes(data)).runs
    assert whole.stats is not None
    assert whole.stats.batches == 10
    data[4] += 1  # the layout's number
    with file_with(bytes(data)) as fd, pytest.raises(UnreadableError, match="another version"):
        Attached(fd, os.getpid())
    with file_with(bytes(data)):
        _, problems = attach(os.getpid())
        assert "another version of cseq: layout" in problems[0]
    data[4] -= 1
    data[11] = 255  # of the number of cells
    with file_with(bytes(data)) as fd, pytest.raises(UnreadableError, match="does not fit"):
        Attached(fd, os.getpid())


# -- what is written


def test_drawings() -> None:
    """Bars keep their width, whatever the values."""
    assert [bar(share, 4) for share in (-1, 0, 0.5, 0.53, 1, 7)] == [
        "    ", "    ", "██  ", "██▏ ", "████", "████"
    ]  # fmt: skip
