"""Launchers whose workers are the trainer's own children: spawn and fork."""

from __future__ import annotations

import time
from contextvars import Context
from typing import TYPE_CHECKING

from cseq import system
from cseq._memory import fork
from cseq.processes.launcher.base import LAST, flush_output
from cseq.processes.launcher.child import begin_as_copy
from cseq.processes.launcher.forks import handing_over, pair
from cseq.processes.launcher.processes import (
    Child,
    Launcher,
    describe_start,
    signals_blocked,
    spawn,
    trainer_identity,
)
from cseq.threads import await_told

if TYPE_CHECKING:
    import socket


class SpawnLauncher(Launcher):
    """Every worker is a new interpreter."""

    method = "spawn"

    def _launch(self, number: int, local: object, context: Context | None) -> Child:
        ours, theirs = pair()
        try:
            with theirs, signals_blocked():
                child = self._start(number, ours, theirs, local, context)
                self._add(child)
        except BaseException:
            ours.close()
            raise
        return child

    def _start(
        self,
        number: int,
        ours: socket.socket,
        theirs: socket.socket,
        local: object,  # noqa: ARG002
        context: Context | None,  # noqa: ARG002
    ) -> Child:
        start = describe_start("worker", self._entry, number=number)
        return spawn(ours, theirs, start, f"cseq-w{number}", self._threads)


class ForkLauncher(SpawnLauncher):
    """Every worker is a copy of the trainer."""

    method = "fork"
    takes_objects = True

    def _start(
        self,
        number: int,
        ours: socket.socket,
        theirs: socket.socket,
        local: object,
        context: Context | None,
    ) -> Child:
        flush_output()
        await_told(time.monotonic() + LAST)  # the thread has locks of the standard streams
        if self._threads is not None:
            system.find_openblas()
        trainer = trainer_identity()
        with handing_over(theirs):
            pid = fork()
            if pid == 0:
                setting = number, self._entry, local, self._threads, trainer
                (context or Context()).run(begin_as_copy, theirs, *setting)
            theirs.close()
        return Child(ours, pid)
