"""Stage 1, in a worker: user code makes batches and items.

``indexer``   ★ calls the user's worker, which turns indices into a batch
``producer``  the worker's side of a stream: makes the requested items
``dataset``   `from_dataset`: turns a map-style data set into a worker
``packing``   `packed`: a list of objects that all processes share in memory
``leaving``   ``on_error='skip'``: leaves out samples and batches that fail
``context``   functions for use in an indexer: `rng`, `empty`, `worker_info`
``seeding``   seeds `random`, ``numpy.random`` and torch for each batch
"""
