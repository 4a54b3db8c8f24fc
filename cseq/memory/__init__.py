"""The shared memory that holds batches.

``arena``        the memory shared by a pool and its workers: rings, slots, slot leases
``_slots``       ★ slot ownership and leases
``descriptors``  anonymous files and received descriptors, all close-on-exec
"""
