"""Parts of drawings, as SVG: text, bars, an axis; light and dark, legible at 400 pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Each colour by what it is for: in a light page, in a dark one.
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "first": ("#1a7f5a", "#2ea873"),
    "second": ("#5db391", "#7fd1ac"),
    "other": ("#9aa4ae", "#656d76"),
}
FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
SIZE = 16  # of ordinary text, of 600 in width


def drawing(width: float, height: float, parts: list[str], title: str) -> str:
    """Put parts on a sheet, whose colours are those of the reader's page."""
    # Classes, no variables: what shows SVG beside browsers knows these alone.
    light, dark = (
        "".join(f".{name}{{fill:{pair[choice]}}}" for name, pair in COLOURS.items())
        + f"text{{stroke:{COLOURS['paper'][choice]}}}"  # a halo, where text crosses a line
        for choice in (0, 1)
    )
    style = (
        f"text{{font:{SIZE}px {FONT};paint-order:stroke;stroke-width:4px}}{light}"
        f".large{{font-size:{SIZE * 1.35:g}px;font-weight:600}}.strong{{font-weight:600}}"
        f".end{{text-anchor:end}}.middle{{text-anchor:middle}}"
        f"@media(prefers-color-scheme:dark){{{dark}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="6" class="paper"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, content: str, style: str = "") -> str:
    """Write a line, on its baseline."""
    style = style if "faint" in style else f"ink {style}".strip()
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(content)}</text>'


def bar(left: float, right: float, y: float, height: float, colour: str, about: str = "") -> str:
    """Draw a bar between two places; `about` is shown where the pointer rests."""
    left, right = min(left, right), max(left, right)
    title = f"<title>{escape(about)}</title>" if about else ""
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(2.0, right - left):.1f}" '
        f'height="{height:.1f}" rx="2" class="{colour}">{title}</rect>'
    )


def line(x: float, top: float, bottom: float) -> str:
    """Draw a line upright."""
    place = f'x="{x - 0.5:.1f}" y="{top:.1f}" width="1" height="{bottom - top:.1f}"'
    return f'<rect {place} class="line"/>'


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis: where a value lies between two places."""

    low: float
    high: float
    left: float
    right: float

    @classmethod
    def around(cls, values: list[float], left: float, right: float) -> LogAxis:
        """Make one that has 1 and all values on it."""
        return cls(min([1.0, *values]), max([10.0, *values]), left, right)

    def place(self, value: float) -> float:
        """Where a value lies."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + share * (self.right - self.left)

    @property
    def ticks(self) -> list[float]:
        """The powers of ten on it."""
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]
