"""Stage 1, in a worker: the user's code makes batches and items.

``indexer``   ★ indices → batch, by the user's worker
``producer``  a worker's side of a stream: makes the items that are asked for
``dataset``   `from_dataset`: a map-style data set as a worker
``packing``   `packed`: a list of objects, in memory once for all processes
``leaving``   ``on_error='skip'``: the samples and batches that are left out
``context``   `rng`, `empty`, `worker_info`: for use inside an indexer
``seeding``   seeds of `random`, ``numpy.random`` and torch, batch by batch
"""
