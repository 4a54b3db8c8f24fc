"""The picture: speeds relative to one contender, with a group of bars per case."""

from __future__ import annotations

from typing import Any

from cseq.report.figures import Axis, Drawing

WIDTH = 600
MARGIN = 16
# Where the contenders' names end, and the space for a figure on the right.
NAMES = 158
VALUES = 66
LANE = 22
BAR = 15
# The height of the title, the subtitle and the axis, and of a case's title.
HEAD = 98
GROUP = 30


def as_svg(cases: list[dict[str, Any]], base: str, title: str, footer: str) -> str:
    """Draw the cases that have a figure for `base`, one below the other."""
    cases = [case for case in cases if base in medians(case)]
    all_rates = {case["name"]: ratios(case, base) for case in cases}
    rates = {name: fastest(found) for name, found in all_rates.items()}
    values = [1.0, 10.0, *(value for found in rates.values() for value in found.values())]
    axis = Axis(min(values), max(values), NAMES + 10, WIDTH - VALUES, logarithmic=True)
    height = HEAD + sum(GROUP + LANE * len(found) for found in rates.values()) + 42
    drawing, bottom = Drawing(WIDTH, height, title), height - 36
    for tick in axis.ticks:
        drawing.rect(axis.coordinate(tick) - 0.5, HEAD - 6, 1, bottom - HEAD + 6, "line")
        drawing.text(axis.coordinate(tick), HEAD - 14, f"{tick:g}×", "faint middle")
    y = float(HEAD)
    for case in cases:
        group(drawing, case, rates[case["name"]], axis, y)
        y += GROUP + LANE * len(rates[case["name"]])
    drawing.text(MARGIN, 32, title, "large")
    told = "logarithmic; two workers each; processes are spawned"
    if rates != all_rates:
        told += "; peers in their faster mode"
    drawing.text(MARGIN, 56, told, "faint")
    drawing.text(MARGIN, bottom + 22, footer, "faint")
    return drawing.file()


def group(
    drawing: Drawing, case: dict[str, Any], rates: dict[str, float], axis: Axis, y: float
) -> None:
    """Draw a case: its title, then a bar for each contender, ours first."""
    drawing.text(MARGIN, y + 18, case["title"], "strong")
    mine = [one["name"] for one in case["contenders"] if one["ours"]]
    for number, (name, rate) in enumerate(rates.items()):
        top = y + GROUP + LANE * number
        colour = ("first", "second")[mine.index(name) % 2] if name in mine else "other"
        base, end = axis.coordinate(1), axis.coordinate(rate)
        drawing.text(NAMES, top + 12, name, "end" if name in mine else "end faint")
        drawing.rect(min(base, end), top - 1, max(2, abs(end - base)), BAR, colour)
        drawing.text(max(end, base) + 7, top + 12, shown(rate), "strong" * (name in mine))


def medians(case: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a case by contender, without contenders of another checkout."""
    shown = (one for one in case["contenders"] if "median" in one and not one.get("before"))
    return {one["name"]: one["median"] for one in shown}


def ratios(case: dict[str, Any], base: str) -> dict[str, float]:
    """Return how many times as fast as `base` the other contenders are."""
    found = medians(case)
    more = case["more_is_better"]
    return {
        name: figure / found[base] if more else found[base] / figure
        for name, figure in found.items()
        if name != base
    }


def fastest(rates: dict[str, float]) -> dict[str, float]:
    """Of contenders whose names differ only after a comma, return the fastest one."""
    result: dict[str, float] = {}
    for name, rate in rates.items():
        of_one = [other for other in rates if other.partition(",")[0] == name.partition(",")[0]]
        if rate == max(rates[other] for other in of_one):
            result[name] = rate
    return result


def shown(rate: float) -> str:
    """Format a rate with two digits, or three from 100 on."""
    return f"{rate:.0f}×" if rate >= 9.95 else f"{rate:.1f}×"
