"""Writes slow.txt, the tests that `make quick` leaves out, from a measurement.

    pytest -n 2 --cpu-times FILE && python tests/slow.py FILE

A test function is slow if one case takes `CASE` seconds of CPU time, including its processes, or if
all cases together take `ALL`.
"""

import sys
from collections import defaultdict
from pathlib import Path

CASE, ALL = 0.15, 0.5


def main(file):
    """Apply the rule to lines of seconds and names."""
    took = defaultdict(list)
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        cpu, name = line.split(" ", 1)
        took[name.partition("[")[0]].append(float(cpu))
    slow = sorted(name for name, each in took.items() if max(each) >= CASE or sum(each) >= ALL)
    Path(__file__).with_suffix(".txt").write_text("\n".join([*slow, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
