"""The engine: a pool combines a crew with the tickets that the crew works on.

``pool``      the feed and its Python callbacks for waiting, errors and statistics
``_feed``     posts tickets and fetches batches and items
``_streams``  ticket sources for streams
``crews``     run the workers: in processes, in threads, or in the training thread
``tickets``   requests for batches from an order, or for items from streams
``worker``    the life cycle of a worker in a process or a thread
``tuning``    chooses the number of workers and the buffer size for 'auto'
``remake``    remakes a batch from any epoch in the calling thread
"""
