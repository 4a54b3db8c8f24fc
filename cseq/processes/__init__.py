"""Worker processes: startup, replacement after a death, and shutdown.

``supervisor``  the worker processes of one pool
``worker``      a single worker process: setup, messages and stacks, at both ends
``deaths``      counts worker deaths and decides when there are too many
``launcher``    starts a process: forkserver, spawn, fork
``spawning``    pickles multiprocessing objects for new processes
"""
