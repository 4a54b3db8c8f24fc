"""The engine: a pool combines a crew with the tickets that the crew works on.

``pool``      the feed and its Python callbacks for waits, errors and counts
``_feed``     posts tickets, fetches batches and items
``_streams``  the ticket sources of streams
``crews``     the runners: processes, threads, or the training thread
``tickets``   the requested work: batches from an order, items from streams
``worker``    the life cycle of a worker, in a process or a thread
``tuning``    how 'auto' chooses the number of workers and the buffer size
``remake``    rebuilds a batch of any epoch in the calling thread
"""
