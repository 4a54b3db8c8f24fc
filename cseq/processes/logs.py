"""Forwards log records from worker processes to the trainer.

Workers that inherit the trainer's handlers, or install their own, do not send records.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING

from cseq.threads import call_later

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Levels", "Records", "Sender", "levels"]

# Logger levels, keyed by name. The root logger's name is "".
Levels = dict[str, int]

MOST = 10_000

log = logging.getLogger("cseq")


# ── in the worker ──────────────────────────────────────────────────────────────────────────


class Sender(logging.Handler):
    """Sends log records to the trainer.

    At first, this is the handler of last resort. `settle` adds it to the root logger, unless user
    code has added a handler.

    Parameters
    ----------
    worker : int
    levels : dict
        The trainer's logger levels.
    send : callable
        Called with each pickled record.
    """

    def __init__(self, worker: int, levels: Levels, send: Callable[[bytes], object]) -> None:
        super().__init__()
        self._name = f"cseq-w{worker}"
        self._send = send
        self._pid = os.getpid()
        self._usual, logging.lastResort = logging.lastResort, self
        for name, level in levels.items():
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET or (logger is logging.root and not logger.handlers):
                logger.setLevel(level)

    def settle(self) -> None:
        """Add this handler to the root logger, unless user code has added a handler."""
        if not logging.root.handlers:
            logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, unless this process was forked from the worker."""
        if os.getpid() != self._pid:
            if self._usual is not None and record.levelno >= self._usual.level:
                self._usual.handle(record)
        elif self not in logging.root.handlers or logging.root.handlers == [self]:
            try:
                with contextlib.suppress(ConnectionError):
                    self._send(_packed(record, self._name))
            except Exception:  # noqa: BLE001
                self.handleError(record)


def _packed(record: logging.LogRecord, name: str) -> bytes:
    """Pickle a record with its text. Fields that cannot be pickled become strings."""
    record = copy.copy(record)
    record.msg, record.args = record.getMessage(), None
    record.processName = name
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    record.exc_info = None
    try:
        return pickle.dumps(vars(record))
    except Exception:  # noqa: BLE001
        plain = (str, int, float, type(None))
        fields = vars(record).items()
        return pickle.dumps({k: v if type(v) in plain else repr(v) for k, v in fields})


# ── in the trainer ─────────────────────────────────────────────────────────────────────────


def levels() -> Levels:
    """Return the logger levels that are set in this process."""
    loggers = list(logging.root.manager.loggerDict.items())
    set_levels = {
        name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger)
    }
    return {"": logging.root.level} | {name: level for name, level in set_levels.items() if level}


class Records:
    """Handles log records in the thread that `cseq.threads.log_later` uses."""

    def __init__(self) -> None:
        # `queue_record` updates the first pair of counters, and the logging thread the second pair.
        self._queued = self._lost = 0
        self._handled = self._reported = 0

    def queue_record(self, body: bytes) -> None:
        """Queue a record. If too many are pending, drop it and count it."""
        if self._queued - self._handled >= MOST:
            self._lost += 1
            return
        self._queued += 1
        call_later(partial(self._handle, body))

    def _handle(self, body: bytes) -> None:
        self._handled += 1
        lost, self._reported = self._lost - self._reported, self._lost
        if lost:
            log.warning(
                "%d log records from the workers were dropped, because the logging handlers are "
                "too slow for them; raise the log level in the workers",
                lost,
            )
        record = logging.makeLogRecord(pickle.loads(body))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
