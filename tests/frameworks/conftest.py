"""The recipes on the path, and a folder for each test, in which it and its scripts run."""

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recipes import RECIPES

sys.path.insert(0, str(RECIPES))

with contextlib.suppress(ImportError):
    import tqdm

    # tqdm's monitor is a thread, and its lock a semaphore, which the check for leaks would find.
    tqdm.tqdm.monitor_interval = 0
    tqdm.tqdm.get_lock()


def pytest_collection_modifyitems(items):
    """Ignore the frameworks' many warnings; cseq's warnings stay errors."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.filterwarnings("error:iterating a manager"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run each test in an empty folder, on the CPU, without the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
