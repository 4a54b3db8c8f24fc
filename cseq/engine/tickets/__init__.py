"""What a pool requests: batches from an order, or items from streams."""
