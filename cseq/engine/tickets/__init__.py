"""A pool's requests: batches from an order, or items from streams."""
