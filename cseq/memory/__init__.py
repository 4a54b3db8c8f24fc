"""The shared memory that batches lie in.

``arena``        what a pool and its workers share: rings, slots, and the leases on these
``descriptors``  anonymous files, received descriptors: all close-on-exec
"""
