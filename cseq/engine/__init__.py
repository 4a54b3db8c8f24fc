"""The engine: a pool consists of a crew and the tickets it works on.

``pool``      the feed and its Python callbacks: waits, errors, counts
``_feed``     posts tickets, fetches batches and items
``_streams``  the ticket sources of streams
``crews``     the runners: processes, threads, or the training thread
``tickets``   the requested work: batches of an order, items of streams
``worker``    the life cycle of a worker, in a process or a thread
``tuning``    how 'auto' chooses the number of workers and the buffer
``remake``    rebuilds a batch of any epoch in the calling thread
"""
