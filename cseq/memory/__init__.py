"""The shared memory that batches lie in.

``arena``        what a pool and its workers share: rings, slots, and the leases on slots
``_slots``       ★ the owner of each slot, and leases
``descriptors``  anonymous files, received descriptors: all close-on-exec
"""
