"""What a worker process logs: sent to the trainer, and handled by its handlers.

A worker that is forked from the trainer has these, and sends nothing; nor does one whose root
logger has handlers of its own.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING

from cseq.threads import later

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Levels", "Records", "Sender", "levels"]

Levels = dict[str, int]  # of loggers that have one, by name; the root's is ""

MOST = 10_000  # records that wait for the handlers; the rest is left out

log = logging.getLogger("cseq")


# ── in the worker ──────────────────────────────────────────────────────────────────────────


class Sender(logging.Handler):
    """Sends records, ready to be handled elsewhere.

    At once, it is the handler of last resort: for records that no other handles. After `settle`,
    it is the root logger's, if that has none by then: the user's code may configure logging.

    Parameters
    ----------
    number : int
        The worker's, from 0.
    levels : dict
        Of the trainer's loggers: those that have none here get them.
    send : callable
        Called with each record's bytes.
    """

    def __init__(self, number: int, levels: Levels, send: Callable[[bytes], object]) -> None:
        super().__init__()
        self._name = f"cseq-w{number}"
        self._send = send
        self._pid = os.getpid()
        self._usual, logging.lastResort = logging.lastResort, self
        for name, level in levels.items():
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET or (logger is logging.root and not logger.handlers):
                logger.setLevel(level)

    def settle(self) -> None:
        """Handle what loggers with handlers of their own pass on, too."""
        if not logging.root.handlers:
            logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; not from a process that was forked off the worker."""
        if os.getpid() != self._pid:
            if self._usual is not None and record.levelno >= self._usual.level:
                self._usual.handle(record)
        elif self not in logging.root.handlers or logging.root.handlers == [self]:
            try:
                with contextlib.suppress(ConnectionError):  # the trainer is gone
                    self._send(_packed(record, self._name))
            except Exception:  # noqa: BLE001 - as handlers do: printed, and the worker goes on
                self.handleError(record)


def _packed(record: logging.LogRecord, name: str) -> bytes:
    """Pickle a record: its text instead of its arguments, and what cannot be pickled as text."""
    record = copy.copy(record)
    record.msg, record.args = record.getMessage(), None
    record.processName = name
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    record.exc_info = None
    try:
        return pickle.dumps(vars(record))
    except Exception:  # noqa: BLE001 - of `extra`: objects of any kind
        plain = (str, int, float, type(None))
        fields = vars(record).items()
        return pickle.dumps({k: v if type(v) in plain else repr(v) for k, v in fields})


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


def levels() -> Levels:
    """Return the levels of this process's loggers."""
    loggers = list(logging.root.manager.loggerDict.items())
    known = {name: each.level for name, each in loggers if isinstance(each, logging.Logger)}
    return {"": logging.root.level} | {name: level for name, level in known.items() if level}


class Records:
    """Has records handled, one after the other, on the thread of `cseq.threads.tell`."""

    def __init__(self) -> None:
        self._taken = self._lost = 0  # as counted by the thread that calls `queue_record`
        self._handled = self._told = 0  # by the one that handles records

    def queue_record(self, body: bytes) -> None:
        """Have a record handled, unless too many wait: the log says how many are left out."""
        if self._taken - self._handled >= MOST:
            self._lost += 1
            return
        self._taken += 1
        later(partial(self._handle, body))

    def _handle(self, body: bytes) -> None:
        self._handled += 1
        lost, self._told = self._lost - self._told, self._lost
        if lost:
            log.warning(
                "%d records that workers logged are left out: the handlers of logging are slower "
                "than the workers; raise the level of their loggers",
                lost,
            )
        record = logging.makeLogRecord(pickle.loads(body))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
