"""Worker processes: startup, replacement after a death, and shutdown.

``supervisor``  starts, replaces and stops one pool's worker processes
``worker``      one worker process: setup, messages and stack traces, on both sides
``deaths``      counts worker deaths and decides when there are too many
``launcher``    starts a process: forkserver, spawn, fork
``spawning``    pickles multiprocessing objects for new processes
"""
