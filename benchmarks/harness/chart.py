"""The chart: a panel a case, a bar a contender, in SVG."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from harness.report import short

WIDTH = 880
COLUMNS = 2
PANEL = WIDTH // COLUMNS
LABEL = 206  # width of the names
BAR = 140  # width of the longest bar
LINE = 20
HEAD = 48  # height of a panel's title and unit

COLOURS = {"ours": "#1a7f5a", "peer": "#8c96a3", "limit": "#d5dae0"}
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#24292f}"
    ".title{font-weight:600;font-size:13px}.unit,.value{fill:#57606a}"
)


def as_svg(cases: list[dict[str, Any]], footer: str) -> str:
    """Draw the cases, two panels a row."""
    rows = [cases[start : start + COLUMNS] for start in range(0, len(cases), COLUMNS)]
    parts = []
    y = 8
    for row in rows:
        parts += [panel(case, 16 + column * PANEL, y) for column, case in enumerate(row)]
        y += max(map(height, row))
    parts.append(text(16, y + 14, footer, "unit"))
    y += 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" role="img">\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def height(case: dict[str, Any]) -> int:
    """How much room a panel takes."""
    return HEAD + LINE * len(drawn(case)) + 20


def drawn(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The contenders of a case that have figures."""
    return [one for one in case["contenders"] if "median" in one]


def panel(case: dict[str, Any], x: int, y: int) -> str:
    """Draw one case."""
    better = "more" if case["more_is_better"] else "less"
    longest = max(one["median"] for one in drawn(case))
    parts = [
        text(x, y + 16, case["title"], "title"),
        text(x, y + 34, f"{case['unit']}, {better} is better", "unit"),
    ]
    for number, one in enumerate(drawn(case)):
        parts.append(bar(one, case, x, y + HEAD + LINE * number, one["median"] / longest))
    return "\n".join(parts)


def bar(one: dict[str, Any], case: dict[str, Any], x: int, y: int, share: float) -> str:
    """Draw one contender."""
    kind = "ours" if one["ours"] else "limit" if one["name"] == case["limit"] else "peer"
    length = max(1.5, BAR * share)
    shape = f'x="{x + LABEL}" y="{y}" width="{length:.1f}" height="14" rx="2"'
    return "\n".join(
        [
            text(x, y + 11, one["name"]),
            f'<rect {shape} fill="{COLOURS[kind]}"/>',
            text(x + LABEL + length + 6, y + 11, short(one["median"]), "value"),
        ]
    )


def text(x: float, y: float, content: str, style: str = "") -> str:
    """Write a line."""
    attribute = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y}"{attribute}>{escape(content)}</text>'
