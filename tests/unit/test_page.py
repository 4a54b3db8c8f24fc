"""A report is one valid page of the measurements, without a script or a network."""

import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import cseq
from cseq.measure.advice import Window
from cseq.measure.stats import Stats
from cseq.report import page

FIGURES = ["Waiting over time", "How many workers would be enough", "A worker's time for a batch"]
FIGURES += ["Batches ready", "Batches a second", "Workers over time"]


class Rows:
    """Batches of samples' numbers; sample 7 is slow."""

    def __getitem__(self, indices):
        if 7 in indices:
            time.sleep(0.02)
        return np.asarray(indices)


class Parsed(HTMLParser):
    """The content of a page: tags, attributes, words; each tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.headings, self.words, self._open = [], [], [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.words.append(data)
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def history(rows, workers):
    """Make a history: the loop waits half of the time, or pauses; worker k is busy k / workers."""
    fields = [("seconds", "f8"), ("batches", "i8"), ("waited", "f8"), ("stepped", "f8")]
    found = np.zeros(rows, [*fields, ("ready", "i4"), ("busy", "f8", (workers,))])
    found["seconds"] = 5 + 0.1 * np.arange(rows)
    went = np.minimum(np.arange(rows), rows // 2) + np.maximum(np.arange(rows) - rows // 2 - 9, 0)
    found["batches"] = 10 * went
    found["waited"] = found["stepped"] = 0.05 * went
    found["ready"] = np.arange(rows) % 4
    found["busy"] = 0.1 * went[:, None] * (np.arange(workers) / workers)
    return found


def ran():
    """Return a manager that has run and finished."""
    options = {"batch_size": 2, "out_type": "null", "seed": 1, "num_workers": 2}
    manager = cseq.MSequence(Rows, 96, thread_type="thread", **options)
    with manager.start() as batches:
        list(batches)
    return manager


def test_a_page_of_a_run_that_is_over(tmp_path):
    """It has the verdict, tiles, and the slowest batches with lines to remake them; no network."""
    manager, path = ran(), tmp_path / "loader.html"
    manager.report(path, title="<my> run")
    text = path.read_text(encoding="utf-8")
    shown = Parsed(text)
    assert os.listdir(tmp_path) == ["loader.html"]
    assert shown.headings[:2] == ["<my> run", "MSequence"]
    assert FIGURES[1] in shown.headings
    said = manager.advice().sentence
    assert any(said[1:] in words for words in shown.words)
    assert {"script", "link", "img", "iframe"}.isdisjoint(shown.tags)
    assert not [value for name, value in shown.attributes if name in ("href", "src", "onclick")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert len(text) < 60_000
    slowest = manager.stats().slowest[0]
    assert f"manager.remake({slowest.epoch}, {slowest.batch})" in shown.words
    for name, value in manager.stats().as_dict("").items():
        assert name in shown.words
        assert f"{value:.6g}" in shown.words
    assert any("Python" in words for words in shown.words)


def test_there_is_always_a_page(tmp_path):
    """There is one before a start, after one batch, in test mode and in a run, always replaced."""
    path = tmp_path / "loader.html"
    manager = cseq.MTSequence(Rows, 40, batch_size=2, out_type="null", num_workers=1)
    with pytest.raises(TypeError, match="path=3"):
        manager.report(3)
    with pytest.raises(TypeError, match="title=4"):
        manager.report(path, title=4)
    manager.report(path)
    assert "fewer than 8" in path.read_text(encoding="utf-8").replace("Fewer", "fewer")
    with manager.start_test() as batches:
        next(iter(batches))
        manager.report(path)
        Parsed(path.read_text(encoding="utf-8"))
    with manager.start() as batches:
        for number, _ in enumerate(batches):
            if number == 12:
                manager.report(path)
    assert FIGURES[1] in Parsed(path.read_text(encoding="utf-8")).headings


# File size limits exist where forks exist.
@pytest.mark.needs("fork")
def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path):
    """If it runs out of room in the middle, the old page stays whole, and no part is left."""
    import resource

    manager, path = ran(), tmp_path / "loader.html"
    manager.report(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"loader\.html'$"):
            manager.report(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["loader.html"]


@pytest.mark.parametrize("workers", [1, 2, 16, 17, 200])
@pytest.mark.parametrize("rows", [4, 60, 512])
def test_figures_over_time(workers, rows, monkeypatch):
    """There are six, of at most 150 kB; of more than 16 workers, those that differ most appear."""
    stats = ran().stats()
    monkeypatch.setattr(Stats, "history", history(rows, workers))
    text = page.page([page.Part("a run", "", stats)])
    shown = Parsed(text)
    assert [each for each in shown.headings if each in FIGURES] == FIGURES
    assert len(text) < 150_000
    over = page.Over.of(stats.history)
    assert len(over.edges) == min(rows, 121)
    figure = page.workers(over)[1].inline()
    names = [int(name) for name in re.findall(r'class="faint end">(\d+)<', figure)]
    assert names[0] == 0
    assert figure.count('class="first"') == min(workers, 16)
    assert ("the 16 that differ most" in text) == (workers > 16)
    if workers > 16:
        assert set(names) <= set(range(9)) | set(range(workers - 9, workers))


def test_intervals_are_parts_of_the_time():
    """Half of the time is spent waiting, without the pause; fewer than four rows are too few."""
    assert page.Over.of(history(3, 2)) is None
    over = page.Over.of(history(101, 2))
    assert np.isclose(np.median(over.waiting), 0.5)
    assert 7 <= (over.waiting < 0.01).sum() <= 10
    assert np.isclose(np.median(over.rate), 100)
    assert np.isclose(np.median(over.busy[1]), 0.5)
    assert over.edges[0] == 5


def told(**changed):
    """Return figures with a given window: two workers, 200 ms a batch, steps of 50 ms."""
    window = Window(
        batches=100, elapsed=10.0, waited=5.0, step=0.05, index=0.2, index_p99=0.2, workers=2,
        busy=1.0, cpu=0.5, cores=16, buffer=10,
    )  # fmt: skip

    class Told(Stats):
        def window(self):
            return replace(window, **changed)

    shown = vars(ran().stats()) | {"batches": 100, "elapsed": 10.0, "loop_waited": 5.0}
    return Told(**shown)


def test_how_many_would_be_enough():
    """It has the current number and the advised one; the cores are a limit."""
    stats = told()
    assert stats.advice().change == {"num_workers": 5}
    heading, chart, caption = page.enough(stats)
    assert heading == FIGURES[1]
    assert {"2 now", "5 advised"} <= set(re.findall(r">([^<]+)</text>", chart.inline()))
    assert "have cores" not in chart.inline()
    assert "200 ms" in caption
    few = page.enough(told(cores=4))[1].inline()
    assert "6 have cores" in few


def test_the_verdict_has_a_line_for_the_start():
    """A slow start is no cause of later waits."""
    said = page.verdict(told(waited=7.0, start=30.0, step=0.03, cpu=0.01, cores=2))
    assert re.search("waits 50%: workers.*num_workers=8.*<p>Start: the first batch", said)


@pytest.mark.parametrize("cpu", [None, 1e-6, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("step", [0.0, 1e-7, 10.0])
def test_whatever_was_measured_is_drawn(cpu, step):
    """For cores that never exist, or steps of no time, the figure has a place."""
    _, chart, _ = page.enough(told(step=step, cpu=cpu, cores=2))
    places = re.findall(r'(?:x|y|d)="([^"]*)"', chart.inline())
    assert "2 now" in chart.inline()
    assert not re.search("nan|inf", " ".join(places))


def test_in_a_notebook():
    """A notebook shows verdict, tiles, a figure and the facts; only the facts before a run."""
    manager = ran()
    shown = Parsed(manager._repr_html_())
    assert shown.tags.count("svg") == 1
    assert any(manager.advice().cause in words for words in shown.words)
    assert "batch_size" in shown.words
    idle = cseq.MTSequence(Rows, 4, batch_size=2, out_type="null")
    shown = Parsed(idle._repr_html_())
    assert "svg" not in shown.tags
    assert "batch_size" in shown.words


def test_a_loader(tmp_path):
    """A notebook has only its facts before an epoch; then that and the page are of the last one."""
    pytest.importorskip("torch")
    loader = cseq.DataLoader(list(range(80)), batch_size=4, num_workers=2)
    shown = Parsed(loader._repr_html_())
    assert shown.words == ["DataLoader", "dataset", "list", "batch_size", "4", "num_workers", "2"]
    with pytest.raises(RuntimeError, match="no cseq workers"):
        loader.report(tmp_path / "loader.html")
    assert len(list(loader)) == 20
    shown = Parsed(loader._repr_html_())
    assert any(loader.advice().cause in words for words in shown.words)
    assert {"batches a second", "dataset", "num_workers"} <= set(shown.words)
    alone = cseq.DataLoader([1, 2])
    assert list(alone)
    assert Parsed(alone._repr_html_()).words[:3] == ["DataLoader", "dataset", "list"]
    loader.report(tmp_path / "loader.html")
    shown = Parsed((tmp_path / "loader.html").read_text(encoding="utf-8"))
    assert shown.headings[1] == "DataLoader"
    assert "dataset=list, batch_size=4, num_workers=2" in shown.words
    assert not [words for words in shown.words if "remake" in words]


SCRIPT = """
import os, sys, numpy as np, cseq
options = {"out_type": "null", "seed": 1}
manager = cseq.MTSequence(np.arange(60), batch_size=2, num_workers=1, **options)
for _ in range(2):
    with manager.start() as batches:
        print(sum(map(len, batches)))
