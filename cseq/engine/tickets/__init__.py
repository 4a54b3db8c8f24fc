"""A pool's requests for batches from an order, or for items from streams."""
