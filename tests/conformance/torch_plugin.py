"""A pytest plugin that compares every outcome with a table, and sets the exit status.

A line of the table: tag, right outcomes (`passed|skipped`), the test, and after a # the reason if
`passed` is not the only outcome. A session is right if each test had such an outcome, if it ran
every test of the table that has one of the tags (unless -k chose), and if nothing entered torch's
own multiprocessing engine. Torch's and torchdata's own classes may enter it, of course, and so may
a test whose reason begins with "enters".
"""

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import stand_in

TAGS = ("own", "must", "skew", "internal", "cuda")
# A test with several reports has the worst one's outcome.
RANK = ("passed", "skipped", "xfailed", "failed")


class Row(NamedTuple):
    tag: str
    right: tuple[str, ...]
    reason: str


def read(path):
    """Return the table: a row for each test."""
    table = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words, _, reason = line.partition("#")
        if words.strip():
            tag, right, name = words.split()
            outcomes = tuple(right.split("|"))
            if tag not in TAGS or not set(outcomes) <= set(RANK) or name in table:
                raise ValueError(f"{path.name}:{number}: {line}")
            table[name] = Row(tag, outcomes, reason.strip())
    return table


def pytest_addoption(parser):
    group = parser.getgroup("stand-in")
    group.addoption("--table", type=Path, required=True, help="expected outcomes")
    group.addoption("--tags", default=",".join(TAGS), help="which tests: " + ",".join(TAGS))


def pytest_configure(config):
    config.pluginmanager.register(Judge(config), "stand-in-judge")


class Judge:
    """The outcomes of a session, and the table's expectations."""

    def __init__(self, config):
        self.config = config
        Path(os.environ[stand_in.ENTERED]).write_text("")
        self.table, self.tags = read(config.option.table), set(config.option.tags.split(","))
        if unknown := self.tags - set(TAGS):
            raise ValueError(f"no such tag: {', '.join(sorted(unknown))}")
        self.outcomes, self.wrong = {}, []

    def tag(self, name):
        return self.table[name].tag if name in self.table else "new"

    def pytest_collection_modifyitems(self, items):
        """Keep the tests with the tags, and those that the table lacks."""
        kept = {*self.tags, "new"}
        left_out = [item for item in items if self.tag(brief(item.nodeid)) not in kept]
        items[:] = [item for item in items if item not in left_out]
        self.config.hook.pytest_deselected(items=left_out)

    def pytest_collection_finish(self, session):
        """Report which tests of the table are missing."""
        there = {brief(item.nodeid) for item in session.items}
        files = {name.partition("::")[0] for name in there}
        if not self.config.option.keyword:
            for name, row in self.table.items():
                if row.tag in self.tags and name.partition("::")[0] in files and name not in there:
                    self.wrong.append(f"{name}: not found")

    def pytest_runtest_logreport(self, report):
        name = brief(report.nodeid)
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        self.outcomes[name] = max(self.outcomes.get(name, "passed"), outcome, key=RANK.index)

    def pytest_sessionfinish(self, session, exitstatus):
        """Compare; a session that pytest itself could not finish keeps its status."""
        for name, outcome in self.outcomes.items():
            if name not in self.table:
                self.wrong.append(f"{name}: {outcome}, and not in the table")
            elif outcome not in self.table[name].right:
                self.wrong.append(f"{name}: {outcome}, not {' or '.join(self.table[name].right)}")
        self.entered = Counter(Path(os.environ[stand_in.ENTERED]).read_text().split("\n")[:-1])
        if not stand_in.standing().__module__.startswith(("torch.", "torchdata.")):
            for line, times in self.entered.items():
                engine, _, test = line.partition(" ")
                name = brief(test)
                if not (name in self.table and self.table[name].reason.startswith("enters")):
                    self.wrong.append(f"{name}: entered {engine.partition(':')[2]}, {times} times")
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = int(bool(self.wrong))
        else:
            self.wrong.append(f"the session ended with {exitstatus!r}")

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        cls = stand_in.standing()
        write(f"in place: {cls.__module__}:{cls.__qualname__}")
        found = self.outcomes.items()
        for tag in (*TAGS, "new"):
            counts = Counter(outcome for name, outcome in found if self.tag(name) == tag)
            if counts:
                parts = [f"{counts[kind]} {kind}" for kind in RANK if counts[kind]]
                write(f"{tag:9}{', '.join(parts)}")
        write(f"torch's own engine: entered {sum(self.entered.values())} times")
        for line in self.wrong:
            write(f"WRONG {line}")
        write(f"{len(self.wrong)} not as expected")


def brief(nodeid):
    """Return a test's name without the folders of its file."""
    path, _, rest = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{rest}"
