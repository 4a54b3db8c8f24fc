"""The process of one contender: `child.py CASE CONTENDER`, a round for each line it reads.

It answers its start and each line with one line of JSON. Everything else that a loader or its
workers print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

# A spawned worker of a loader imports this file, too.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cases import all_cases
from harness.case import Counter


def main() -> None:
    """Set the contender up, then run a round for each line until the end of the input."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    case, contender = sys.argv[1:]
    rounds = all_cases()[case].contender(contender).make()
    run = next(rounds)
    reply(replies, ready=True)
    for _ in sys.stdin:
        Counter.batches = 0
        start = time.perf_counter()
        figure = run()
        seconds = time.perf_counter() - start
        reply(replies, figure=figure, seconds=seconds, batches=Counter.batches)
    # Let the contender clean up.
    next(rounds, None)


def reply(replies: TextIO, **values: object) -> None:
    """Send one line."""
    print(json.dumps(values), file=replies, flush=True)


if __name__ == "__main__":
    main()
