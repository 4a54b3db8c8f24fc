"""The shared memory that batches lie in.

``shared``       what a pool and its workers share: rings, slots
``arena``        slots of shared memory, and the leases on them
``segment``      the anonymous file that slots lie in
``descriptors``  anonymous files, received descriptors: all close-on-exec
"""
