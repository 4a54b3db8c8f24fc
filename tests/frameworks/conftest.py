"""What the tests of the recipes get: the recipes on the path, and a folder of their own."""

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import recipes as page

with contextlib.suppress(ImportError):
    import tqdm

    # Its monitor is a thread, and its lock a semaphore, which the check for leaks would find.
    tqdm.tqdm.monitor_interval = 0
    tqdm.tqdm.get_lock()


def pytest_collection_modifyitems(items):
    """Frameworks warn of much; what cseq warns of stays an error."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.filterwarnings("error:iterating a manager"))


@pytest.fixture(scope="session")
def recipes():
    """Let the recipes be imported."""
    sys.path.insert(0, str(page.RECIPES))
    yield page.RECIPES
    sys.path.remove(str(page.RECIPES))


@pytest.fixture(autouse=True)
def folder(recipes, tmp_path, monkeypatch):
    """Run each test in an empty folder, on the CPU, without a look at the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path
