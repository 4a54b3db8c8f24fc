"""Stage 1, in a worker: user code makes batches and items.

``indexer``   ★ indices → batch, by the user's worker
``producer``  the worker side of a stream: makes the requested items
``dataset``   `from_dataset`: turns a map-style data set into a worker
``packing``   `packed`: a list of objects that all processes share in memory
``leaving``   ``on_error='skip'``: leaves out samples and batches that raise
``context``   `rng`, `empty`, `worker_info`: for use inside an indexer
``seeding``   seeds `random`, ``numpy.random`` and torch for each batch
"""
