"""mixture-v2 in plain Python: docs/inside/orders.md."""

import itertools
import math
from fractions import Fraction

from reference import mix
from reference_draws import derive, shuffled, stream

MIXTURE, SOURCE = 11, 12


def rounded(value):
    return math.floor(value + Fraction(1, 2))


def counts(weights, block, number):
    """Return how often each source occurs before block `number`."""
    exact = [Fraction(weight) for weight in weights]
    total, result = sum(exact), [0] * len(exact)
    used = [(weight, s, None) for s, weight in enumerate(exact) if weight]
    row = [node for node in used if node[0] * block < total]
    for k in range(len(exact), len(exact) + len(row) - 1):
        row.sort(key=lambda node: node[:2])
        left, right, *others = row
        row = [*others, (left[0] + right[0], k, (left, right))]
    row += [node for node in used if node[0] * block >= total]

    def share(node, count):
        weight, s, children = node
        if children is None:
            result[s] = count
            return
        left = rounded(count * children[0][0] / weight)
        share(children[0], left)
        share(children[1], count - left)

    upto = [
        rounded(number * block * weight / total)
        for weight in itertools.accumulate(node[0] for node in row)
    ]
    for node, (before, after) in zip(row, itertools.pairwise([0, *upto]), strict=True):
        share(node, after - before)
    return result


def source_seed(seed, name):
    z = 0
    for byte in name.encode():
        z = mix(z ^ byte)
    return derive(stream(seed, 0, SOURCE, z), 1)[0]


def mixture(sources, phases, block, seed, upto, *, since=0, taken=None):
    """Return the units of all epochs from `since` to a place, and the counts drawn by then.

    A source is the number of its samples, and the function from (seed, pass) to units.
    """
    names, drawn = list(sources), dict.fromkeys(sources, 0) | (taken or {})
    firsts = [0, *itertools.accumulate(samples for samples, _ in sources.values())]
    result = []
    phase, begun = -1, 0
    for number in range(-(-(upto - since) // block)):
        start = since + number * block
        present = max(k for k, (unit, _) in enumerate(phases) if unit <= start)
        if present != phase:
            phase, begun = present, number
        had, has = (counts(phases[phase][1], block, number + k - begun) for k in (0, 1))
        owners = [s for s in range(len(names)) for _ in range(has[s] - had[s])]
        for s in shuffled(owners, stream(seed, 0, MIXTURE, number))[: upto - start]:
            own, units = source_seed(seed, names[s]), sources[names[s]][1]
            number_of_pass, unit = divmod(drawn[names[s]], len(units(own, 0)))
            result.append([firsts[s] + sample for sample in units(own, number_of_pass)[unit]])
            drawn[names[s]] += 1
    return result, drawn
