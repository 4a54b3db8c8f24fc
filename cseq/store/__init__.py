"""Lets processes share decoded samples and shards from an object store.

::

    from cseq import store

    arrays = store.Npy("s3://bucket/train/", cache="/local/train", limit="64 GB")
    manager = cseq.MPSequence(arrays, batch_size=32, num_workers=2, order=arrays.order(window=4))
    with manager.start() as batches:
        for batch in batches:
            ...

``npy``         `Npy`: rows of arrays
``tar``         `Tar`: samples that consist of several files
``parquet``     `Parquet`: rows of tables
``shards``      the base class for readers
``reader``      the part of a reader that the fetcher uses
``client``      a process's connections to the fetcher
``fetcher``     the process that fetches shards, one per folder
``plan``        predicts which shards an order will use
``objects``     lists and reads the objects in a store, with obstore
``cache``       `cseq.cached`: a data set with cached samples
``entries``     the folder of cached samples
``folder``      a folder that processes share
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cseq.store.npy import Npy as Npy
    from cseq.store.parquet import Parquet as Parquet
    from cseq.store.shards import Shards as Shards
    from cseq.store.shards import ShardStats as ShardStats
    from cseq.store.tar import Tar as Tar

__all__ = ["Npy", "Parquet", "ShardStats", "Shards", "Tar"]

_ELSEWHERE = {
    "Npy": "cseq.store.npy",
    "Parquet": "cseq.store.parquet",
    "ShardStats": "cseq.store.shards",
    "Shards": "cseq.store.shards",
    "Tar": "cseq.store.tar",
}


def __getattr__(name: str) -> object:
    """Import a reader on first use."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE[name]), name)
