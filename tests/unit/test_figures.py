"""Figures are valid SVG, in the colours of the page."""

import re
from xml.etree import ElementTree as ET

import pytest

from cseq.report.figures import COLORS, STYLE, Axis, Chart, Drawing, number

SVG = "{http://www.w3.org/2000/svg}"


def words_of(chart):
    """Return the words, from left to right as drawn."""
    return [str(each.text) for each in ET.fromstring(chart.inline()).iter("text")]


@pytest.mark.parametrize(
    ("low", "high", "kind", "ticks"),
    [
        (0, 1, {}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 7, {}, [0, 2, 4, 6]),
        (0, 0.003, {}, [0, 0.001, 0.002, 0.003]),
        (95, 2100, {}, [500, 1000, 1500, 2000]),
        (0, 70, {"times": True}, [0, 15, 30, 45, 60]),
        (0.002, 20, {"logarithmic": True}, [0.01, 0.1, 1, 10]),
    ],
)
def test_ticks_are_round(low, high, kind, ticks):
    """At most six, in steps of 1, 2 or 5, of quarters of minutes or of powers of ten."""
    assert Axis(low, high, 0, 100, **kind).ticks == pytest.approx(ticks)
    assert len(Axis(1e-9, 1e9, 0, 100, logarithmic=True).ticks) <= 6


def test_a_place_is_on_the_axis():
    """So is a value beyond it; upwards is less. Numbers have three digits."""
    axis = Axis(1, 100, 200, 0, logarithmic=True)
    assert [axis.coordinate(value) for value in (0, 1, 10, 100, 1e9)] == [200, 200, 100, 0, 0]
    words = [number(value) for value in (0, 0.524, 19.12, 2524, 2e6)]
    assert words == ["0", "0.524", "19.1", "2524", "2 M"]


def test_a_file_has_its_own_colours():
    """A file has the page's rules, light and dark, in the same part."""
    drawing = Drawing(100, 50, "a < b")
    drawing.text(1, 20, "x & y", "strong")
    root = ET.fromstring(drawing.file())
    assert root.get("class") == "cseq"
    assert root.find(f"{SVG}title").text == "a < b"  # type: ignore[union-attr]
    assert root.find(f"{SVG}text").text == "x & y"  # type: ignore[union-attr]
    assert root.find(f"{SVG}style").text == STYLE  # type: ignore[union-attr]
    rules = re.findall(r"([^{}]+)\{", STYLE)
    assert all(rule.strip().startswith((".cseq", "@media screen")) for rule in rules)
    assert all(f"--{name}:{each}" in STYLE for name in COLORS for each in COLORS[name])


def luminance(colour):
    """Return the luminance by WCAG's definition."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(f * c for f, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("name", ["ink", "faint"])
def test_words_can_be_read(name, choice):
    """The contrast is at least 4.5, light and dark."""
    light, dark = sorted(luminance(COLORS[each][choice]) for each in (name, "paper"))
    assert (dark + 0.05) / (light + 0.05) >= 4.5


def test_marks_have_rows_of_their_own():
    """It holds at any distance; the words begin or end at their line, and stay on the sheet."""
    chart = Chart("marks", (0, 10), (0, 1))
    chart.marks(*((value, f"at {value}", "ink") for value in (0, 0.1, 9.9, 10)))
    found = list(ET.fromstring(chart.inline()).iter("text"))
    assert len({each.get("y") for each in found}) == len(found) == 4
    assert ["end" in each.get("class", "") for each in found] == [False, False, True, True]


@pytest.mark.parametrize("values", [(3.0, 3.2), (3.2, 3.0), (5.1, 5.3), (7.0, 7.1), (1, 4, 4.5)])
def test_no_line_runs_through_the_words_of_another_mark(values):
    """Words are on the side without another line, and are drawn after all lines."""
    chart = Chart("marks", (0, 10), (0, 1))
    chart.marks(*((value, "p50 1.2 ms", "ink") for value in values))
    parts = list(ET.fromstring(chart.inline()))
    lines = [float(each.get("x", 0)) for each in parts if each.tag == "rect"]
    assert [each.tag for each in parts] == ["rect"] * len(lines) + ["text"] * len(lines)
    for words in parts[len(lines) :]:
        start = float(words.get("x", 0)) - 95 * ("end" in words.get("class", ""))
        assert not [at for at in lines if start < at < start + 95]


def test_steps_are_an_area():
    """The area goes from the floor up to each value, and back."""
    chart = Chart("steps", (0, 4), (0, 1))
    chart.steps([0, 1, 2, 3, 4], [0.5, 0.25, 0, 1], "warm")
    (path,) = re.findall(r'd="([^"]*)"', chart.inline())
    assert path == "M56 212V118H171V165H286V212H401V24H516V212Z"


def test_a_grid_names_what_has_room():
    """Both axes have values; of values that would touch, only the first."""
    chart = Chart("grid", (0, 100), (0, 10))
    chart.grid(lambda x: f"{x:g} seconds and more", number)
    assert words_of(chart)[:6] == ["0", "2", "4", "6", "8", "10"]
    below = words_of(chart)[6:]
    assert 2 <= len(below) < 6
