"""Draws SVG figures.

Used in reports, notebooks, benchmarks and on the website::

    Axis ──► Chart(Drawing): grid, steps, line, bars, dot, marks ──► inline() or file()
                                       colours are classes of STYLE ──┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from cseq.measure.advice import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Range = tuple[float, float]

__all__ = ["COLORS", "STYLE", "Axis", "Chart", "Drawing", "duration", "number"]

COLORS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "first": ("#1a7f5a", "#2ea873"),
    "second": ("#5db391", "#7fd1ac"),
    "other": ("#9aa4ae", "#656d76"),
    "warm": ("#d9770a", "#f0a04b"),
    "cold": ("#2367d1", "#6ea8fe"),
}
# `GLYPH` is the maximum mean width of a letter, relative to the text size `SIZE`.
WIDTH, HEIGHT = 540, 240
SIZE, GLYPH = 16, 0.6
MOST_TICKS = 5
TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

LIGHT, DARK = (
    "".join(f"--{name}:{pair[choice]};" for name, pair in COLORS.items()) for choice in (0, 1)
)
# CSS for a standalone file, or for a page that embeds figures in an element with class "cseq".
STYLE = f"""
.cseq{{{LIGHT}}}
@media screen and (prefers-color-scheme:dark){{.cseq{{{DARK}}}}}
.cseq text{{font:{SIZE}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;
paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}}
.cseq .large{{font-size:22px;font-weight:600}}
.cseq .strong{{font-weight:600}}
.cseq .end{{text-anchor:end}}
.cseq .middle{{text-anchor:middle}}
.cseq .stroke{{fill:none;stroke:var(--second);stroke-width:2}}
""" + "".join(f".cseq .{name}{{fill:var(--{name})}}" for name in COLORS)


def number(value: float) -> str:
    """Format a number with about three digits: 0.52, 19.1, 412, 2524, 20.1 k, 1.4 M."""
    for size, least, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e3, 1e4, " k")):
        if value >= least * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to coordinates in [start, end].

    If `times` is set, values are in seconds, and ticks are at values such as 15 and 60.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    times: bool = False

    def coordinate(self, value: float) -> float:
        """Return the coordinate of a value, clipped to the axis."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """The round values at which to draw ticks."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(0, last - first - 2) // MOST_TICKS + 1
            factors = (1, 2, 5) if last - first < 3 else (1,)
            values = (k * 10.0**power for power in range(first, last + 1, every) for k in factors)
            return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
        apart = (self.high - self.low) / MOST_TICKS
        power = 10.0 ** math.floor(math.log10(apart))
        steps = (*(TIMES if self.times and apart >= 1 else ()), *(k * power for k in (1, 2, 5, 10)))
        step = next((step for step in steps if step >= apart * 0.999), self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


class Drawing:
    """Shapes and text on a canvas.

    Parameters
    ----------
    width, height : float
    title : str
        A description for screen readers.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def inline(self, attributes: str = "", head: str = "") -> str:
        """Return an SVG element for a page that includes `STYLE`."""
        parts = "\n".join(self._parts)
        return (
            f'<svg{attributes} viewBox="0 0 {_at(self.width)} {_at(self.height)}" role="img" '
            f'aria-label="{escape(self.title)}">{head}{parts}</svg>'
        )

    def file(self) -> str:
        """Return a complete SVG file with light and dark colors."""
        size = f'width="{_at(self.width)}" height="{_at(self.height)}"'
        attributes = f' xmlns="http://www.w3.org/2000/svg" class="cseq" {size}'
        head = f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
        sheet = f'<rect {size} rx="6" fill="var(--paper)"/>\n'
        return self.inline(attributes, head + sheet) + "\n"

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Draw text with the baseline at `y`. `kind` contains CSS classes ('faint end')."""
        shown = kind if "faint" in kind else f"ink {kind}".strip()
        corner = f'x="{_at(x)}" y="{_at(y)}"'
        self._parts.append(f'<text {corner} class="{shown}">{escape(words, quote=False)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle."""
        corner = f'x="{_at(x)}" y="{_at(y)}" width="{_at(width)}" height="{_at(height)}"'
        self._parts.append(f'<rect {corner} class="{kind}"/>')

    def path(self, steps: str, kind: str) -> None:
        """Draw an SVG path: an area, or a line if `kind` is 'stroke'."""
        self._parts.append(f'<path d="{steps}" class="{kind}"/>')


class Chart(Drawing):
    """A drawing with an x-axis from left to right and a y-axis from bottom to top.

    Parameters
    ----------
    title : str
    x, y : (float, float)
        The minimum and maximum values.
    logarithmic, times : bool
        Options for the x-axis. See `Axis`.
    """

    def __init__(
        self, title: str, x: Range, y: Range, *, logarithmic: bool = False, times: bool = False
    ) -> None:
        super().__init__(WIDTH, HEIGHT, title)
        self.x = Axis(*x, 56, WIDTH - 24, logarithmic, times)
        self.y = Axis(*y, HEIGHT - 28, 24)

    def grid(self, x: Callable[[float], str], y: Callable[[float], str] | None = number) -> None:
        """Draw horizontal grid lines and tick labels. `x` and `y` format the labels."""
        for value in self.y.ticks if y else ():
            at = self.y.coordinate(value)
            self.rect(self.x.start, at - 0.5, self.x.end - self.x.start, 1, "line")
            self.text(self.x.start - 8, at + SIZE * 0.35, y(value) if y else "", "faint end")
        right = -math.inf
        for value in self.x.ticks:
            words, at = x(value), self.x.coordinate(value)
            half = len(words) * SIZE * GLYPH / 2
            if right <= at - half and at + half <= self.width:
                self.text(at, self.height - 8, words, "faint middle")
                right = at + half + SIZE / 2

    def steps(
        self, edges: Sequence[float], values: Iterable[float], kind: str, floor: float = 0.0
    ) -> None:
        """Draw an area above `floor` with a constant height between consecutive edges."""
        drawn = (
            f"V{_at(self.y.coordinate(floor + value))}H{_at(self.x.coordinate(end))}"
            for value, end in zip(values, edges[1:], strict=True)
        )
        bottom = _at(self.y.coordinate(floor))
        self.path(f"M{_at(self.x.coordinate(edges[0]))} {bottom}{''.join(drawn)}V{bottom}Z", kind)

    def line(self, points: Iterable[tuple[float, float]]) -> None:
        """Draw a line through points."""
        places = (f"{_at(self.x.coordinate(x))} {_at(self.y.coordinate(y))}" for x, y in points)
        self.path("M" + "L".join(places), "stroke")

    def bars(self, bars: Iterable[tuple[float, float, float]], kind: str) -> None:
        """Draw a bar for each (from, to, value)."""
        floor = self.y.coordinate(0)
        for start, end, value in bars:
            left, right = self.x.coordinate(start) + 0.5, self.x.coordinate(end) - 0.5
            top = min(self.y.coordinate(value), floor - 1)
            self.rect(left, top, max(right - left, 1), floor - top, kind)

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw a dot."""
        left, at = _at(self.x.coordinate(x) - 6), _at(self.y.coordinate(y))
        self.path(f"M{left} {at}a6 6 0 1 0 12 0a6 6 0 1 0-12 0z", kind)

    def marks(self, *marks: tuple[float, str, str]) -> None:
        """Draw a labeled vertical line at each value."""
        places = [self.x.coordinate(value) for value, _, _ in marks]
        for at, (_, _, kind) in zip(places, marks, strict=True):
            self.rect(at - 0.75, self.y.end, 1.5, self.y.start - self.y.end, kind)
        for row, (at, (_, words, _)) in enumerate(zip(places, marks, strict=True), 1):
            width = len(words) * SIZE * GLYPH + 8
            sides = [(at, at + width, at + 8, ""), (at - width, at, at - 8, " end")]
            worse = [
                (left < self.x.start or right > self.width, sum(left < x < right for x in places))
                for left, right, _, _ in sides
            ]
            is_left = worse[1] < worse[0] or (worse[0] == worse[1] and at >= self.width / 2)
            _, _, x, anchor = sides[is_left]
            self.text(x, self.y.end - 4 + SIZE * 1.2 * row, words, f"strong{anchor}")
