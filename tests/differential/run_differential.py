"""Compares two loader classes on random cases: a trainer must see the same, bit for bit.

    python tests/differential/run_differential.py [--cases 200] [--seed 0] [--class A] [--against B]
    python tests/differential/run_differential.py --case '{"num_workers": 2}'
    python tests/differential/run_differential.py --mutants [--cases 200]

The second form compares one case and prints what is seen; the third form searches for a case that
shows each mutant. A class is module:Class. A case with a difference is reduced as far as it still
shows one, and printed as a command. The exit status is 1 if there was a difference.
"""

import argparse
import json
import os
import random
import shlex
import sys
import time
from functools import partial

from case import generate, settle, settle_for_threads, smaller
from mutants import MUTANTS
from observe import difference, observe

import cseq.adapters.torch

OWN = "torch.utils.data:DataLoader"
DEFAULT = "cseq.adapters.torch:DataLoader"
IN_THREADS = "run_differential:ThreadLoader"
# Torch warns of the number of processes; threads need no such warning.
MANY = "This DataLoader will create"


class ThreadLoader(cseq.adapters.torch.DataLoader):
    """The workers are threads, which share the data set and the generators."""

    def __init__(self, *args, **options):
        super().__init__(*args, worker_method="thread", **options)


def compare(case, first, second):
    """Return the first two events that differ, or None; only the first loader may lose a batch."""
    return difference(case, *seen(case, first, second))


def seen(case, first, second):
    both = observe(case, first, second)
    if second != IN_THREADS:
        return both
    text = json.dumps([[event for event in events if MANY not in str(event)] for events in both])
    return json.loads(text.replace("DataLoader worker thread", "DataLoader worker process"))


def prepared(options, second):
    """Return a case in a comparable form."""
    return settle_for_threads(options) if second == IN_THREADS else settle(options)


def shrink(case, first, second, seconds=120):
    """Return the smallest case found in the time that still shows a difference."""
    end = time.monotonic() + seconds
    tried = {json.dumps(case, sort_keys=True)}
    found = True
    while found:
        found = False
        for candidate in (prepared(each, second) for each in smaller(case)):
            text = json.dumps(candidate, sort_keys=True)
            if text in tried or len(text) > len(json.dumps(case)):
                continue
            if time.monotonic() > end:
                return case
            tried.add(text)
            if compare(candidate, first, second) is not None:
                case, found = candidate, True
                break
    return case


def command(case, first, second):
    """Return a shell command that compares a case again."""
    script = os.path.relpath(__file__)
    text = shlex.quote(json.dumps(case))
    return f"python {script} --class {second} --against {first} --case {text}"


def report(case, first, second):
    """Print a difference, with the smallest case that shows one."""
    case = shrink(case, first, second)
    print(f"  {command(case, first, second)}")
    found = compare(case, first, second)
    if found is None:
        print("  (not there when it was run again)")
    else:
        for path, event in zip((first, second), found, strict=True):
            print(f"  {path}: {json.dumps(event)[:1500]}")
    sys.stdout.flush()


def cases(seed, number, *, methods):
    return generate(random.Random(f"{seed}/{number}"), methods)


def search(seed, number, first, second, *, methods, failures):
    """Compare cases of a seed, and return the number of differences; stop after some."""
    began, differ = time.monotonic(), 0
    for each in range(number):
        case = prepared(cases(seed, each, methods=methods), second)
        if compare(case, first, second) is not None:
            differ += 1
            print(f"case {each} of seed {seed} differs:", flush=True)
            report(case, first, second)
            if differ == failures:
                break
        if (each + 1) % 100 == 0 or each + 1 == number:
            rate = (each + 1) / (time.monotonic() - began)
            print(f"{each + 1} cases, {differ} differ, {rate:.1f} a second", flush=True)
    return int(differ > 0)


def hunt(seed, number):
    """Search for a case that shows each mutant; return 1 if one was not found."""
    missed = 0
    for name in MUTANTS:
        path = f"mutants:{name}"
        for each in range(number):
            case = cases(seed, each, methods=False)
            if compare(case, OWN, path) is not None:
                small = shrink(case, OWN, path, 20)
                print(f"{name}: found by case {each}, {json.dumps(small)}", flush=True)
                break
        else:
            missed += 1
            print(f"{name}: not found in {number} cases", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants found")
    return int(missed > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option, flag = parser.add_argument, partial(parser.add_argument, action="store_true")
    option("--cases", type=int, default=200)
    option("--seed", type=int, default=0)
    option("--class", dest="cls", metavar="A", default=DEFAULT, help=f"default: {DEFAULT}")
    option("--against", metavar="B", default=OWN, help=f"default: {OWN}")
    option("--case", type=json.loads, help="one case, as a dict in JSON")
    option("--failures", type=int, default=5, help="end after this number of differences (5)")
    flag("--no-methods", help="no spawn and forkserver, which take seconds")
    flag("--threads", help=f"{IN_THREADS}, and the cases that it is for")
    flag("--mutants", help="find the mutants of mutants.py, B's subclasses")
    asked = parser.parse_args()
    if asked.threads:
        asked.cls = IN_THREADS
    if asked.mutants:
        return hunt(asked.seed, asked.cases)
    if asked.case is not None:
        case = prepared(asked.case, asked.cls)
        both = seen(case, asked.against, asked.cls)
        for event in both[1]:
            print(json.dumps(event)[:400])
        found = difference(case, *both)
        print("the same" if found is None else f"differ:\n  {found[0]}\n  {found[1]}")
        return int(found is not None)
    options = {"methods": not asked.no_methods, "failures": asked.failures}
    return search(asked.seed, asked.cases, asked.against, asked.cls, **options)


if __name__ == "__main__":
    sys.exit(main())
