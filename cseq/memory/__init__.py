"""Shared memory for batches.

``arena``        the memory that a pool and its workers share: rings, slots and leases
``_slots``       ★ slot owners and leases
``descriptors``  anonymous files and received descriptors
"""
