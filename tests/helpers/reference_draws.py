"""The permutations that orders are made of, in plain Python: docs/inside/orders.md."""

import math
from bisect import bisect_right
from itertools import accumulate, chain

from reference import GOLDEN, IV, LEAST, WORD, bounded, mix, words


def stream(seed, epoch, purpose, key=None):
    z = mix(mix(mix(IV ^ seed) ^ epoch) ^ purpose)
    return z if key is None else mix(z ^ key)


def derive(z, count):
    return [mix(z + k * GOLDEN & WORD) for k in range(count)]


def shuffled(elements, z):
    drawn, elements = words(derive(z, 4)), elements.copy()
    for i in range(len(elements)):
        j = i + bounded(drawn, len(elements) - i)
        elements[i], elements[j] = elements[j], elements[i]
    return elements


def perm(n, z):
    if n < LEAST:
        return shuffled(list(range(n)), z).__getitem__
    key, a = derive(z, 16), math.isqrt(n - 1) + 1
    b = -(-n // a)

    def below(i, digit, limit):
        product = (digit ^ key[2 * i]) * (key[2 * i + 1] | 1)
        return (product & WORD ^ product >> 64) * limit >> 64

    def network(value):
        row, column = divmod(value, b)
        for i in range(0, 8, 2):
            row = (row + below(i, column, a)) % a
            column = (column + below(i + 1, row, b)) % b
        value = row * b + column
        return value if value < n else network(value)

    return network


def blocks(n, rows, window, lanes, seed, epoch):
    """Return an epoch of blocks-v2."""
    whole, count = n // rows, -(-n // (rows * window))
    order = perm(whole, stream(seed, epoch, 7, 0))
    layout = [order(q) * rows + k for q in range(whole) for k in range(rows)]
    layout += range(whole * rows, n)
    dealt = lanes if whole // lanes >= count else 1
    size, larger = divmod(whole // dealt, count)
    starts = [rows * dealt * (j * size + min(j, larger)) for j in range(count)] + [n]
    place, turn = derive(stream(seed, epoch, 7, 1), 2)
    first, turn = place * count >> 64, turn * lanes >> 64
    samples = []
    for j in [*range(first, count), *range(first)]:
        at, there = starts[j], range(len(samples), len(samples) + starts[j + 1] - starts[j])
        samples += layout[at : at + len(there)]
        for lane in range(lanes):
            ours = [p for p in there if (p + turn) % lanes == lane]
            part = shuffled(layout[at : at + len(ours)], stream(seed, epoch, 8, at))
            at += len(ours)
            for p, sample in zip(ours, part, strict=True):
                samples[p] = sample
    return samples


def unequal_blocks(sizes, window, seed, epoch):
    """Return an epoch of unequal-blocks-v1."""
    whole, count = len(sizes), -(-len(sizes) // window)
    order, ends = perm(whole, stream(seed, epoch, 7, 0)), [*accumulate(sizes)]
    blocks_of = [range(ends[b] - sizes[b], ends[b]) for b in map(order, range(whole))]
    cuts = [j * (whole // count) + min(j, whole % count) for j in range(count + 1)]
    first = derive(stream(seed, epoch, 7, 1), 1)[0] * count >> 64
    starts = [sum(map(len, blocks_of[: cuts[j]])) for j in range(count)]
    samples = []
    for j in [*range(first, count), *range(first)]:
        window = [*chain(*blocks_of[cuts[j] : cuts[j + 1]])]
        samples += shuffled(window, stream(seed, epoch, 8, starts[j]))
    return samples


def batches(classes, sizes, together, seed, epoch, *, longest_first=False):
    """Return an epoch of buckets-v2: samples by class, and each class's batch size."""
    units, longest = [], 0
    for c, (samples, size) in enumerate(zip(classes, sizes, strict=True)):
        order = perm(len(samples), stream(seed, epoch, 10, c))
        mixed = [samples[order(k)] for k in range(len(samples))]
        longest = len(units) if samples else longest
        units += [mixed[k : k + size] for k in range(0, len(samples), size)]
    groups, short = divmod(len(units), together)
    place, turn = derive(stream(seed, epoch, 9, 1), 2)
    at, turn = place * len(units) >> 64, turn * together >> 64
    if longest_first and groups:
        at = (longest + 1 + (place * (len(units) - short) >> 64)) % len(units)
    last = [(at + k) % len(units) for k in range(short)]
    others = [x for x in range(len(units)) if x not in last]
    numbers = list(map(perm(groups, stream(seed, epoch, 9, 0)), range(groups)))
    if longest_first and groups:
        shift = others.index(longest) // together - numbers[0]
        numbers = [(number + shift) % groups for number in numbers]
    where = [g * together + (k + turn) % together for g in numbers for k in range(together)]
    return [units[others[k]] for k in where] + [units[x] for x in last]


def nodes_over(entries, level):
    """Return the children of a level's nodes in weighted-v2, or None for a missing one."""
    rows = min(16, entries)
    starts = [j * entries // rows for j in range(rows)]
    sizes = [(j + 1) * entries // rows - start for j, start in enumerate(starts)]
    drawn = derive(stream(0, 0, 13, level + 1), rows)
    turns = [word * size >> 64 for word, size in zip(drawn, sizes, strict=True)]
    each = list(zip(starts, sizes, turns, strict=True))
    return [
        [start + (x + turn) % size if x < size else None for start, size, turn in each]
        for x in range(-(-entries // rows))
    ]


def weighted(masses, size, seed, epoch):
    """Return an epoch of weighted-v2."""
    levels = [nodes_over(len(masses), 1)]
    while len(levels[-1]) > 1:
        levels.append(nodes_over(len(levels[-1]), len(levels) + 1))

    def line(level, entry):
        if not level:
            return [entry]
        left, samples = levels[level - 1][entry].copy(), []
        [word] = derive(stream(seed, epoch, 13, level << 48 | entry), 1)
        while left:
            k, word = divmod(word * len(left), 2**64)
            child, left[k] = left[k], left[-1]
            left.pop()
            samples += [] if child is None else line(level - 1, child)
        return samples

    samples, z = line(len(levels), 0), stream(seed, epoch, 13)
    ends = list(accumulate(masses[sample] for sample in samples))
    shift = derive(z, 17)[16] * ends[-1] >> 64
    numbers = ((number * ends[-1] + shift) // size for number in map(perm(size, z), range(size)))
    return [samples[bisect_right(ends, number)] for number in numbers]


def concatenated(lengths, row, seed, epoch):
    """Return an epoch of concatenated-v1."""
    documents = perm(len(lengths), stream(seed, epoch, 15, 0))
    starts = [0, *accumulate(lengths)]
    tokens = [
        (number, starts[number] + k)
        for number in map(documents, range(len(lengths)))
        for k in range(lengths[number])
    ]
    rows = [tokens[at : at + row] for at in range(0, len(tokens) - row + 1, row)]
    first = [
        [at for k, (number, at) in enumerate(cut) if not k or cut[k - 1][0] != number]
        for cut in rows
    ]
    return [first[k] for k in map(perm(len(rows), stream(seed, epoch, 15, 1)), range(len(rows)))]


def balanced(works, step, over, together, seed, epoch):
    """Return an epoch of balanced-v1: unit numbers of the inner order, whose units have `works`."""
    steps = {"step": 1, "window": 16, "epoch": max(1, len(works) // step)}[over]
    groups, numbers = step // together, []
    for w, first in enumerate(range(0, len(works), step * steps)):
        whole = min(steps, (len(works) - first) // step)
        stop = first + whole * step
        by_work = sorted(range(first, stop), key=lambda unit: -works[unit])
        if whole == 1:
            bins = [[] for _ in range(together)]
            for unit in by_work:
                open_ = [units for units in bins if len(units) < groups]
                min(open_, key=lambda units: sum(works[unit] for unit in units)).append(unit)
            numbers += [bins[k][turn] for turn in range(groups) for k in range(together)]
        else:
            turns = [
                list(map(perm(whole, stream(seed, epoch, 16, w * groups + k)), range(whole)))
                for k in range(groups if whole else 0)
            ]
            for j in range(whole):
                for k, turn in enumerate(turns):
                    at = (k * whole + turn[j]) * together
                    numbers += by_work[at : at + together]
        numbers += range(stop, min(first + step * steps, len(works)))
    return numbers
