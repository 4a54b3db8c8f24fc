"""Figures as SVG: axes, areas, bars, heat maps, dots; light, dark and on paper.

One module draws the report, the notebook, the benchmarks' chart and the site's figures::

    Axis ──► Chart(Drawing): grid, steps, line, bars, heat, mark, dot ──► inline() or file()
                                     colours are classes: style(scope) ─────┘
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Box = tuple[float, float, float, float]  # left, top, right, bottom

__all__ = ["COLOURS", "FONT", "Axis", "Chart", "Drawing", "duration", "number", "style"]

# Each colour by what it is for: on a light page, on a dark one.
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "first": ("#1a7f5a", "#2ea873"),
    "second": ("#5db391", "#7fd1ac"),
    "other": ("#9aa4ae", "#656d76"),
    "warm": ("#d9770a", "#f0a04b"),
    "cold": ("#2367d1", "#6ea8fe"),
    "bad": ("#c92a2a", "#ff7b72"),
}
FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
SIZE = 16  # of ordinary text
GLYPH = 0.6  # width of a letter at most, on average, of its size
LEVELS = 8  # shades of a heat map
MOST_TICKS = 5

# Of times: the unit, its seconds, from how many on it is used.
UNITS: list[tuple[str, float, float]] = [("h", 3600, 7200), ("min", 60, 120), ("s", 1, 0.9995)]
UNITS += [("ms", 1e-3, 0.9995e-3), ("µs", 1e-6, 0.9995e-6)]
TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def style(scope: str = "") -> str:
    """Return the rules of all classes: of a part of a page, or, without a scope, of a file.

    Parameters
    ----------
    scope : str
        The selector that all figures of a page are in: there, colours are variables. A file has
        none, since not all that shows SVG knows them.
    """
    svg = f"{scope} svg " if scope else ""

    def rules(choice: int) -> str:
        colours = {
            name: f"var(--{name})" if scope else pair[choice] for name, pair in COLOURS.items()
        }
        return f"{svg}text{{stroke:{colours['paper']}}}" + "".join(
            f"{svg}.{name}{{fill:{colour}}}{svg}.s-{name}{{stroke:{colour}}}"
            for name, colour in colours.items()
        )

    def variables(choice: int) -> str:
        return "".join(f"--{name}:{pair[choice]};" for name, pair in COLOURS.items())

    shapes = (
        f"{svg}text{{font:{SIZE}px {FONT};paint-order:stroke;stroke-width:4px;"
        "stroke-linejoin:round}"  # a halo, where text crosses a line
        f"{svg}path[class^=s-]{{fill:none;stroke-width:2}}"
        f"{svg}.large{{font-size:{SIZE * 1.35:g}px;font-weight:600}}{svg}.strong{{font-weight:600}}"
        f"{svg}.small{{font-size:{SIZE * 0.8:g}px}}"
        f"{svg}.end{{text-anchor:end}}{svg}.middle{{text-anchor:middle}}{svg}.soft{{opacity:.3}}"
        + "".join(f"{svg}.h{k}{{opacity:{k / (LEVELS - 1):.2f}}}" for k in range(LEVELS))
    )
    if not scope:
        return f"{rules(0)}{shapes}@media(prefers-color-scheme:dark){{{rules(1)}}}"
    return (
        f"{scope}{{{variables(0)}}}{rules(0)}{shapes}"
        f"@media screen and (prefers-color-scheme:dark){{{scope}{{{variables(1)}}}}}"
    )


def duration(seconds: float) -> str:
    """Write a time with two digits, or three: 38 ms, 1.2 s, 90 s, 5 min."""
    for unit, size, least in UNITS:
        if seconds >= least:
            value = seconds / size
            digits = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"


def number(value: float) -> str:
    """Write a number with three digits: 0.52, 19.1, 412, 2524, 20.1 k, 1.4 M."""
    for size, least, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e3, 1e4, " k")):
        if value >= least * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _at(value: float) -> str:
    """Write a place."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Axis:
    """Where values lie between two places.

    Attributes
    ----------
    low, high : float
        Values.
    start, end : float
        Their places.
    logarithmic : bool
    steps : sequence of float
        How far ticks may lie apart; empty: 1, 2 and 5 times powers of ten.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    steps: Sequence[float] = ()

    def place(self, value: float) -> float:
        """Return where a value lies; one beyond the axis lies at its end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.logarithmic:
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Some round values on it."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(0, last - first - 2) // MOST_TICKS + 1
            factors = (1, 2, 5) if last - first < 3 else (1,)
            values = (k * 10.0**power for power in range(first, last + 1, every) for k in factors)
            return [each for each in values if self.low * 0.999 <= each <= self.high * 1.001]
        apart = (self.high - self.low) / MOST_TICKS
        power = 10.0 ** math.floor(math.log10(apart))
        steps = (*self.steps, *(k * power for k in (1, 2, 5, 10)))
        step = next((step for step in steps if step >= apart * 0.999), self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


class Drawing:
    """Shapes and words on a sheet.

    Parameters
    ----------
    width, height : float
    title : str
        For those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self._taken: list[Box] = []

    def inline(self) -> str:
        """Return the element for a page, which has the rules of `style`."""
        return self._element("", "")

    def file(self) -> str:
        """Return a whole file, whose colours are those of the reader's system."""
        size = f' xmlns="http://www.w3.org/2000/svg" width="{_at(self.width)}"'
        sheet = (
            f'<rect width="{_at(self.width)}" height="{_at(self.height)}" rx="6" class="paper"/>'
        )
        begin = f"<title>{escape(self.title)}</title>\n<style>{style()}</style>\n{sheet}\n"
        return self._element(f'{size} height="{_at(self.height)}"', begin, "\n") + "\n"

    def _element(self, attributes: str, begin: str, between: str = "") -> str:
        return (
            f'<svg{attributes} viewBox="0 0 {_at(self.width)} {_at(self.height)}" role="img" '
            f'aria-label="{escape(self.title)}">{begin}{between.join(self.parts)}{between}</svg>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write a line on its baseline; `kind` are classes, such as 'strong faint end'."""
        shown = kind if "faint" in kind else f"ink {kind}".strip()
        self._taken.append(_box(x, y, words, kind))
        place = f'x="{_at(x)}" y="{_at(y)}"'
        self.parts.append(f'<text {place} class="{shown}">{escape(words, quote=False)}</text>')

    def label(self, x: float, y: float, words: str, kind: str = "", gap: float = 9) -> None:
        """Write a line beside a place, where it lies on nothing else."""
        down = y + gap + SIZE * 0.7
        places = [
            (x, y - gap, "middle"),
            (x + gap, y + SIZE / 3, ""),
            (x, down, "middle"),
            (x - gap, y + SIZE / 3, "end"),
            (x + gap, y - gap, ""),
            (x - gap, y - gap, "end"),
            (x + gap, down, ""),
            (x - gap, down, "end"),
        ]
        places += [
            (px, py + away, anchor)
            for away in (20, -20, 40, -40, 60, -60)
            for px, py, anchor in places[:8]
        ]
        free = (
            place
            for place in places
            if self._is_free(_box(place[0], place[1], words, f"{kind} {place[2]}"))
        )
        at = next(free, places[0])
        self.text(at[0], at[1], words, f"{kind} {at[2]}".strip())

    def keep_clear(self, points: Sequence[tuple[float, float]]) -> None:
        """Have no label on a line through these points."""
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            count = int(max(abs(to_x - x), abs(to_y - y)) / 6) + 1
            for k in range(count + 1):
                px, py = x + (to_x - x) * k / count, y + (to_y - y) * k / count
                self._taken.append((px - 2, py - 2, px + 2, py + 2))

    def _is_free(self, box: Box) -> bool:
        """Tell whether a box lies on the sheet, and on nothing else."""
        left, top, right, bottom = box
        if left < 0 or top < 0 or right > self.width or bottom > self.height:
            return False
        return not any(
            left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
            for other in self._taken
        )

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, about: str = ""
    ) -> None:
        """Draw a rectangle; `about` is shown where the pointer rests."""
        self.parts.append(
            f'<rect x="{_at(x)}" y="{_at(y)}" width="{_at(width)}" height="{_at(height)}" '
            f'class="{kind}"{_about("rect", about)}'
        )

    def bar(
        self, start: float, end: float, y: float, height: float, kind: str, about: str = ""
    ) -> None:
        """Draw a rectangle with round corners between two places; it is never too small to see."""
        left, width = min(start, end), max(2.0, abs(end - start))
        self.parts.append(
            f'<rect x="{_at(left)}" y="{_at(y)}" width="{_at(width)}" height="{_at(height)}" '
            f'rx="2" class="{kind}"{_about("rect", about)}'
        )

    def path(self, steps: str, kind: str) -> None:
        """Draw along steps of SVG; kinds that begin with 's-' are strokes."""
        if steps:
            self.parts.append(f'<path d="{steps}" class="{kind}"/>')

    def circle(self, x: float, y: float, kind: str, about: str = "") -> None:
        """Draw a dot."""
        self._taken.append((x - 6, y - 6, x + 6, y + 6))
        place = f'cx="{_at(x)}" cy="{_at(y)}"'
        self.parts.append(f'<circle {place} r="6" class="{kind}"{_about("circle", about)}')


def _about(tag: str, words: str) -> str:
    """End an element, with what is shown where the pointer rests."""
    return f"><title>{escape(words)}</title></{tag}>" if words else "/>"


def _box(x: float, y: float, words: str, kind: str) -> Box:
    """Return where a line of text lies, at most."""
    size = SIZE * (1.35 if "large" in kind else 0.8 if "small" in kind else 1.0)
    width = len(words) * size * GLYPH
    left = x - (width if "end" in kind else width / 2 if "middle" in kind else 0)
    return left, y - size * 0.85, left + width, y + size * 0.25


class Chart(Drawing):
    """A drawing with two axes, of values from left to right and from the bottom up.

    Parameters
    ----------
    width, height : float
    title : str
    x, y : (float, float)
        The lowest and the highest value.
    left : float
        Room for the values of `y`.
    logarithmic : bool
        Of `x`.
    times : bool
        `x` are seconds, of which 15 and 60 are round, too.
    """

    def __init__(
        self,
        width: float,
        height: float,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        left: float = 56,
        logarithmic: bool = False,
        times: bool = False,
    ) -> None:
        super().__init__(width, height, title)
        steps = TIMES if times and x[1] - x[0] > MOST_TICKS else ()
        self.x = Axis(*x, left, width - 24, logarithmic, steps)
        self.y = Axis(*y, height - 28, 24)

    def grid(self, x: Callable[[float], str], y: Callable[[float], str] | None = number) -> None:
        """Draw lines at round values, and write these as the functions say; None: no lines."""
        for value in self.y.ticks if y else ():
            at = self.y.place(value)
            self.rect(self.x.start, at - 0.5, self.x.end - self.x.start, 1, "line")
            self.text(self.x.start - 8, at + SIZE * 0.35, y(value) if y else "", "faint end")
        right = -math.inf
        for value in self.x.ticks:
            words, at = x(value), self.x.place(value)
            half = len(words) * SIZE * GLYPH / 2
            if at - half < right or at + half > self.width:
                continue
            self.text(at, self.height - 8, words, "faint middle")
            right = at + half + SIZE / 2

    def steps(self, edges: Sequence[float], values: Sequence[float], kind: str) -> None:
        """Draw an area whose height is a value between each two edges; none where it is NaN."""
        floor, path, is_open = _at(self.y.place(self.y.low)), [], False
        for left, value in zip(edges, values, strict=False):
            if math.isnan(value):
                path += [f"H{_at(self.x.place(left))}V{floor}Z"] * is_open
                is_open = False
                continue
            at = _at(self.x.place(left))
            path.append(f"H{at}" if is_open else f"M{at} {floor}")
            path.append(f"V{_at(self.y.place(value))}")
            is_open = True
        path += [f"H{_at(self.x.place(edges[-1]))}V{floor}Z"] * is_open
        self.path("".join(path), kind)

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draw a line through values, which labels keep clear of."""
        places = [(self.x.place(x), self.y.place(y)) for x, y in points]
        self.keep_clear(places)
        self.path("M" + "L".join(f"{_at(x)} {_at(y)}" for x, y in places), f"s-{kind}")

    def bars(self, found: Iterable[tuple[float, float, float, str]], kind: str) -> None:
        """Draw a bar for each (from, to, value, about)."""
        floor = self.y.place(self.y.low)
        for start, end, value, about in found:
            left, right = self.x.place(start) + 0.5, self.x.place(end) - 0.5
            top = min(self.y.place(value), floor - 1)
            self.rect(left, top, max(right - left, 1), floor - top, kind, about)

    def heat(self, rows: Sequence[Sequence[float]], names: Sequence[str], kind: str) -> None:
        """Draw rows of shares from 0 to 1, the first on top, NaN as nothing, and their names."""
        top, height = self.y.end, (self.y.start - self.y.end) / max(len(rows), 1)
        paths: dict[int, list[str]] = {}
        for k, row in enumerate(rows):
            width = (self.x.end - self.x.start) / len(row)
            levels = [-1 if math.isnan(v) else round(v * (LEVELS - 1)) for v in row]
            y, tall = _at(top + k * height), _at(max(height - 1, 0.6 * height))
            begin = 0
            for end in range(1, len(row) + 1):
                if end < len(row) and levels[end] == levels[begin]:
                    continue
                x, wide = _at(self.x.start + begin * width), _at((end - begin) * width)
                paths.setdefault(levels[begin], []).append(f"M{x} {y}h{wide}v{tall}h-{wide}z")
                begin = end
        self.rect(self.x.start, top, self.x.end - self.x.start, self.y.start - top, "other soft")
        for level in sorted(level for level in paths if level >= 0):
            self.path("".join(paths[level]), f"{kind} h{level}")
        every = math.ceil(SIZE * 1.2 / height)
        for k in range(0, len(names), every):
            middle = top + (k + 0.5) * height + SIZE * 0.35
            self.text(self.x.start - 8, middle, names[k], "faint end")

    def marks(self, found: Sequence[tuple[float, str]], kind: str = "ink") -> None:
        """Draw lines upright at values, with words at their tops."""
        for value, _ in found:
            at = self.x.place(value)
            self.rect(at - 0.75, self.y.end, 1.5, self.y.start - self.y.end, kind)
            self.keep_clear([(at, self.y.end), (at, self.y.start)])
        for value, words in found:
            self.label(self.x.place(value), self.y.end + 4, words, kind)

    def dot(self, x: float, y: float, words: str, kind: str) -> None:
        """Draw a dot with words beside it."""
        at = self.x.place(x), self.y.place(y)
        self.circle(*at, kind, words)
        self.label(*at, words, "strong", 12)
