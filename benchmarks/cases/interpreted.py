"""An indexer in pure Python: the gain from threads without a GIL, and from processes."""

from __future__ import annotations

import sysconfig
from functools import partial

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Interpreted, Work, milliseconds

WORK = Work(Interpreted, scaled(1000, 20), milliseconds)

LIMIT = "bare loop"
TWO_THREADS, ONE_THREAD = "cseq, 2 threads", "cseq, 1 thread"
TWO_PROCESSES, ONE_PROCESS = "cseq, 2 processes", "cseq, 1 process"

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
THREADS = Goal(
    "2 threads: times the rate of one", lambda f: f[ONE_THREAD] / f[TWO_THREADS], at_least=1.8
)
PROCESSES = Goal(
    "2 processes: times the rate of one", lambda f: f[ONE_PROCESS] / f[TWO_PROCESSES], at_least=1.8
)

CASES = (
    Case(
        "interpreted",
        "1 ms a batch in pure Python",
        "ms/batch",
        (
            Contender(TWO_THREADS, partial(loaders.cseq_threads, WORK), ours=True),
            Contender(ONE_THREAD, partial(loaders.cseq_threads, WORK, num_workers=1), ours=True),
            Contender(TWO_PROCESSES, partial(loaders.cseq_processes, WORK), ours=True),
            Contender(ONE_PROCESS, partial(loaders.cseq_processes, WORK, num_workers=1), ours=True),
            Contender(LIMIT, partial(loaders.bare, WORK)),
        ),
        limit=LIMIT,
        goals=(THREADS, PROCESSES) if FREE_THREADED else (PROCESSES,),
    ),
)
