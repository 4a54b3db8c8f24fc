"""A worker's position in one line."""

import os
import site
import sysconfig
from pathlib import Path

import cseq
from cseq.processes.stacks import location_in

CSEQ = Path(cseq.__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))
INSTALLED = Path(site.getsitepackages()[0])
LOADER = """\
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
  File "<frozen importlib._bootstrap>", line 1147 in _find_and_load_unlocked
"""
WATCHER = f"""\
Thread 0x00007f75b07ff6c0 (most recent call first):
  File "{STANDARD}/threading.py", line 982 in run

Current thread 0x00007f75b1c44740 (most recent call first):
"""
WORKER = f'''\
  File "{CSEQ}/processes/worker.py", line 119 in read
  File "<string>", line 1 in <module>
'''


def frame(path, line, function="<module>"):
    """Write a frame like faulthandler."""
    return f'  File "{path}", line {line} in {function}\n'


def test_imports(tmp_path, monkeypatch):
    """It has the chain of packages from the user's module on, and the innermost frames."""
    monkeypatch.syspath_prepend(tmp_path)
    stacks = WATCHER + "".join([
        frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
        frame(INSTALLED / "torch" / "_ops.py", 30), LOADER,
        frame(INSTALLED / "torch" / "__init__.py", 12), LOADER, frame(tmp_path / "data.py", 3),
        LOADER, WORKER,
    ])  # fmt: skip
    frames = "torch/_ops.py:30 in <module>, torch/__init__.py:12 in <module>, data.py:3 in <module>"
    assert location_in(stacks) == f"is still importing data → torch ({frames.replace('/', os.sep)})"


def test_what_imports_nothing(tmp_path, monkeypatch):
    """It has the innermost frames, one of a kind, and the innermost one of the user's code."""
    monkeypatch.syspath_prepend(tmp_path)
    own, library = tmp_path / "data.py", STANDARD / "socket.py"
    stacks = WATCHER + "".join([
        *(frame(library, line, "recv") for line in (1, 2, 2, 3)),
        *(frame(own, line, "deep") for line in (8, 8, 4)),
        WORKER,
    ])  # fmt: skip
    inner = ", ".join(f"socket.py:{line} in recv" for line in (1, 2))
    assert location_in(stacks) == f"is still in {inner}, data.py:8 in deep"


def test_what_has_no_frames_of_the_user():
    """It has a frame of cseq's, or the reason why there is none."""
    path = os.path.join("cseq", "processes", "worker.py")
    assert location_in(WATCHER + WORKER) == f"is still in {path}:119 in read"
    silent = "(the process does not respond; it may be stopped)\n"
    assert location_in(silent) == f"has no stack {silent.strip()}"
