"""Worker processes: startup, replacement after a death, and shutdown.

``supervisor``  starts, replaces and stops the worker processes of a pool
``worker``      a worker process: setup, messages and stack traces, on both sides
``deaths``      counts worker deaths and decides when there are too many
``launcher``    starts processes with forkserver, spawn or fork
``spawning``    pickles multiprocessing objects for new processes
"""
