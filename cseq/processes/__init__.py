"""Worker processes: started, replaced when they die, ended.

``supervisor``  the worker processes of one pool
``worker``      one worker process: setup, messages, stacks, at both ends
``deaths``      how often workers died, and whether that is too often
``launcher``    starting a process: forkserver, spawn, fork
``spawning``    objects of multiprocessing, pickled for new processes
"""
