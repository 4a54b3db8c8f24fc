"""Golden files: the lasting results of the definitions. `make golden` completes new records.

A file in tests/golden has lists of records, each with arguments and results. A record without
results gets them; one that has them is compared, and never changed. A new order has a line in
`ORDERS` here, and a file with the name of its definition and the arguments of each record::

    {
      "algorithm": "rows-v1",
      "orders": [
        {"n": 100, "rows": 7, "seed": 0, "epoch": 0}
      ]
    }

A definition that must change becomes a new one, with a new name and records without results.
"""

import hashlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
from reference import mix

import cseq
from cseq._core import derive

# Samples of an order without a table.
MOST_HASHED = 1 << 17
FOLDER = Path(__file__).parents[1] / "golden"


def lengths(n, shortest, spread):
    """Return lengths that any program can compute, with few long ones."""
    return [shortest + mix(k) % spread * (mix(k) % 97) // 97 for k in range(n)]


def labels(n, count):
    """Return labels that any program can compute, in uneven classes."""
    return [min(mix(k) % count, mix(n + k) % count) for k in range(n)]


WEIGHTS = {
    "equal": lambda i: 0.1,
    "falling": lambda i: 1 / (i + 2),
    "some": lambda i: (i + 1) % 7 / 3,
    "steep": lambda i: (1e300, 0.0, 1.0, 5e-324)[(i + 1) % 4],
    "tiny": lambda i: 5e-324 * ((i + 1) % 3),
}


def weights(given):
    """Return weights; a record may have their name and number instead."""
    name, *count = given
    return [WEIGHTS[name](i) for i in range(*count)] if isinstance(name, str) else given


def mixture(sources, weights, block, epoch_size=3000):
    """Make a mixture of shuffled sources; the weights are in the order of the sources."""
    orders = {name: cseq.Shuffled(samples) for name, samples in sources.items()}
    return cseq.Mixture(orders, named(sources, weights), block=block, epoch_size=epoch_size)


def named(sources, weights):
    """Return the weights by source."""
    return [(unit, dict(zip(sources, each, strict=True))) for unit, each in weights]


def rows(kind, lengths, row):
    """Make rows of documents."""
    if kind == "packed":
        return cseq.Packed(lengths, row, too_long="split")
    if kind == "concatenated":
        return cseq.Concatenated(lengths, row)
    parts = {"a": rows("packed", lengths[::2], row), "b": rows("concatenated", lengths[1::2], row)}
    return cseq.Mixture(parts, {"a": 1, "b": 2}, block=64)


def balanced(kind, lengths, row, **options):
    """Make rows of documents that are balanced by their work."""
    return cseq.Balanced(rows(kind, lengths, row), **options)


# What makes an order of a record's arguments, by the definition's name.
ORDERS = {
    "balanced-v1": balanced,
    "blocks-v2": lambda n, rows, window, lanes: cseq.Blocks(rows, window, lanes, samples=n),
    "buckets-v2": lambda lengths, **options: cseq.Buckets(lengths, too_long="drop", **options),
    "concatenated-v1": lambda count, spread, row: cseq.Concatenated(lengths(count, 0, spread), row),
    "groups-v1": lambda labels, **options: cseq.Groups(labels, repeat_small=True, **options),
    "mixture-v2": mixture,
    "packed-v1": lambda lengths, **options: cseq.Packed(lengths, too_long="drop", **options),
    "unequal-blocks-v1": lambda lengths, **options: cseq.Blocks(rows=lengths, **options),
    "packed-split-v1": lambda lengths, **options: cseq.Packed(lengths, too_long="split", **options),
    "resized-v1": lambda n, size: cseq.Resized(cseq.Shuffled(n), size),
    "weighted-v2": cseq.Weighted,
}
# Their files have no units.
OF_SAMPLES = ("blocks-v2", "mixture-v2", "unequal-blocks-v1", "weighted-v2")
VALUES = {"lengths": lengths, "labels": labels, "weights": lambda *given: weights([*given])}


def arguments_of(record, kind=None):
    """Return a record's items other than its results, which are an order's by default."""
    return {key: value for key, value in record.items() if key not in RESULTS[kind or order]}


def made(name, record):
    """Make the order of a record."""
    if name not in ORDERS:
        raise ValueError(f"{name!r} is not in ORDERS of {__file__}: write what makes its orders")
    given = arguments_of(record)
    del given["seed"], given["epoch"]
    if name != "mixture-v2":
        # The weights of mixture-v2 are by source, not by sample.
        given |= {key: VALUES[key](*given[key]) for key in VALUES.keys() & given.keys()}
    return ORDERS[name](**given)


def of_samples(samples):
    """Return the results of an order of samples: the first samples, the last one, and the hash."""
    first, last = samples[:10].tolist(), int(samples[-1])
    return {"first": first, "last": last, "sha256": sha256(samples)}


def of_units(units):
    """Return the results of an order: the number of units, the first, the last, and the hash."""
    digest = sha256([*map(len, units), *itertools.chain(*units)])
    return {"units": len(units), "first": units[0][:12], "last": units[-1][:12], "sha256": digest}


def sha256(numbers):
    """Return the hash of integers, as 64 bits each."""
    return hashlib.sha256(np.asarray(numbers).astype("<u8").tobytes()).hexdigest()


def order(name, record):
    """Compute the results of an order."""
    order, seed, epoch = made(name, record), record["seed"], record["epoch"]
    if order.name != name:
        raise ValueError(f"the file is of {name}, and the order is {order.name}: make a new file")
    if name in OF_SAMPLES:
        return of_samples(order.reader(seed).samples(epoch, 0, order.units)[0])
    return of_units(order.batches(seed=seed, epoch=epoch))


def positions(name, record):
    """Compute the samples at the positions of a record, and the hash of all if they are few."""
    n, where = record["n"], (record["seed"], record["epoch"])
    reader = cseq.Shuffled(n).reader(where[0])
    read = [int(reader.samples(where[1], at, 1)[0][0]) for at in record["positions"]]
    found = {"samples": read}
    if n <= MOST_HASHED:
        found["sha256"] = sha256(cseq.permutation(n, *where, name))
    return found


def permutation(_, record):
    """Compute the order of a table."""
    found = cseq.permutation(record["n"], record["seed"], record["epoch"])
    return {"first": found[:10].tolist(), "sha256": sha256(found)}


def words(_, record):
    """Compute the words that seed all randomness."""
    made = derive(record["seed"], record["epoch"], record["purpose"], 4)
    return {"words": [f"{word:016x}" for word in made]}


# The names of the results, in order, by the function that computes them from a record.
RESULTS = {
    order: ("units", "first", "last", "sha256"),
    positions: ("samples", "sha256"),
    permutation: ("first", "sha256"),
    words: ("words",),
}


OTHERS = {("feistel", "orders"): positions, ("shuffle", "permutation"): permutation}
OTHERS["shuffle", "derive"] = words


def cases(path):
    """List the records of a file, each with its definition and the function for its results."""
    file, found = json.loads(path.read_text(encoding="ascii")), []
    for part, some in file.items() if isinstance(file, dict) else ():
        is_order = path.stem.startswith("orders_") and part == "orders"
        if kind := order if is_order else OTHERS.get((path.stem, part)):
            found += [(kind, file["algorithm"], each) for each in some]
    return found


def records(stem):
    """Return the records of a file."""
    return [record for _, _, record in cases(FOLDER / f"{stem}.json")]


def complete(path):
    """Write the results that a file's records lack; return how many.

    If a record has other results than its definition gives now, the file stays as it is.
    """
    text, count = path.read_text(encoding="ascii"), 0
    for kind, name, record in cases(path):
        results = kind(name, record)
        given = arguments_of(record, kind)
        there = {key: value for key, value in record.items() if key not in given}
        if there and there != results:
            raise ValueError(
                f"{path.name}: {name} gives other results than the file has for {given}; what a "
                "name stands for never changes: give the new definition a new name, and a new file"
            )
        if not there:
            line = json.dumps(given)
            if line not in text:
                raise ValueError(f"{path.name}: write the record as {line}, on one line")
            text = text.replace(line, json.dumps(given | results))
            count += 1
    if count:
        path.write_text(text, encoding="ascii")
    return count


def main():
    """Complete all files of the folder."""
    for path in sorted(FOLDER.glob("*.json")):
        if count := complete(path):
            print(f"{path.name}: {count} records have their results now")


if __name__ == "__main__":
    # Orders warn of their arguments.
    warnings.simplefilter("ignore")
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