other = cseq.MTSequence(np.arange(90), batch_size=3, num_workers=2, **options).start()
print(next(iter(other)).tolist())
os.chdir("/")
sys.exit(int(sys.argv[1]))
"""


def test_a_script_is_not_changed(run_command, tmp_path):
    """The page has all that ran, the longest of each kind, even if the script fails."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--report", "of-%r.html", "--trace", "run.json"]
    done = run_command(tmp_path, "run", *options, "train.py", "3", RANK="3", WORLD_SIZE="4")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[:2] == ["60", "60"]
    assert f"cseq: wrote the report to {tmp_path / 'of-3.html'}" in done.stderr.splitlines()
    shown = Parsed((tmp_path / "of-3.html").read_text(encoding="utf-8"))
    parts = [words for words in shown.words if words.startswith("samples=")]
    assert parts == [
        "samples=60, batches=30, batch_size=2, workers=1, seed=1",
        "samples=90, batches=30, batch_size=3, workers=2, seed=1",
    ]
    assert shown.headings[:2] == ["train.py", "MTSequence"]
    assert (tmp_path / "run.json").exists()


def test_a_script_without_batches(run_command, tmp_path):
    """The output says so, without a page; wrong names are reported before the script runs."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("print('ran')")
    done = run_command(tmp_path, "run", "--report", "run.html", "train.py")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "cseq: no report" in done.stderr
    assert not (tmp_path / "run.html").exists()
    done = run_command(tmp_path, "run", "--report", "no/run.html", "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cseq run: ")
