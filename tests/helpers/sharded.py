"""Shards in a store or a folder, with each sample's number in it, and what tests ask about them."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

PATIENCE = 60.0  # seconds


def npy(first, rows, width=150):
    """Give the bytes of an .npy file whose rows have their numbers, from `first` on."""
    file = io.BytesIO()
    numbers = np.arange(first, first + rows)
    np.save(file, np.repeat(numbers[:, None], width, 1).astype(np.int32))
    return file.getvalue()


def npy_shards(sizes, width=150):
    """Give the .npy shards of some sizes, by name."""
    firsts = np.cumsum(sizes) - sizes
    return {
        f"train/{number:03}.npy": npy(int(first), size, width)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    }


def written(objects, folder):
    """Write objects to a folder; return it."""
    for name, data in objects.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder)


def whole(server, key="*"):
    """Count the requests for whole objects that a server has answered well."""
    seen = server.log(key, "GET")
    return len([one for one in seen if not one.span and one.status == 200 and not one.fault])


def s3(server):
    """Give obstore's store for a server."""
    stores = pytest.importorskip("obstore.store")
    return stores.S3Store("any", **server.options)


def fetching(cache):
    """Give the number of the process that fetches into a folder; None: there is none."""
    wanted = Path(cache, "fetcher").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[-3].endswith(f":{wanted}"):
            return int(words[4])
    return None


def kill_fetching(cache):
    """Kill the process that fetches into a folder, and wait for its end."""
    number = fetching(cache)
    descriptor = os.pidfd_open(number)
    os.kill(number, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while fetching(cache) == number:
        assert time.monotonic() < end
        time.sleep(0.005)
    os.close(descriptor)


def wait_until(holds):
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
