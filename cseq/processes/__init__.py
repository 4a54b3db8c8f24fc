"""Worker processes: startup, replacement after a death, and shutdown.

``supervisor``  starts, replaces and stops the worker processes of a pool
``worker``      both sides of a worker process: setup, messages and stack traces
``deaths``      counts worker deaths and decides whether to replace a worker
``launcher``    starts processes with forkserver, spawn or fork
``spawning``    pickles multiprocessing objects for new processes
"""
