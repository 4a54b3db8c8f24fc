"""The engine: a pool is a crew that works on tickets.

``pool``      the feed over rings, and the Python that it calls: waits, errors, counts
``_feed``     posts tickets, takes out batches and items
``_streams``  what the tickets of streams ask for
``crews``     who answers tickets: processes, threads, or the loop's own thread
``tickets``   what is asked for: batches of an order, items of streams
``worker``    the life of a worker, in a process or in a thread
``tuning``    how 'auto' chooses the number of workers and the buffer
``remake``    a batch of any epoch once more, in the calling thread
"""
