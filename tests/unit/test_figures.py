"""Figures are sound SVG, and their words lie on nothing."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree as ET

import pytest

from cseq.observe.figures import COLOURS, Axis, Chart, Drawing, duration, number, style

SVG = "{http://www.w3.org/2000/svg}"


def words_of(chart: Drawing) -> list[str]:
    """Return what is written, from left to right as it was drawn."""
    return [str(each.text) for each in ET.fromstring(chart.inline()).iter("text")]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 7, [0, 2, 4, 6]),
        (0, 0.003, [0, 0.001, 0.002, 0.003]),
        (95, 2100, [500, 1000, 1500, 2000]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    """Steps of 1, 2 or 5, of at most six values."""
    assert Axis(low, high, 0, 100).ticks == pytest.approx(ticks)


def test_ticks_of_times_and_of_logarithms() -> None:
    """Quarters of minutes are round; powers of ten, not all of many."""
    assert Axis(0, 70, 0, 100, steps=(1, 2, 5, 10, 15, 30, 60)).ticks == [0, 15, 30, 45, 60]
    assert Axis(0.002, 20, 0, 100, logarithmic=True).ticks == pytest.approx([0.01, 0.1, 1, 10])
    assert len(Axis(1e-9, 1e9, 0, 100, logarithmic=True).ticks) <= 6


def test_a_place_is_on_the_axis() -> None:
    """Also of a value beyond it; upwards is towards lower places."""
    axis = Axis(1, 100, 200, 0, logarithmic=True)
    assert [axis.place(value) for value in (0, 1, 10, 100, 1e9)] == [200, 200, 100, 0, 0]


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


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0"), (0.524, "0.524"), (19.12, "19.1"), (2524, "2524"), (2e6, "2 M")]
)
def test_numbers(value: float, words: str) -> None:
    """Three digits."""
    assert number(value) == words


def test_a_file_has_its_own_colours() -> None:
    """A file knows no variables, and has rules for dark; a page's rules stay within their part."""
    drawing = Drawing(100, 50, "a < b")
    drawing.text(1, 20, "x & y", "strong")
    root = ET.fromstring(drawing.file())
    assert root.find(f"{SVG}title").text == "a < b"  # type: ignore[union-attr]
    assert root.find(f"{SVG}text").text == "x & y"  # type: ignore[union-attr]
    assert "var(" not in drawing.file()
    assert "prefers-color-scheme:dark" in drawing.file()
    rules = re.findall(r"([^{}]+)\{", style(".part").replace("@media", "{@media"))
    assert all(rule.startswith((".part", "@media screen")) for rule in rules)
    assert all(f"--{name}:{each}" in style(".part") for name in COLOURS for each in COLOURS[name])


def luminance(colour: str) -> float:
    """As WCAG has it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(f * c for f, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("name", ["ink", "faint"])
def test_words_can_be_read(name: str, choice: int) -> None:
    """Contrast of 4.5 at least, light and dark."""
    light, dark = sorted(luminance(COLOURS[each][choice]) for each in (name, "paper"))
    assert (dark + 0.05) / (light + 0.05) >= 4.5


def test_labels_keep_clear() -> None:
    """Of each other, of lines and of the sheet's edge."""
    drawing = Drawing(300, 200, "labels")
    drawing.keep_clear([(0, 100), (300, 100)])
    for k in range(6):
        drawing.label(150, 100, f"label {k}")
    drawing.label(299, 1, "in the corner")
    boxes = []
    for each in ET.fromstring(drawing.inline()).iter("text"):
        width = len(each.text or "") * 9.6
        kind, x, y = each.get("class", ""), float(each.get("x", "")), float(each.get("y", ""))
        left = x - (width if "end" in kind else width / 2 if "middle" in kind else 0)
        boxes.append((left, y - 13.6, left + width, y + 4))
        assert left >= 0
        assert left + width <= 300
        assert y + 4 < 98.1 or y - 13.6 > 101.9
    assert len(boxes) == 7
    for one, other in itertools.combinations(boxes, 2):
        assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]


def test_steps_leave_out_what_is_not_known() -> None:
    """An area for each stretch of values."""
    chart = Chart(224, 152, "steps", (0, 4), (0, 1), left=0)
    chart.steps([0, 1, 2, 3, 4], [0.5, 0.25, math.nan, 1], "warm")
    (path,) = re.findall(r'd="([^"]*)"', chart.inline())
    assert path == "M0 124V74H50V99H100V124ZM150 124V24H200V124Z"


def test_heat_maps_join_what_is_alike() -> None:
    """One path for each shade, a piece for each stretch of it; nothing for what is not known."""
    chart = Chart(224, 152, "heat", (0, 4), (0, 1), left=0)
    chart.heat([[0.0, 1.0, 1.0, math.nan], [1.0, 1.0, 1.0, 1.0]], ["a", "b"], "first")
    found = re.findall(r'd="([^"]*)" class="first (h\d)"', chart.inline())
    assert found == [
        ("M0 24h50v49h-50z", "h0"),
        ("M50 24h100v49h-100zM0 74h200v49h-200z", "h7"),
    ]
    assert words_of(chart) == ["a", "b"]


def test_a_grid_names_what_has_room() -> None:
    """Values on both axes; of those that would touch each other, the first."""
    chart = Chart(400, 200, "grid", (0, 100), (0, 10))
    chart.grid(lambda x: f"{x:g} seconds", number)
    assert words_of(chart)[:6] == ["0", "2", "4", "6", "8", "10"]
    below = words_of(chart)[6:]
    assert 2 <= len(below) < 6
