"""Objects in S3, with retries and a cache."""

import asyncio
import logging
import os
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import obstore
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

import cseq

logging.getLogger("werkzeug").setLevel("ERROR")
# This server stands for your storage.
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
host, port = server.get_host_and_port()
options = {
    "endpoint": f"http://{host}:{port}",
    "region": "us-east-1",
    "access_key_id": "key",
    "secret_access_key": "secret",
    "client_options": {"allow_http": True, "timeout": "5s", "connect_timeout": "2s"},
    "retry_config": {
        "max_retries": 3,
        "retry_timeout": timedelta(seconds=10),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    },
}


class Objects:
    """One object per sample, kept in a folder once it was read."""

    def __init__(self, cache):
        # The worker creates it, because connections cannot be pickled.
        self.store = S3Store("samples", **options)
        self.cache = Path(cache)
        self.cache.mkdir(exist_ok=True)

    def __getitem__(self, indices):
        samples = asyncio.run(self.read([f"{index:06}.bin" for index in indices]))
        return np.stack([np.frombuffer(sample, "uint8") for sample in samples]), indices

    # Read all objects of a batch at the same time.
    async def read(self, names):
        return await asyncio.gather(*map(self.read_one, names))

    async def read_one(self, name):
        path = self.cache / name
        if path.exists():
            return path.read_bytes()
        found = await obstore.get_async(self.store, name)
        data = bytes(await found.bytes_async())
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        # This way, no worker ever sees half a file.
        part.replace(path)
        return data


def worker():
    return Objects("cache")


# Create the bucket.
urlopen(Request(f"http://{host}:{port}/samples", method="PUT"))
bucket = S3Store("samples", **options)
for number in range(200):
    obstore.put(bucket, f"{number:06}.bin", np.full(64, number, "uint8").tobytes())

shared = {"num_workers": 2, "out_type": "cpu", "dtype": None, "seed": 1, "timeout": 60}
with cseq.MPSequence(worker, 100, **shared).start() as batches:
    for samples, labels in batches:
        pass
    print(samples.shape, bool((samples[:, 0] == labels).all()))
    # The cache works without the store.
    server.stop()
    print(sum(len(labels) for samples, labels in batches))

# This sample is not in the cache.
try:
    with cseq.MPSequence(worker, np.arange(100, 200), **shared).start() as batches:
        next(iter(batches))
except Exception as error:
    print(type(error).__name__)
