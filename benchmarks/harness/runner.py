"""Contenders as processes, in turn: figures, CPU time, memory, descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from harness import usage

if TYPE_CHECKING:
    from harness.case import Case, Contender

CHILD = Path(__file__).with_name("child.py")
# The seconds that a contender may take for its start or for a round.
PATIENCE = 120.0
# The seconds between two readings of the memory.
SAMPLING = 0.01


class Failed(Exception):
    """A contender ended, or did not answer."""


@dataclass
class Result:
    """The figures of one contender. Lists have one value for each round.

    Attributes
    ----------
    figures : list of float
        In the unit of the case.
    seconds : list of float
        Duration of the rounds.
    cpu_seconds : list of float
        CPU time of all processes of the contender, in the rounds.
    batches : int
        The batches of the last round; 0 if rounds do not count batches.
    peak_bytes : float
        The most memory of all processes together, sampled in a separate round.
    descriptors : float
        Open descriptors of all processes together, after the last round.
    error : str
        Why it failed; empty if it did not.
    """

    contender: Contender
    figures: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    batches: int = 0
    peak_bytes: float = nan
    descriptors: float = nan
    error: str = ""

    @property
    def median(self) -> float:
        """Median of the figures."""
        return statistics.median(self.figures) if self.figures else nan


class Running:
    """The process of a contender."""

    def __init__(self, case: Case, contender: Contender) -> None:
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 (`end` closes it)
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [contender.python or sys.executable, str(CHILD), case.name, contender.name],
            env=environment(contender.checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def round(self, result: Result) -> None:
        """Run a round and record its figures."""
        before = usage.cpu_seconds(self._process.pid)
        answer = self._ask()
        result.cpu_seconds.append(usage.cpu_seconds(self._process.pid) - before)
        result.figures.append(answer["figure"])
        result.seconds.append(answer["seconds"])
        result.batches = answer["batches"]

    def warm_up(self) -> None:
        """Run an unmeasured round."""
        self._ask()

    def weigh(self, result: Result) -> None:
        """Run an untimed round to measure memory and descriptors."""
        done = threading.Event()
        peak = [usage.memory_bytes(self._process.pid)]

        def sample() -> None:
            while not done.wait(SAMPLING):
                peak[0] = max(peak[0], usage.memory_bytes(self._process.pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            self._ask()
        finally:
            done.set()
            sampler.join()
        result.peak_bytes = peak[0]
        result.descriptors = usage.descriptors(self._process.pid)

    def end(self, result: Result) -> None:
        """Let the contender clean up. If it does not exit, kill it and record this."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with self._watchdog():
            self._process.wait()
        if self._process.returncode != 0 and not result.error:
            result.error = self._last_words()
        self._process.stdout.close()
        self._errors.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self) -> dict[str, float]:
        """Send a line and return the answer."""
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, float]:
        """Read a line."""
        with self._watchdog():
            line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise Failed(self._last_words())
        return json.loads(line)

    @contextlib.contextmanager
    def _watchdog(self):
        """Kill the contender if the block takes too long."""
        timer = threading.Timer(PATIENCE, os.killpg, (self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _last_words(self) -> str:
        """The last output of the contender."""
        self._errors.seek(0)
        return f"exit code {self._process.returncode}\n{self._errors.read()[-2000:]}"


def environment(checkout: Path | None) -> dict[str, str]:
    """Return an environment in which processes import a checkout's cseq."""
    if checkout is None:
        return dict(os.environ)
    path = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def run_case(case: Case, contenders: list[Contender], rounds: int) -> list[Result]:
    """Measure the contenders of a case, in turn."""
    results = [Result(contender) for contender in contenders]
    rounds = min(rounds, case.rounds or rounds)
    usage.join_free_memory()
    # With tiny batches, a process keeps one of two speeds, so builds are compared in new processes.
    if case.fresh or case.alone or any(one.checkout or one.python for one in contenders):
        run_afresh(case, results, rounds)
    else:
        run_together(case, results, rounds)
    return results


def run_afresh(case: Case, results: list[Result], rounds: int) -> None:
    """Start a process for every round. The last one measures the memory."""
    for number in range(rounds + 1):
        for result in in_turn(results, number):
            with noting(result):
                running = Running(case, result.contender)
                with ending(running, result):
                    if not case.fresh:
                        running.warm_up()
                    if number < rounds:
                        running.round(result)
                    else:
                        running.weigh(result)


def run_together(case: Case, results: list[Result], rounds: int) -> None:
    """Start a process for each contender, then run a round of each in turn."""
    with contextlib.ExitStack() as stack:
        running = {}
        for result in results:
            with noting(result):
                process = running[result.contender.name] = Running(case, result.contender)
                stack.enter_context(ending(process, result))
                if not case.rounds:
                    process.warm_up()
        for number in range(rounds):
            for result in in_turn(results, number):
                with noting(result):
                    running[result.contender.name].round(result)
        for result in in_turn(results, 0):
            if not case.rounds:
                with noting(result):
                    running[result.contender.name].weigh(result)


def in_turn(results: list[Result], number: int) -> list[Result]:
    """Return the contenders that have not failed. Each round begins with a different one."""
    first = number % len(results)
    return [result for result in results[first:] + results[:first] if not result.error]


@contextlib.contextmanager
def noting(result: Result):
    """Record a contender's failure, and continue with the others."""
    try:
        yield
    except Failed as error:
        result.error = str(error)


@contextlib.contextmanager
def ending(running: Running, result: Result):
    """End a contender's process after the work."""
    try:
        yield
    finally:
        running.end(result)
