"""The screen of ``python -m cseq top``, with textual.

::

    ranks      a line for each run, the one whose loop waits most first; if there are several
    head       the run that the cursor is on: its place, rates, queues
    workers    a line for each of its workers
    foot       its slowest batches, and the advice
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from cseq.observe.lines import HEADS, cells, foot, head, ranks, worker_stacks, workers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult

    from cseq.observe.attached import Watched, Watcher

__all__ = ["Screen"]

EVERY = 0.25  # seconds between two readings
TABLE_EVERY = 4  # readings between two times that the tables are written
BUSY = HEADS.index("busy")


def _text(lines: Iterable[str]) -> Text:
    return Text("\n".join(lines))


class Screen(App[None]):  # type: ignore[misc]
    """The runs that a watcher finds, four times a second."""

    TITLE = "cseq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; }
    #ranks { height: auto; max-height: 30%; border-bottom: solid $primary; }
    #head { padding: 0 0 1 0; }
    #workers { height: auto; max-height: 60%; }
    #foot { padding: 1; }
    #stacks { display: none; border: solid $primary; }
    """
    BINDINGS: ClassVar = [
        ("q", "quit", "quit"),
        ("n", "next", "next rank"),
        ("s", "sort", "sort"),
        ("d", "stacks", "stacks"),
        ("p", "pause", "pause"),
    ]

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._shown: Watched | None = None  # chosen; None: the first one
        self._by_busy = False
        self._paused = False
        self._ticks = 0

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="ranks", markup=False)
        yield Static(id="head", markup=False)
        with VerticalScroll(id="workers"):
            yield Static(id="rows", markup=False)
        yield Static(id="foot", markup=False)
        with VerticalScroll(id="stacks"):
            yield Static(id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.refresh_runs()
        self.set_interval(EVERY, self.tick)

    def tick(self) -> None:
        """Read all runs; write the tables each second."""
        if self._paused:
            return
        self._watcher.update()
        self._ticks += 1
        if self._ticks % TABLE_EVERY == 0:
            self.refresh_runs()

    @property
    def shown(self) -> Watched | None:
        """The run that the screen is about."""
        runs = self._watcher.runs
        if self._shown in runs:
            return self._shown
        return max(runs, key=lambda each: (not each.ended, each.recent()[1]), default=None)

    def refresh_runs(self) -> None:
        """Write all parts of the screen."""
        width, runs, shown = self.size.width - 2, self._watcher.runs, self.shown
        several = self.query_one("#ranks", Static)
        several.display = len(runs) > 1
        several.update(_text(ranks(runs, width)))
        if shown is None:
            said = "\n".join(self._watcher.problems) or "no run of cseq's so far"
            self.query_one("#head", Static).update(_text([f" {said}"]))
            return
        self.query_one("#head", Static).update(_text(head(shown, width)))
        self.query_one("#foot", Static).update(_text(each.strip() for each in foot(shown)))
        rows = list(workers(shown, width))
        if self._by_busy:
            rows.sort(key=lambda row: -float(row[BUSY].split("%")[0]))
        text = _text(cells(row, width) for row in (HEADS, *rows))
        text.stylize("bold", 0, len(cells(HEADS, width)))
        self.query_one("#rows", Static).update(text)

    def action_next(self) -> None:
        """Show the next run."""
        runs, shown = self._watcher.runs, self.shown
        if shown is not None:
            self._shown = runs[(runs.index(shown) + 1) % len(runs)]
            self.refresh_runs()

    def action_sort(self) -> None:
        """Sort workers by how busy they are, or by their numbers."""
        self._by_busy = not self._by_busy
        self.refresh_runs()

    def action_pause(self) -> None:
        """Read nothing more, or go on."""
        self._paused = not self._paused

    def action_stacks(self) -> None:
        """Show the stacks of the run's workers, or no longer."""
        panel, shown = self.query_one("#stacks"), self.shown
        panel.display = not panel.display
        if panel.display and shown is not None:
            self.query_one("#text", Static).update("".join(worker_stacks([shown])))
