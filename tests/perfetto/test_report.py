"""Reports in Chromium: no overlapping labels, nothing blank, no scrolling, no network."""

import json
import time
from functools import partial

import numpy as np
import pytest
from chromium import CHROMIUM, Browser

import cseq

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

# For each figure: the boxes of its labels and of itself, and its shapes beside the grid.
LOOK = """JSON.stringify([...document.querySelectorAll("svg")].map((svg) => {
  const box = (e) => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const words = [...svg.querySelectorAll("text")].map((e) => [e.textContent, ...box(e)]);
  const shapes = [...svg.querySelectorAll("path, circle, rect:not(.line):not(.soft)")];
  const seen = shapes.map(box).filter((r) => r[2] - r[0] + r[3] - r[1] > 1);
  return [svg.getAttribute("aria-label"), box(svg), words, seen.length];
}))"""
# Words that reach beyond the window, or into the next words of a tile.
WIDE = """[...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll"))
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML)"""


class Work:
    """Takes some time for a batch, and more for one in twenty."""

    def __init__(self, seconds, seldom=0.0):
        self._seconds, self._seldom = seconds, seldom

    def __getitem__(self, indices):
        is_slow = self._seldom and indices[0] % 20 == 0
        time.sleep(self._seldom if is_slow else self._seconds * (0.7 + 0.1 * (indices[0] % 7)))
        return np.zeros((len(indices), 8))


# The times of a batch: usual, rare, and in the loop; and the number of workers.
KINDS = {
    "starved": (0.02, 0.0, 0.004, 2),
    "fed": (0.003, 0.0, 0.006, 2),
    "stragglers": (0.01, 0.2, 0.003, 8),
    "many": (0.08, 0.0, 0.001, 70),
    "brief": (0.001, 0.0, 0.0, 1),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run each kind, and write its report."""
    found, folder = {}, tmp_path_factory.mktemp("reports")
    for kind, (seconds, seldom, step, workers) in KINDS.items():
        batches = 12 if kind == "brief" else 100
        make = cseq.MTSequence if kind == "many" else cseq.MPSequence
        options = {"batch_size": 4, "out_type": "null", "seed": 3}
        work = partial(Work, seconds, seldom)
        manager = make(work, 4 * batches, num_workers=workers, **options)
        with manager.start() as epochs:
            for _ in range(2):
                for _ in epochs:
                    time.sleep(step)
        found[kind] = folder / f"{kind}.html"
        manager.report(found[kind], title=f"{kind}.py")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Open Chromium."""
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.listen()
        yield browser


def overlap(one, other):
    """Return whether two boxes share more than a pixel."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    return width > 1 and min(one[3], other[3]) - max(one[1], other[1]) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 700, 1400])
def test_a_report(reports, browser, kind, scheme, width):
    """The labels' boxes, the shapes, the width and the requests are checked."""
    browser.asked.clear()
    browser.show(width, scheme)
    browser.call("Page.navigate", url=reports[kind].as_uri())
    browser.evaluate("document.fonts.ready.then(() => 1)")
    browser.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    figures = json.loads(browser.evaluate(LOOK))
    assert len(figures) == (2 if kind == "brief" else 6)
    for about, sheet, words, shapes in figures:
        assert shapes > 0, about
        assert words, about
        for k, (text, *box) in enumerate(words):
            inside = box[0] >= sheet[0] - 1 and box[2] <= sheet[2] + 1
            assert inside, (about, text)
            assert box[1] >= sheet[1] - 1, (about, text)
            assert box[3] <= sheet[3] + 1, (about, text)
            for other, *its in words[k + 1 :]:
                assert not overlap(box, its), (about, text, other)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(WIDE) == []
    assert browser.asked == [reports[kind].as_uri()]
