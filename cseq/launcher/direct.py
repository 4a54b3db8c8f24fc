"""Launchers whose workers are the trainer's own children: spawn and fork."""

from __future__ import annotations

import logging
import os
import time
from contextvars import Context
from typing import TYPE_CHECKING

from cseq import compute
from cseq._slots import fork_worker
from cseq.launcher.base import (
    FOREVER,
    KILL,
    LAST,
    Children,
    apart,
    check_owner,
    flush_output,
    no_objects,
)
from cseq.launcher.child import begin_as_copy
from cseq.launcher.forks import handing_over, pair
from cseq.launcher.processes import (
    PosixProcess,
    describe_start,
    signals_blocked,
    spawn,
    trainer_identity,
)
from cseq.threads import await_told, tell

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from cseq.launcher.base import Child
    from cseq.launcher.processes import Process


class _DirectChild:
    """A worker that is the trainer's own child process."""

    def __init__(self, sock: socket.socket, process: Process) -> None:
        self.pid = process.pid
        self.sock = sock
        self.handle = process.handle
        self.ended = process.ended
        self._process = process

    @property
    def code(self) -> int | None:
        return self._process.code

    @property
    def gone(self) -> bool:
        self._process.wait(0)
        return self._process.gone

    def kill(self) -> None:
        try:
            self.send_signal(KILL)
        except PermissionError:  # the rights that it was started with have been given up
            tell(logging.WARNING, "worker process %d cannot be killed: no permission", self.pid)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def status(self, timeout: float) -> int | None:
        return self._process.wait(timeout)


class _DirectLauncher:
    """What spawn and fork share."""

    method = ""
    takes_objects = False
    importing = ""

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry = entry
        self._threads = threads
        self._children = Children()
        self._owner = os.getpid()

    def prepare(self) -> None:
        """Do nothing: nothing is needed."""

    def preload(self, modules: Sequence[str], seconds: float = FOREVER) -> None:
        """Do nothing: each worker imports for itself, or has what the trainer has imported."""

    def cancel(self) -> None:
        """Do nothing: nothing is waited for."""

    def launch(self, number: int, *, local: object = None, context: Context | None = None) -> Child:
        check_owner(self._owner)
        ours, theirs = pair()
        try:
            with theirs, signals_blocked():
                process = self._start(number, theirs, local, context or Context())
                child = _DirectChild(ours, process)
                self._children.add(child)
        except BaseException:
            ours.close()
            raise
        return child

    def _start(
        self, number: int, theirs: socket.socket, local: object, context: Context
    ) -> Process:
        raise NotImplementedError

    def close(self, deadline: float) -> bool:
        if os.getpid() != self._owner:
            return True  # a process that the user forked: these are not its children
        return apart(lambda: all(child.gone for child in self._children.end(deadline)))


class SpawnLauncher(_DirectLauncher):
    """Every worker is a new interpreter."""

    method = "spawn"

    def _start(
        self,
        number: int,
        theirs: socket.socket,
        local: object,
        context: Context,  # noqa: ARG002
    ) -> Process:
        no_objects(self.method, local)
        start = describe_start("worker", self._entry, number=number)
        return spawn(theirs, start, f"cseq-w{number}", self._threads)


class ForkLauncher(_DirectLauncher):
    """Every worker is a copy of the trainer."""

    method = "fork"
    takes_objects = True

    def _start(
        self, number: int, theirs: socket.socket, local: object, context: Context
    ) -> Process:
        flush_output()
        await_told(time.monotonic() + LAST)  # the thread has locks of the standard streams
        if self._threads is not None:
            compute.find_openblas()
        trainer = trainer_identity()
        with handing_over(theirs):
            pid, kept = fork_worker()
            if pid == 0:
                setting = number, self._entry, local, self._threads, trainer
                context.run(begin_as_copy, theirs, *setting)
            theirs.close()
        return PosixProcess(pid, kept)
