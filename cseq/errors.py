"""All cseq exceptions.

::

    CseqError
    ├── WorkerError       (RuntimeError)  an indexer raised an exception that cannot be pickled
    ├── WorkerDied        (RuntimeError)  worker processes died too often, in total or on one batch
    ├── WorkerTimeout     (TimeoutError)  a batch took longer than `timeout`
    └── RemoteTraceback                   a traceback from another process, used as ``__cause__``

If an indexer raises an exception, the loop re-raises it with its original type. Exceptions that
would silently end the loop or the program (StopIteration, ``sys.exit``) become a ``RuntimeError``.
Invalid arguments raise ``TypeError`` or ``ValueError``, misuse of a manager's lifecycle raises
``OSError``, and a stale iterator raises ``InterruptedError``.
"""

from __future__ import annotations

__all__ = ["CseqError", "RemoteTraceback", "WorkerDied", "WorkerError", "WorkerTimeout"]


class CseqError(Exception):
    """Base class for cseq's own errors."""


class WorkerError(CseqError, RuntimeError):
    """An indexer raised an exception that cannot be pickled and sent to the trainer.

    The message and ``__cause__`` contain the type, text and traceback of that exception.
    """


class WorkerDied(CseqError, RuntimeError):
    """Workers died more than `max_restarts` times, or repeatedly at startup or on one batch.

    Attributes
    ----------
    epoch, batch : int or None
        The batch that the worker was making, if any.
    indices : list of int
        The sample indices of that batch, or an empty list if there was no batch.
    exitcode : int or None
        The exit code (if negative, a signal number), or None if it is unknown.
    worker : int or None
        The worker number, starting from 0.
    pid : int or None
        The process id of the worker.
    """

    def __init__(
        self,
        message: str,
        *,
        epoch: int | None = None,
        batch: int | None = None,
        indices: list[int] | None = None,
        exitcode: int | None = None,
        worker: int | None = None,
        pid: int | None = None,
    ) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.batch = batch
        self.indices = indices or []
        self.exitcode = exitcode
        self.worker = worker
        self.pid = pid


class WorkerTimeout(CseqError, TimeoutError):
    """A batch took longer than `timeout`. The message shows what the worker was executing."""


class RemoteTraceback(CseqError):
    """A traceback from another process as text, used as the ``__cause__`` of an exception.

    Attributes
    ----------
    worker : int or None
        The number, from 0, of the worker that raised the error, or None if it is unknown.
    process : str
        A description of the process.
    own : str or None
        The text of the resulting exception if it already contains the traceback. If so, this
        object's ``str()`` is short, so that a report shows the traceback only once. ``args[0]``
        is always the traceback.
    """

    worker: int | None = None
    process: str = "worker process"
    own: str | None = None

    @property
    def place(self) -> str:
        """A description of the process that raised the error."""
        return f"a {self.process}" if self.worker is None else f"{self.process} {self.worker}"

    def __str__(self) -> str:
        if self.own is not None:
            return f"in {self.place}"
        return f"\n{self.args[0]}" if self.args else ""
