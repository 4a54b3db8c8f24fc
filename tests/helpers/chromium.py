"""Pages in headless Chromium, driven by its debugging protocol through two pipes."""

import fcntl
import json
import os
import shutil
import signal

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
FLAGS += ["--disable-dev-shm-usage", "--window-size=1400,900", "--hide-scrollbars"]
FLAGS += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]


class Browser:
    """Chromium with one page; `asked` are the addresses that it asks for, from `listen` on."""

    def __init__(self, folder):
        self.asked, self._number, self._buffer, self._session = [], 0, b"", {}
        to_page, self._write = os.pipe()
        self._read, from_page = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_page, from_page)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, at) for fd, at in zip(ends, (3, 4), strict=True)]
        args = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, args, os.environ, file_actions=actions, setsid=True)
        for fd in (to_page, from_page, *ends):
            os.close(fd)
        targets = self.call("Target.getTargets")["targetInfos"]
        [page] = [one for one in targets if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def listen(self):
        """Record what the page asks for from now on."""
        self.call("Network.enable")

    def show(self, width, scheme):
        """Set the page's width, and light or dark colours."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        dark = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=dark)

    def evaluate(self, expression):
        """Evaluate JavaScript, and await its promise."""
        how = {"awaitPromise": True, "returnByValue": True}
        done = self.call("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def call(self, method, **params):
        self._number += 1
        call = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(call).encode() + b"\0")
        for answer in self._answers():
            if answer.get("method") == "Network.requestWillBeSent":
                self.asked.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError("Chromium has ended")

    def _answers(self):
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for fd in (self._read, self._write):
            os.close(fd)
