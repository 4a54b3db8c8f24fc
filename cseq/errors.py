"""Every error of cseq, drawn as a tree.

::

    CseqError
    ├── WorkerError       (RuntimeError)  an indexer raised something that cannot be pickled
    ├── WorkerDied        (RuntimeError)  worker processes died too often to be replaced
    ├── WorkerTimeout     (TimeoutError)  a batch took longer than `timeout`
    └── RemoteTraceback                   the cause of an error from another process: its text

An exception that an indexer raises comes out of the loop as itself. What would end the loop or the
program there (StopIteration, ``sys.exit``) becomes a ``RuntimeError``. Wrong arguments are
``TypeError`` and ``ValueError``, misuse of a manager's lifecycle is ``OSError``, and a stale
iterator raises ``InterruptedError``.
"""

from __future__ import annotations

__all__ = ["CseqError", "RemoteTraceback", "WorkerDied", "WorkerError", "WorkerTimeout"]


class CseqError(Exception):
    """The root of cseq's own errors."""


class WorkerError(CseqError, RuntimeError):
    """An indexer raised an exception that cannot be pickled and sent to the trainer.

    Its type, text and traceback are in the message and in ``__cause__``.
    """


class WorkerDied(CseqError, RuntimeError):
    """A worker process died, and the budget for replacing it is spent.

    Attributes
    ----------
    epoch, batch : int or None
        The batch it worked on, if it had one.
    indices : list of int
        That batch's indices; empty if there was none.
    exitcode : int or None
        Exit code, or minus the signal's number; None if it is unknown.
    worker : int or None
        The worker's number, from 0.
    pid : int or None
        Its process id.
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
    """A batch took longer than `timeout`; the message shows where its worker was."""


class RemoteTraceback(CseqError):
    """A traceback in another process, as text; the ``__cause__`` of the error raised there.

    Attributes
    ----------
    worker : int or None
        The number of the worker that raised it, from 0, if known.
    process : str
        What the process is called.
    own : str or None
        The text of the exception that this one causes, if the traceback was added to it. The text
        of this one is then short, so that both together show the traceback once; ``args[0]`` is the
        traceback in any case.
    """

    worker: int | None = None
    process: str = "worker process"
    own: str | None = None

    @property
    def place(self) -> str:
        """The process that raised it, in words."""
        return f"a {self.process}" if self.worker is None else f"{self.process} {self.worker}"

    def __str__(self) -> str:
        if self.own is not None:
            return f"in {self.place}"
        return f"\n{self.args[0]}" if self.args else ""
