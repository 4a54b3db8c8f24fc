"""The pools, which run the stages.

``base``     the feed over rings, and the Python that it calls
``inline``   the calling thread, batch by batch: this is test mode
``thread``   threads of this process
``process``  worker processes
``stream``   worker processes, each with items of its own
``tuning``   how many workers, how large a buffer: what 'auto' takes
``remake``   a batch of any epoch once more, in the calling thread
"""
