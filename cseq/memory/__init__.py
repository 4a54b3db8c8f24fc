"""The shared memory for batches.

``arena``        the memory that a pool and its workers share: rings, slots and leases
``_slots``       ★ who owns which slot, and leases
``descriptors``  anonymous files and received descriptors
"""
