"""The screen of ``cseq top``, with textual.

::

    ranks      a line for each run, the one whose loop waits most first; if there are several
    head       the run that is shown: its place, rates, queues
    foot       its slowest batches, and the advice
    rows       a line for each of its workers
    stacks     in place of these, where the workers are
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from cseq.observe.lines import foot, head, overview, ranks, worker_stacks, workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from cseq.observe.attached import Watcher

__all__ = ["Screen"]

EVERY = 0.25  # seconds between two readings
TABLE_EVERY = 4  # readings between two times that all is written
PARTS = ("ranks", "head", "foot", "rows", "stacks")


class Screen(App[None]):  # type: ignore[misc]
    """The runs that a watcher finds, four times a second."""

    TITLE = "cseq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    VerticalScroll { height: auto; }
    #ranks-part { max-height: 30%; border-bottom: solid $primary; }
    #foot { padding: 1 0; }
    #rows-part, #stacks-part { height: 1fr; }
    """
    BINDINGS: ClassVar = [
        ("q,ctrl+c", "quit", "quit"),
        ("n", "next", "next"),
        ("s", "sort", "sort"),
        ("d", "stacks", "stacks"),
        ("p", "pause", "pause"),
        ("l", "light", "light"),
    ]

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._by_busy = self._paused = self._is_light = False
        self._ticks = 0

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        for part in PARTS:
            with VerticalScroll(id=f"{part}-part"):
                yield Static(id=part, markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#stacks-part").display = False
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

    def on_resize(self) -> None:
        """Fill the new width."""
        self.refresh_runs()

    def refresh_runs(self) -> None:
        """Write all parts of the screen."""
        width, shown = self.size.width - 2, self._watcher.shown  # a scroll bar takes two
        several = len(self._watcher.runs) > 1
        self.query_one("#ranks-part").display = several
        self._write("ranks", ranks(self._watcher, width) if several else [], 0)
        if shown is None:
            self._write("head", overview(self._watcher, width))
            return
        self._write("head", head(shown, width))
        self._write("foot", foot(shown, width))
        self._write("rows", workers(shown, width, by_busy=self._by_busy), 0)

    def _write(self, part: str, lines: Sequence[str], bold: int = -1) -> None:
        text = Text("\n").join(
            Text(line, "bold" if number == bold else "") for number, line in enumerate(lines)
        )
        self.query_one(f"#{part}", Static).update(text)

    def action_next(self) -> None:
        """Show the next run."""
        self._watcher.show_next()
        self.refresh_runs()

    def action_sort(self) -> None:
        """Sort workers by how busy they are, or by their numbers."""
        self._by_busy = not self._by_busy
        self.refresh_runs()

    def action_pause(self) -> None:
        """Read nothing more, or go on."""
        self._paused = not self._paused

    def action_light(self) -> None:
        """Have dark letters on a light ground, or light ones on a dark ground."""
        self._is_light = not self._is_light
        self.theme = "textual-light" if self._is_light else "textual-dark"

    def action_stacks(self) -> None:
        """Show the stacks of the run's workers in place of their lines, or no longer."""
        panel, shown = self.query_one("#stacks-part"), self._watcher.shown
        panel.display = not panel.display
        self.query_one("#rows-part").display = not panel.display
        if panel.display and shown is not None:
            self._write("stacks", "".join(worker_stacks([shown])).splitlines())
